"""Intervals, and the numbers of pairs they take: against scipy, and on the recorded pool of real
pairs, whose labels are swapped so that there is no difference, or to whom one is added."""

from collections.abc import Callable
from itertools import combinations, product

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from lingua.tools.runs.compare.statistics import (
    MAX_PAIRS,
    MIXTURE,
    POWER,
    Estimate,
    Spread,
    anytime_interval,
    dunnett,
    far_value,
    is_normal,
    paired,
    pooled,
    proportion,
    seed_gain,
    sign_flip,
    unpaired,
)
from lingua.tools.runs.compare.text import PRICE
from tests.records.pairs import BASE, LONG, LONG_STEPS, SAME, TINY
from tests.records.pairs import CHANGES as MEASURED
from tests.tools.runs.compare.pool import LOSSES, POOL, SEEDS

pytestmark = pytest.mark.quick

CHANGES = [arm for arm in LOSSES if arm != "base"]
BASE_LOSSES = LOSSES["base"][:, -1]
LEVEL = 0.95
DRAWS = 2000
KNOWN = 1e12  # degrees of freedom of a deviation that is the true one


def bound(draws: int, rate: float = 1 - LEVEL) -> float:
    """The share that so many independent draws of this rate exceed in 1 of 1,000 cases."""
    return float(stats.binom.ppf(0.999, draws, rate)) / draws


def ends(estimate: Estimate | None) -> tuple[float, float]:
    assert estimate is not None
    return estimate.low, estimate.high


def test_intervals_are_those_of_scipy():
    rng = np.random.default_rng(0)
    a, b = rng.normal(1, 2, 6), rng.normal(0, 1, 4)
    one = stats.ttest_1samp(a, 0).confidence_interval(0.9)
    assert ends(ours := paired(a, 0.9)) == pytest.approx(tuple(one))
    two = stats.ttest_ind(a, b, equal_var=False)
    error = (a.mean() - b.mean()) / two.statistic  # Welch's; with the freedom of four runs
    half = error * stats.t.ppf(0.95, 3)
    other = unpaired(a, b, 0.9)
    assert ends(other) == pytest.approx((a.mean() - b.mean() - half, a.mean() - b.mean() + half))
    assert ours.deviation == pytest.approx(np.std(a, ddof=1))
    assert other.deviation == pytest.approx(np.sqrt(np.var(a, ddof=1) + np.var(b, ddof=1)))
    share = stats.binomtest(4, 5).proportion_ci(0.9)
    assert proportion(4, 5, 0.9) == pytest.approx((share.low, share.high))
    assert paired([1.0], LEVEL) is None and unpaired([1.0], [1.0, 2.0], LEVEL) is None
    for flat in (paired([0.5, 0.5], LEVEL), unpaired([1.5, 1.5], [1.0, 1.0], LEVEL)):
        assert ends(flat) == (0.5, 0.5) and flat.excludes_zero


@pytest.mark.parametrize("pairs", [2, 3, 5, 10, 40])
@pytest.mark.parametrize(("level", "arms"), [(0.95, 1), (0.99, 1), (0.95, 4)])
def test_power_is_the_integral_over_the_deviation_that_is_measured(pairs, level, arms):
    """P(t > c) = E[Phi(shift - c * sqrt(V / df))] with V of chi-square: no noncentral t."""
    freedom = arms * (pairs - 1)

    def found(v: float, shift: float, critical: float) -> float:
        part = stats.norm.cdf(shift - critical * np.sqrt(v / freedom))
        return float(part * stats.chi2.pdf(v, freedom))

    critical = stats.t.ppf((1 + level) / 2, freedom)
    for effect in (0.3, 1.0, 4.0):
        expected, _ = integrate.quad(found, 0, np.inf, (effect * pairs**0.5, critical), limit=200)
        ours = Spread(1.0, KNOWN, level, arms).power(effect, pairs)
        assert ours == pytest.approx(expected, abs=1e-6)


def test_the_number_of_pairs_inverts_power():
    def needed(effect: float, deviation: float = 1.0) -> int | None:
        return Spread(deviation, KNOWN, LEVEL).pairs_for(effect)

    for effect, count in ((1.0, 10), (2.0, 5), (0.5, 34)):  # as G*Power 3 has them
        assert needed(2 * effect, 2.0) == needed(-effect) == count
        of = [Spread(1.0, KNOWN, LEVEL).power(effect, pairs) for pairs in (count, count - 1)]
        assert of[0] >= POWER > of[1]
    assert needed(1e-6) is None and needed(0.0) is None
    few = needed(0.03)
    assert few is not None and 8000 < few < MAX_PAIRS


DISTRIBUTIONS = {
    "normal": lambda rng, *shape: rng.normal(size=shape),
    "t3": lambda rng, *shape: rng.standard_t(3, size=shape),
}


