"""How often verdicts claim a difference that is none, and how often they show one as they promise:
simulated by the rule that `compare_all` has for a design of arms and seeds, which no loss decides.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from lingua.tools.runs.compare.arms import Arm, HeldOutLosses, choose_arms, measure_runs, open_all
from lingua.tools.runs.compare.comparison import Comparison, compare_all
from lingua.tools.runs.compare.statistics import Spread
from tests.tools.runs.compare.pool import LOSSES, write_run

pytestmark = pytest.mark.quick

DISTRIBUTIONS: dict[str, Callable[..., np.ndarray]] = {
    "normal": lambda rng, *shape: rng.normal(size=shape),
    "t3": lambda rng, *shape: rng.standard_t(3, size=shape),
    "log-normal": lambda rng, *shape: rng.lognormal(size=shape) - np.exp(0.5),
}
MAX_SEEDS, LEVEL = 10, 0.95


@dataclass
class Runs:
    """Runs of arms whose losses are set: the base has twice as many seeds, the others' and more."""

    arms: list[Arm]
    base: Arm
    measured: HeldOutLosses

    def compare(self, losses: list[np.ndarray], disjoint: bool, **keys: Any) -> list[Comparison]:
        """Of as many runs as there are losses, the base's first; `disjoint`: without pairs."""
        base = replace(self.base, runs=self.base.runs[MAX_SEEDS * disjoint :])
        arms = [base, *self.arms[: len(losses) - 1]]
        arms = [replace(a, runs=a.runs[: len(x)]) for a, x in zip(arms, losses, strict=True)]
        for arm, values in zip(arms, losses, strict=True):
            for run, value in zip(arm.runs, values, strict=True):
                self.measured.losses[id(run)] = np.array([value])
        return compare_all(arms[1:], arms[0], self.measured, anytime=False, **keys)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    for arm in range(10):
        for seed in range(MAX_SEEDS if arm else 2 * MAX_SEEDS):
            name = f"{arm}-{seed:02}"
            write_run(folder / name, [f"optim.lr={arm + 1}", f"seed={seed}"], [1], [2.0 + seed])
    arms, base, _ = choose_arms(open_all([str(folder)]), [])
    everything = [run for arm in [*arms, base] for run in arm.runs]
    return Runs(arms, base, measure_runs(everything, "nats_per_byte", None))


def standard_errors(losses: list[np.ndarray], paired: bool) -> np.ndarray:
    """Of the differences to the first arm, from their own losses: [draws, arms - 1]."""
    base, *arms = losses
    if paired:
        pairs = [(x[:, : base.shape[1]], base[:, : x.shape[1]]) for x in arms]
        errors = [(a - b).std(1, ddof=1) / a.shape[1] ** 0.5 for a, b in pairs]
    else:
        variances = [x.var(1, ddof=1) / x.shape[1] for x in losses]
        errors = [np.sqrt(variance + variances[0]) for variance in variances[1:]]
    return np.stack(errors, 1)


def differences(losses: list[np.ndarray], paired: bool) -> np.ndarray:
    base, *arms = losses
    both = [(x, base) for x in arms]
    if paired:
        both = [(x[:, : base.shape[1]], base[:, : x.shape[1]]) for x in arms]
    return np.stack([a.mean(1) - b.mean(1) for a, b in both], 1)


def claims(runs: Runs, losses: list[np.ndarray], paired: bool) -> np.ndarray:
    """In which draws the verdict claims some difference, and that of the first arm: [draws, arms -
    1]. Half widths are multiples of the standard error that no loss decides: the tool says so for
    two draws of which one has its losses stretched."""
    errors, means = standard_errors(losses, paired), differences(losses, paired)
    multiples = []
    for draw in (0, 1):
        drawn = [3.0 + x[draw] for x in losses]
        found = [c.estimate for c in runs.compare(drawn, disjoint=not paired)]
        assert [e.mean for e in found] == pytest.approx(means[draw])
        multiples.append([(e.high - e.mean) / s for e, s in zip(found, errors[draw], strict=True)])
    assert multiples[0] == pytest.approx(multiples[1])
    return abs(means) > multiples[0] * errors


def drawn(rng: np.random.Generator, kind: str, n: int, sizes: Any, scales: Any) -> list[np.ndarray]:
    """Losses of no difference: [n, seeds] of each arm. Sizes are of the base first."""
    draw = DISTRIBUTIONS[kind]
    return [draw(rng, n, size) * scale for size, scale in zip(sizes, scales, strict=True)]


