"""The rule that keeps a change: its e-value against the integral that defines it, and nights of a
hundred tries, simulated with the tool's own `next_test` and `look`: how many are kept falsely."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from scipy import optimize, stats

from lingua.tools.runs.compare.statistics import MIXTURE, anytime_interval, paired
from lingua.tools.study import rule
from lingua.tools.study.rule import Test as Try  # pytest collects what is named Test
from lingua.tools.study.rule import e_value, look, next_test

pytestmark = pytest.mark.quick

ERROR, TRIES, MAX_PAIRS, COUNTS = 0.1, 100, 40, range(2, 41)


def e_of(x: np.ndarray, freedom: float = 0.0, variance: float = 0.0) -> float:
    return e_value(len(x), float(x.sum()), float(x @ x), freedom, variance)


def integrated(x: np.ndarray, freedom: float, variance: float) -> float:
    """The ratio of the two mixtures, integrated over the logarithm of the deviation, by a sum, and
    for the better one over the mean in deviations, by the rule of Gauss and Legendre."""
    log_sigma, (nodes, weights) = np.linspace(-10, 30, 1601), np.polynomial.legendre.leggauss(120)
    sigma, ratio = np.exp(log_sigma), 7 * (nodes[:, None] + 1)  # 0 to 14
    prior = -freedom * (log_sigma + variance / (2 * sigma**2))  # its logarithm, times sigma
    null = sum(stats.norm.logpdf(v, 0, sigma) for v in x) + prior
    better = sum(stats.norm.logpdf(v, ratio * sigma, sigma) for v in x) + prior
    better = better + stats.halfnorm.logpdf(ratio, scale=MIXTURE**-0.5)
    return float(7 * (weights @ np.exp(better)).sum() / np.exp(null).sum())


@pytest.mark.parametrize(("freedom", "variance"), [(0.0, 0.0), (4.0, 0.3), (1.5, 5.0)])
@pytest.mark.parametrize("n", range(1, 7))
def test_the_e_value_is_the_ratio_of_the_mixtures_that_define_it(n, freedom, variance):
    for mean in (-0.8, 0.0, 1.5):
        x = mean + np.random.default_rng(n).normal(size=n)
        exact = pytest.approx(integrated(x, freedom, variance), rel=1e-6)
        assert e_of(x, freedom, variance) == exact
        # Controls: without the factor 2 of a half normal, and one degree of freedom too many.
        assert e_of(x, freedom, variance) / 2 != exact
        assert e_of(x, freedom + 1, freedom * variance / (freedom + 1)) != exact


@pytest.mark.parametrize("freedom", [0.0, 4.0])
@pytest.mark.parametrize("n", [2, 4])
def test_the_e_value_is_1_in_the_mean_of_equal_changes_and_less_of_worse_ones(n, freedom):
    """With a prior: of changes whose deviations are distributed as it says."""
    rng, variance, sigma = np.random.default_rng(n), 2.0 * bool(freedom), np.full(40_000, 1000.0)
    if freedom:
        sigma = np.sqrt(freedom * variance / rng.chisquare(freedom, 40_000))
    x = rng.normal(size=(40_000, n)) * sigma[:, None]
    e = np.array([e_of(row, freedom, variance) for row in x])
    assert e.mean() == pytest.approx(1, abs=4 * e.std() / 200)
    assert np.mean([e_of(row, freedom, variance) for row in x - 0.3 * sigma[:, None]]) < 0.8


def test_without_a_prior_the_unit_of_the_losses_decides_nothing():
    for x in 0.8 + np.random.default_rng(0).normal(size=(200, 6)):
        small, large = (look(Try(1, 4.0, 0.7 * k, 0.0, 40), k * x) for k in (1.0, 1000.0))
        assert (small.verdict, small.e) == (large.verdict, pytest.approx(large.e))


@pytest.mark.parametrize(("freedom", "variance"), [(0.0, 0.0), (4.0, 0.5)])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_interval_contains_what_the_two_sided_e_value_does_not_refute(n, freedom, variance):
    x = np.random.default_rng(n).normal(0.4, 1, n)

    def excess(m: float) -> float:
        s, total = ((x - m) ** 2).sum() + freedom * variance, (x - m).sum()
        b = s - total**2 / (n + MIXTURE)
        return (MIXTURE / (n + MIXTURE)) ** 0.5 * (s / b) ** ((n + freedom) / 2) - 20

    interval = anytime_interval(x, 0.95, freedom, variance)
    if n <= 3 and not freedom:  # so few differences refute nothing
        assert excess(1e6) < 0 and (interval.low, interval.high) == (-math.inf, math.inf)
    else:
        ends = [optimize.brentq(excess, x.mean(), x.mean() + far) for far in (-1e4, 1e4)]
        assert (interval.low, interval.high) == pytest.approx(ends)


def test_a_try_needs_what_e_lond_says_and_all_shares_add_up_to_the_error():
    def needed(number: int, n_kept: int = 0) -> float:
        return next_test(number, n_kept, [], ERROR, 1.0, 0.0, MAX_PAIRS).needed

    numbers, decay = np.arange(1, 5001), rule.DECAY
    shares = 1 / np.array([needed(t) for t in range(1, 5001)])
    total = np.sum(numbers**-decay) + 5000.5 ** (1 - decay) / (decay - 1)  # the rest: an integral
    assert shares == pytest.approx(ERROR * numbers**-decay / total, rel=1e-6)
    assert ERROR * 0.7 < shares.sum() < ERROR
    assert [needed(7, kept) * (kept + 1) for kept in (1, 2, 9)] == pytest.approx([needed(7)] * 3)


def test_the_prior_is_the_pooled_variance_of_at_least_three_tries_that_have_one():
    two = [(1.0, 2), (2.0, 5), (0.0, 9), (3.0, 1)]
    assert not next_test(5, 0, two, ERROR, 1.0, 0.0, MAX_PAIRS).freedom
    test = next_test(5, 0, [*two, (3.0, 3)], ERROR, 1.0, 0.0, MAX_PAIRS)
    assert test.variance == pytest.approx((1 * 1 + 4 * 4 + 2 * 9) / (1 + 4 + 2))


def test_a_try_is_dropped_that_is_bit_equal_or_without_hope_or_not_shown():
    test = Try(1, 1e9, 1.0, 0.0, 4, freedom=4.0, variance=2.0)
    assert look(test, [0.0, 0.0]).reason == "its losses are those of the base to the bit"
    x = [0.1, -0.3, 0.2]  # of mean 0 and sum of squares 0.14
    best = rule.HOPE * math.sqrt((0.14 + 4 * 2) / (2 + 4)) / math.sqrt(3)
    assert look(replace(test, effect=1.99 * best), x).verdict is None
    assert f" {best:.2g} better with 3" in look(replace(test, effect=2.01 * best), x).reason
    assert look(test, [1.0, 2.0, 1.5, 1.2]).reason == "not shown with 4 pairs"
    assert look(replace(test, needed=3.0), [1.0, 2.0, 1.5, 1.2]).verdict == "kept"


def test_a_simplification_is_kept_if_it_is_not_worse_by_the_margin():
    test = next_test(1, 0, [], ERROR, 1.0, 0.5, MAX_PAIRS)
    noise = 0.2 * np.random.default_rng(0).normal(size=MAX_PAIRS)
    for x in (np.zeros(MAX_PAIRS), noise - noise.mean()):
        assert {look(test, x[:n]).verdict for n in COUNTS} == {None, "kept"}
    worse = look(test, noise[:5] - 0.8)
    assert worse.verdict == "dropped" and "it is worse by" in worse.reason


@dataclass(frozen=True)
class Scenario:
    """Changes of a night, in typical deviations of a difference; one is worth keeping."""

    real: float = 0.0  # share of changes that have the effect
    effect: float = 1.0
    harmful: float = 0.0  # share with an effect of -1
    spread: float = 0.0  # of the logarithm of the changes' deviations
    skew: float = 0.0  # 0: normal; else deviation of a log-normal, with the sign of the skewness
    shared: bool = True  # all changes are compared with the same runs of the base
    inert: float = 0.0  # share with a hundredth of the deviation: they do hardly anything

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """True effects, and differences: [TRIES, MAX_PAIRS]. Half of the variance is that of the
        base's runs, which all tries of a night reuse: its luck at a seed is all tries' luck."""
        kind, z = rng.random(TRIES), rng.normal(size=(2 * TRIES, MAX_PAIRS))
        if s := self.skew:
            z = np.sign(s) * (np.exp(abs(s) * z) - math.exp(s**2 / 2)) / stats.lognorm(abs(s)).std()
        effects = self.effect * (kind < self.real) - 1.0 * (kind > 1 - self.harmful)
        deviations = np.exp(self.spread * rng.normal(size=TRIES))
        deviations[rng.random(TRIES) < self.inert] /= 100
        noise = (z[:TRIES] + (z[-1] if self.shared else z[TRIES:])) * math.sqrt(0.5)
        return effects, effects[:, None] + deviations[:, None] * noise


def night(differences: np.ndarray, prior: bool = True, needed: float | None = None) -> tuple:
    """Which the tool keeps, after how many pairs in all. `needed`: an e-value for all tries."""
    history, kept, n_pairs = list[tuple[float, int]](), list[bool](), 0
    for number, row in enumerate(differences.tolist(), 1):
        test = next_test(number, sum(kept), history, ERROR, 1.0, 0.0, MAX_PAIRS)
        test = replace(test, needed=needed or test.needed)
        decided = next(f for n in COUNTS if (f := look(test, row[:n])).verdict)
        kept.append(decided.verdict == "kept")
        n_pairs += decided.pairs
        history += [(decided.deviation, decided.pairs)] * prior
    return kept, n_pairs


def sequences(differences: np.ndarray) -> tuple:
    """The same of a confidence sequence for each change, until it excludes zero."""
    kept, n_pairs = list[bool](), 0
    for row in differences:
        intervals = (anytime_interval(row[:n], 0.95) for n in COUNTS)
        looks = [(e.low > 0, e.freedom + 1) for e in intervals if e.excludes_zero]
        kept.append(bool(looks) and looks[0][0])
        n_pairs += looks[0][1] if looks else MAX_PAIRS
    return kept, n_pairs


RULES = {
    "lingua study": night,
    "without the prior": lambda x: night(x, prior=False),
    "one run is lower": lambda x: (x[:, 0] > 0, TRIES),
    "three pairs, 95 % interval": lambda x: ([paired(r[:3], 0.95).low > 0 for r in x], 3 * TRIES),
    "a confidence sequence each": sequences,
}


def rates(scenario: Scenario, rule_name: str, n_nights: int, **keys: float) -> tuple[float, ...]:
    """Means of nights: false keeps, their share of the kept and its standard error, the share of
    the real ones that are kept, pairs."""
    rng, rows = np.random.default_rng(0), []
    for _ in range(n_nights):
        effects, differences = scenario.draw(rng)
        kept, n_pairs = RULES[rule_name](differences, **keys)
        false, found = (int((np.array(kept) & x).sum()) for x in (effects <= 0, effects > 0))
        rows.append((false, false / max(1, sum(kept)), found, (effects > 0).sum(), n_pairs))
    false, share, found, real, n_pairs = np.mean(rows, axis=0)
    error = np.std(rows, axis=0)[1] / n_nights**0.5
    return false, share, error, found / real if real else 1.0, n_pairs


def test_few_of_the_kept_changes_of_a_night_are_false():
    """The control keeps whatever shows 20 against one change, as if there were no others."""
    false, share, _, power, n_pairs = rates(Scenario(real=0.1), "lingua study", 20)
    assert share <= ERROR and power > 0.7 and n_pairs < 800
    assert rates(Scenario(real=0.1), "lingua study", 20, needed=20.0)[0] > 5 * false + 0.5


PROMISES = {  # most false keeps of a night, and their largest share; least power; most pairs
    "nulls": (Scenario(), 0.1, ERROR, 0, 600),
    "10 % of 0.5": (Scenario(real=0.1, effect=0.5), 0.1, ERROR, 0.07, 750),
    "10 % of 1": (Scenario(real=0.1), 0.1, ERROR, 0.78, 750),
    "10 % of 2": (Scenario(real=0.1, effect=2.0), 0.1, ERROR, 0.97, 650),
    "30 % harmful": (Scenario(real=0.1, harmful=0.3), 0.1, ERROR, 0.78, 650),
    "a base each": (Scenario(real=0.1, shared=False), 0.1, ERROR, 0.8, 750),
    "unequal": (Scenario(real=0.1, spread=0.6), 0.1, ERROR, 0.58, 950),
    "half inert": (Scenario(real=0.1, inert=0.5), 0.1, ERROR, 0.78, 600),
    "skewed to better": (Scenario(real=0.1, skew=1.0), 0.1, ERROR, 0.9, 700),
    # Weaker where most differences are a little above the mean and a few far below it.
    "skewed to worse": (Scenario(real=0.1, skew=-1.0), 1.2, ERROR, 0.8, 700),
    "nulls skewed to worse": (Scenario(skew=-1.0), 1.2, 0.25, 0, 600),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", PROMISES)
def test_nights_keep_few_false_changes_and_most_of_the_real_ones(name):
    scenario, most_false, largest_share, least_power, most_pairs = PROMISES[name]
    of_rules = {r: rates(scenario, r, 500 if r == "lingua study" else 30) for r in RULES}
    for rule_name, row in of_rules.items():
        print(f"| {name} | {rule_name} |", " | ".join(f"{x:.3f}" for x in row), "|")
    false, share, error, power, n_pairs = of_rules["lingua study"]
    assert false <= most_false and share + 3 * error <= largest_share
    assert power >= least_power and n_pairs <= most_pairs
    assert scenario.skew or all(of_rules[r][0] > 5 * false for r in list(RULES)[2:])