def shown_after(draws: np.ndarray, interval: Callable[..., Estimate | None]) -> np.ndarray:
    """After how many pairs one who looks after each has first seen an interval without zero; inf
    where none was: [draws]. Half widths are multiples of the deviation."""
    shown = np.zeros(draws.shape, bool)
    for n in range(2, draws.shape[1] + 1):
        estimate = interval(draws[0, :n], LEVEL)
        width = (estimate.high - estimate.mean) / estimate.deviation
        shown[:, n - 1] = abs(draws[:, :n].mean(1)) > width * draws[:, :n].std(1, ddof=1)
    return np.where(shown.any(1), shown.argmax(1) + 1, np.inf)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_one_who_looks_after_each_of_50_pairs_claims_nothing_in_95_percent(distribution):
    draws = DISTRIBUTIONS[distribution](np.random.default_rng(4), 10_000, 50)
    shares = [np.isfinite(shown_after(draws, of)).mean() for of in (anytime_interval, paired)]
    assert shares[0] <= 0.05 and shares[1] > 0.15  # Student's t is not for that


def test_the_price_of_looking_is_the_one_that_is_printed():
    rng = np.random.default_rng(5)
    for effect, half, often, fixed in PRICE:
        shown = shown_after(rng.normal(effect, size=(10_000, 50)), anytime_interval)
        assert np.quantile(shown, (0.5, 0.8)) == pytest.approx((half, often))
        assert Spread(1.0, KNOWN, LEVEL).pairs_for(effect) == fixed


def test_the_anytime_interval_has_the_differences_that_the_e_value_does_not_refute():
    """By the likelihoods themselves: a normal prior of the effect, 1 / deviation of the deviation,
    integrated."""
    x = np.random.default_rng(6).normal(1.0, size=7)

    def likelihood(values: np.ndarray, spread: float) -> float:
        covariance = np.eye(len(values)) + spread
        density = stats.multivariate_normal(cov=covariance).pdf
        n = len(values)
        return integrate.quad(lambda s: density(values / s) * s ** (-n - 1), 0, np.inf)[0]

    for end in ends(anytime_interval(x, LEVEL)):
        e_value = likelihood(x - end, 1 / MIXTURE) / likelihood(x - end, 0.0)
        assert e_value == pytest.approx(1 / (1 - LEVEL), rel=1e-3)
    assert np.isinf(anytime_interval(x[:2], LEVEL).high)


@pytest.mark.parametrize("pairs", [2, 3, 4, 6, 10])
def test_the_smallest_effect_is_shown_in_80_percent_over_the_deviations_that_are_measured(pairs):
    rng = np.random.default_rng(pairs)
    measured = rng.normal(size=(20_000, pairs)).std(1, ddof=1)
    effect = Spread(1.0, pairs - 1, LEVEL).smallest_effect(pairs) * measured
    shown = stats.ttest_1samp(rng.normal(size=(pairs, 20_000)) + effect, 0)
    assert np.mean((shown.pvalue < 0.05) & (shown.statistic > 0)) == pytest.approx(POWER, abs=0.015)


@pytest.mark.parametrize(("ratio", "common"), [(1.0, 0.0), (1.0, 3.0), (3.0, 3.0)])
def test_the_interval_of_what_common_seeds_are_worth_has_the_true_ratio(ratio, common):
    """Of arms with equal variances, and of one that varies more."""
    rng = np.random.default_rng(7)
    own, shared = rng.normal(size=(2, 1000, 5)), common * rng.normal(size=(1000, 5))
    own[1] *= ratio
    draws = np.moveaxis(own + shared, 0, 1)
    true = 1 + 2 * common**2 / (1 + ratio**2)
    inside = [low <= true <= high for _, low, high in (seed_gain(*x, LEVEL) for x in draws)]
    assert np.mean(inside) >= 1 - bound(1000) and (ratio > 1 or np.mean(inside) < 0.97)
    gain, *_ = seed_gain(*draws[0], LEVEL)
    variances = [np.var(x, ddof=1) for x in (*draws[0], draws[0, 0] - draws[0, 1])]
    assert gain == pytest.approx((variances[0] + variances[1]) / variances[2])


def by_seed(*samples: np.ndarray) -> list[dict[str, float]]:
    return [{str(i): float(x) for i, x in enumerate(sample)} for sample in samples]


def test_arms_without_common_seeds_have_the_intervals_of_dunnett_in_scipy():
    rng = np.random.default_rng(8)
    base, *arms = samples = [rng.normal(i / 2, 1, n) for i, n in enumerate((5, 4, 7))]
    other = stats.dunnett(*arms, control=base).confidence_interval(LEVEL)
    found = pooled(by_seed(*samples), LEVEL, blocks=False)
    np.testing.assert_allclose([*map(ends, found)], np.array(other).T, atol=0.01)