def most(limit: float, draws: int) -> float:
    """What a rate of `limit` exceeds in one of 1,000 cases."""
    return float(stats.binom.ppf(0.999, draws, limit)) / draws


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize(
    ("sizes", "scales"),
    [((3,) * 10, (3,) + (1,) * 9), ((10, 3, 10), (1, 3, 1)), ((2, 2, 2), (1, 1, 10))],
    ids=["a wide base", "a small wide arm", "two seeds"],
)
def test_arms_of_unequal_variances_claim_as_rarely_as_the_level_says(runs, sizes, scales, paired):
    losses = drawn(np.random.default_rng(1), "normal", 4000, sizes, scales)
    assert claims(runs, losses, paired).any(1).mean() <= most(0.05, 4000)


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_arms_of_the_recorded_pool_claim_about_as_rarely_as_the_level_says(runs, seeds):
    """Of as many of its seeds: its differences without their means, with labels swapped, which are
    signs. They are not normal, and those of one arm vary 3.5 times as much as those of another."""
    table = np.stack([x[:, -1] for arm, x in LOSSES.items() if arm != "micro-batch"])  # rounding
    noise, base = table[1:] - table[0], table[0] - table[0].mean()
    noise -= noise.mean(1, keepdims=True)
    rng = np.random.default_rng(2)
    chosen = rng.permuted(np.tile(np.arange(10), (4000, 1)), axis=1)[:, :seeds]
    signs = rng.choice([-1, 1], chosen.shape)
    losses = [base[chosen], *(base[chosen] + signs * arm[chosen] for arm in noise)]
    assert claims(runs, losses, paired=True).any(1).mean() <= most(0.07, 4000)


@pytest.mark.parametrize(
    ("share", "claimed"), [(0.05, (0.06, 0.07, 0.10)), (0.1, (0.09, 0.14, 0.18))]
)
def test_what_is_claimed_of_the_means_of_an_arm_that_rarely_fails_is_of_typical_runs(
    runs, share, claimed
):
    """The rates of docs/runs.md, of failures ten deviations off."""
    rng = np.random.default_rng(4)
    for seeds, rate in zip((3, 5, 10), claimed, strict=True):
        losses = drawn(rng, "normal", 4000, (seeds, seeds), (1, 1))
        losses[1] += 10 * ((rng.random((4000, seeds)) < share) - share)
        found = claims(runs, losses, paired=True)
        assert found.mean() == pytest.approx(rate, abs=0.02)


@pytest.mark.soak
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("arms", [3, 10])
def test_no_design_of_several_arms_claims_over_7_percent(runs, kind, arms):
    """Nor over 10 % with two seeds or where one deviation is a tenth of the others'."""
    rng, draws, worst = np.random.default_rng(arms), 10_000, dict[str, tuple[float, Any]]()
    for seeds in (2, 3, 4, 5, 7, MAX_SEEDS):
        sizes = {(seeds,) * arms, (10, seeds, *(10,) * (arms - 2)), (10, *(seeds,) * (arms - 1)),
                 (seeds, *(10,) * (arms - 1))}  # fmt: skip
        for size in sorted(sizes):
            for at, factor in ((0, 1.0), *((at, f) for at in (0, 1) for f in (3.0, 10.0, 0.1))):
                scales = [factor if arm == at else 1.0 for arm in range(arms)]
                losses = drawn(rng, kind, draws, size, scales)
                for paired in (True, False):
                    rate = float(claims(runs, losses, paired).any(1).mean())
                    limit = 0.10 if min(size) == 2 or factor == 0.1 else 0.07
                    assert kind == "log-normal" or rate <= limit, (size, scales, paired)
                    name = f"{seeds} seeds, {'paired' if paired else 'unpaired'}"
                    worst[name] = max(worst.get(name, (0.0, None)), (rate, (size, scales)))
    for name, (rate, design) in worst.items():
        low, high = stats.binomtest(round(rate * draws), draws).proportion_ci()
        print(f"{kind}, {arms} arms, {name}: at most {rate:.3f} ({low:.3f} to {high:.3f})", design)