def test_arms_of_common_seeds_have_the_variance_of_the_analysis_in_blocks():
    """Five arms of two seeds: the residual of the two-way table, and intervals many times narrower
    than those of each arm alone. A seed that one arm lacks leaves the difference estimable."""
    rng = np.random.default_rng(9)
    table = rng.normal(size=(5, 1)) + rng.normal(size=(1, 2)) + 0.1 * rng.normal(size=(5, 2))
    ours = pooled(by_seed(*table), LEVEL, blocks=True)
    rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    deviation = np.sqrt(2 * (rest**2).sum() / 4)
    assert len(ours) == 4
    for estimate, row in zip(ours, table[1:], strict=True):
        assert estimate.mean == pytest.approx((row - table[0]).mean())
        assert (estimate.deviation, estimate.freedom) == (pytest.approx(deviation), 4)
    widths = [stats.t.ppf(1 - 0.025 / 4, 1), dunnett(0.5 + 0.5 * np.eye(4), 4, LEVEL)]
    assert widths[0] / widths[1] > 13
    arms = by_seed(*table)
    del arms[4]["1"]
    assert pooled(arms, LEVEL, blocks=True)[0].freedom == 3
    halves = [{"0": 0.0, "1": 1.0}, {"2": 8.0, "3": 27.0}]
    no_common = pooled([*by_seed(np.arange(4.0)), *halves], LEVEL, blocks=True)
    assert [e.mean for e in no_common] == pytest.approx([0.0, 15.0])
    apart = [{"0": 1.0, "1": 2.0}, {"5": 1.0, "6": 3.0}]
    assert pooled(apart, LEVEL, blocks=True) is None


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("seeds", [2, 10])
def test_arms_that_vary_alike_claim_as_rarely_as_the_level_says_in_a_pool(distribution, seeds):
    rng = np.random.default_rng(seeds)
    tables = DISTRIBUTIONS[distribution](rng, 10_000, 4, seeds)
    differences = tables[:, 1:].mean(2) - tables[:, :1].mean(2)
    for blocks in (True, False):
        rest = tables - tables.mean(2, keepdims=True)
        rest = rest - rest.mean(1, keepdims=True) if blocks else rest
        freedom = 3 * (seeds - 1) if blocks else 4 * (seeds - 1)
        error = np.sqrt((rest**2).sum((1, 2)) / freedom * 2 / seeds)
        half = dunnett(0.5 + 0.5 * np.eye(3), freedom, LEVEL) * error
        assert np.mean(abs(differences).max(1) > half) <= 0.055
        ours = pooled(by_seed(*tables[0]), LEVEL, blocks)  # that is what the tool computes
        assert [e.mean for e in ours] == pytest.approx(differences[0].tolist())
        assert [e.high - e.mean for e in ours] == pytest.approx([half[0]] * 3)


def test_the_sign_flip_test_counts_all_ways_to_flip():
    x = np.random.default_rng(11).normal(0.5, size=8)
    means = [abs(np.mean(x * flip)) for flip in product((1, -1), repeat=8)]
    assert sign_flip(x) == pytest.approx(np.mean(means >= abs(x.mean()) - 1e-12))
    assert sign_flip(np.ones(5)) == 2 / 2**5


def test_a_far_pair_is_one_of_a_hundred_and_rare_failures_are_not_normal():
    rng = np.random.default_rng(12)
    for n, critical in {4: 1.496, 6: 1.973, 10: 2.482}.items():  # Grubbs 1969, table 1: 1 %
        for x in rng.normal(size=(300, n)) ** 3:
            distance = abs(x - x.mean()).max() / x.std(ddof=1)
            if abs(distance - critical) > 0.001:
                assert (far_value(x) is not None) == (distance > critical)
    failed = np.append(0.01 * rng.normal(size=9), 1.0)
    assert far_value(failed) == 9 and not is_normal(failed)
    assert far_value(failed[:9]) is None and is_normal(failed[:9])


def test_the_pool_has_40_pairs_of_changes_and_pairs_without_effect_and_of_600_steps():
    """Recomputation changes no bit; another start of the base, with other numbers of threads,
    differs by rounding. The learning rate still makes a difference after 600 steps."""
    assert POOL["changes"] == MEASURED and POOL["base"] == [*TINY, *BASE]
    assert len(CHANGES) == 5 and SEEDS * len(CHANGES) >= 40
    assert (POOL["same"]["changes"], POOL["long"]["changes"]) == (SAME, LONG)
    same = {arm: np.array(runs) for arm, runs in POOL["same"]["runs"].items()}
    assert np.array_equal(same["recomputation"], same["base"]) and len(same["base"]) == SEEDS
    assert abs(same["base"] / LOSSES["base"] - 1).max() < 1e-6
    long = {arm: np.array(runs)[:, -1] for arm, runs in POOL["long"]["runs"].items()}
    assert POOL["long"]["steps"][-1] == LONG_STEPS and len(long["base"]) == 5
    assert ends(paired(long["learning rate"] - long["base"], LEVEL))[1] < 0


def signs(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.choice([-1, 1], shape)


def claimed(differences: np.ndarray, pairs: int, seed: int) -> float:
    """How often intervals of `pairs` differences with random signs exclude zero, of float64
    [changes, seeds]."""
    rng = np.random.default_rng(seed)
    n = DRAWS // len(differences)
    rates = []
    for values in differences:
        drawn = rng.permuted(np.tile(values, (n, 1)), axis=1)[:, :pairs] * signs(rng, n, pairs)
        t = drawn.mean(1) / drawn.std(1, ddof=1) * pairs**0.5
        critical = stats.t.ppf((1 + LEVEL) / 2, pairs - 1)
        rates.append(np.mean(abs(t) > critical))
        for some in drawn[:5]:  # that is what the tool computes
            outside = abs(some.mean() / some.std(ddof=1)) * pairs**0.5
            assert paired(some, LEVEL).excludes_zero == (outside > critical)
    return float(np.mean(rates))


DIFFERENCES = {arm: LOSSES[arm][:, -1] - BASE_LOSSES for arm in CHANGES}
NOISE = {arm: values - values.mean() for arm, values in DIFFERENCES.items()}


def test_labels_swapped_within_pairs_are_claimed_to_differ_as_rarely_as_the_level_says():
    rate = claimed(np.array(list(DIFFERENCES.values())), SEEDS, 0)
    assert rate <= bound(DRAWS)
    two = claimed(np.ones((1, SEEDS)) + 1e-3 * np.arange(SEEDS), 2, 0)
    assert two > bound(DRAWS)  # a rate that is too high is noticed


def test_runs_of_disjoint_seeds_are_claimed_to_differ_as_rarely_as_the_level_says():
    rng = np.random.default_rng(1)
    claims, narrow = [], []
    for _ in range(DRAWS):
        arm = LOSSES[CHANGES[rng.integers(len(CHANGES))]][:, -1]
        labels = rng.integers(0, 2, SEEDS).astype(bool)  # which of a pair is called the arm
        first, second = np.where(labels, arm, BASE_LOSSES), np.where(labels, BASE_LOSSES, arm)
        seeds = rng.permutation(SEEDS)
        estimate = unpaired(first[seeds[: SEEDS // 2]], second[seeds[SEEDS // 2 :]], LEVEL)
        claims.append(estimate.excludes_zero)
        narrow.append(abs(estimate.mean) > (estimate.high - estimate.low) / 6)
    assert np.mean(claims) <= bound(DRAWS)
    assert np.mean(narrow) > bound(DRAWS)


def shown_by(pairs: int) -> float:
    """The effect, in known deviations, that so many pairs show with probability POWER."""
    return float(
        optimize.brentq(
            lambda effect: Spread(1.0, KNOWN, LEVEL).power(effect, pairs) - POWER, 0.1, 9
        )
    )


def test_planted_differences_are_found_as_often_as_predicted():
    """To the noise of pairs of the pool with random signs a difference is added: the one that so
    many pairs are predicted to show, by the deviation of that noise."""
    rng = np.random.default_rng(2)
    found: dict[tuple[str, int], float] = {}
    for arm, pairs in product(CHANGES, (4, 6, 8)):
        planted = float(NOISE[arm].std()) * shown_by(pairs)
        drawn = [rng.choice(NOISE[arm], pairs, replace=False) for _ in range(DRAWS // 10)]
        lows = [ends(paired(some * signs(rng, pairs) + planted, LEVEL))[0] for some in drawn]
        found[arm, pairs] = float(np.mean(np.array(lows) > 0))
    assert np.mean(list(found.values())) == pytest.approx(POWER, abs=0.05), found
    assert all(abs(rate - POWER) < 0.25 for rate in found.values()), found


def test_the_real_difference_of_the_learning_rate_is_found_by_as_many_pairs_as_predicted():
    differences = DIFFERENCES["learning rate"]
    whole = paired(differences, LEVEL)
    assert ends(whole)[1] < 0
    for pairs in (2, 3, 4):
        predicted = Spread(whole.deviation, KNOWN, LEVEL).power(whole.mean, pairs)
        highs = [ends(paired(c, LEVEL))[1] for c in combinations(differences, pairs)]
        rate = np.mean(np.array(highs) < 0)
        assert rate == pytest.approx(predicted, abs=0.2)