@pytest.mark.parametrize(
    ("seeds", "effect", "equal", "separate"),
    [(3, 3, 0.96, 0.30), (5, 2, 0.95, 0.61), (10, 1, 0.73, 0.54)],
)
def test_what_is_lost_where_arms_vary_alike_and_it_is_not_said(
    runs, seeds, effect, equal, separate
):
    """The powers of docs/runs.md: of five arms, effects in deviations of a difference."""
    losses = drawn(np.random.default_rng(seeds), "normal", 4000, (seeds,) * 5, (1,) * 5)
    losses[1] = losses[1] + effect * 2**0.5
    shown = claims(runs, losses, paired=True)[:, 0].mean()
    assert shown == pytest.approx(separate, abs=0.025)
    table = np.stack(losses, 1)
    rest = table - table.mean(2, keepdims=True) - table.mean(1, keepdims=True)
    rest += table.mean((1, 2), keepdims=True)
    deviations = np.sqrt((rest**2).sum((1, 2)) / (4 * (seeds - 1)) * 2)
    for draw in (0, 1):  # that is what the tool computes
        first = runs.compare([3.0 + x[draw] for x in losses], False, variance="equal")[0]
        e, assumed = first.estimate, first.pooled
        assert e is assumed and e.deviation == pytest.approx(deviations[draw])
    half = (e.high - e.mean) / e.deviation * deviations
    assert (differences(losses, True)[:, 0] > half).mean() == pytest.approx(equal, abs=0.025)


def shown(pilot: int, effect: float, level: float, points: int) -> float:
    """How often new pairs show an effect in true deviations, as many as 10,000 pilots ask for: the
    tool computes that for so many of their deviations, the others are between."""
    rng = np.random.default_rng(pilot)
    measured = np.sqrt(rng.chisquare(pilot - 1, 10_000) / (pilot - 1))
    known = np.quantile(measured, np.linspace(0, 1, points))
    needed = [Spread(deviation, pilot - 1, level).pairs_for(effect) for deviation in known]
    finite = [np.inf if pairs is None else pairs for pairs in needed]
    pairs = np.ceil(np.interp(measured, known, finite))
    pairs = pairs[np.isfinite(pairs)]
    t = rng.normal(effect * pairs**0.5) / np.sqrt(rng.chisquare(pairs - 1) / (pairs - 1))
    return float(np.mean(t > stats.t.ppf((1 + level) / 2, pairs - 1)))


@pytest.mark.parametrize("pilot", [2, 5])
def test_the_pairs_that_a_pilot_asks_for_show_the_effect(pilot):
    assert 0.78 <= shown(pilot, 0.8, LEVEL, 15) <= 0.86


@pytest.mark.soak
@pytest.mark.parametrize("pilot", [2, 3, 5, 10])
@pytest.mark.parametrize("arms", [2, 10])
@pytest.mark.parametrize("effect", [0.3, 0.5, 1.0])
def test_the_pairs_that_a_pilot_asks_for_show_the_effect_in_78_to_84_percent(pilot, arms, effect):
    share = shown(pilot, effect, 1 - (1 - LEVEL) / (arms - 1), 200)
    low, high = stats.binomtest(round(share * 10_000), 10_000).proportion_ci()
    print(f"a pilot of {pilot} pairs, {arms} arms, {effect} deviations: "
          f"{share:.3f} ({low:.3f} to {high:.3f})")  # fmt: skip
    assert 0.78 <= share <= 0.84


@pytest.mark.parametrize("seeds", [2, 10])
def test_the_smallest_effect_of_arms_that_vary_alike_is_shown_in_80_percent(runs, seeds):
    """By a comparison of the same arms, whose deviation and interval are of all five."""
    rng, arms, freedom = np.random.default_rng(seeds), 5, 4 * (seeds - 1)
    first, *_ = runs.compare([3.0 + rng.normal(size=seeds) for _ in range(arms)], False,
                             variance="equal")  # fmt: skip
    e = first.pooled
    assert first.estimate is e and e.freedom == freedom
    unit = first.smallest_effect / e.deviation
    width = (e.high - e.mean) / e.deviation * seeds**0.5
    old, new = np.sqrt(rng.chisquare(freedom, size=(2, 20_000)) / freedom)
    t = (rng.normal(size=20_000) + unit * old * seeds**0.5) / new
    assert 0.78 < np.mean(t > width) < 0.84
    assert unit < Spread(1.0, seeds - 1, first.level).smallest_effect(seeds)  # of each alone
