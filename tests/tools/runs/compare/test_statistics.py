"""Intervals, and the numbers of pairs they take: against scipy, and on the recorded pool of real
pairs, whose labels are swapped so that there is no difference, or to whom one is added."""

from itertools import combinations, product

import numpy as np
import pytest
from scipy import integrate, stats

from apps.bench.pairs import BASE, TINY
from apps.bench.pairs import CHANGES as MEASURED
from lingua.tools.runs.compare.statistics import (
    MAX_PAIRS,
    POWER,
    paired,
    pairs_for,
    power,
    smallest_shown,
    unpaired,
)
from tests.tools.runs.compare.pool import LOSSES, POOL, SEEDS

pytestmark = pytest.mark.quick

CHANGES = [arm for arm in LOSSES if arm != "base"]
LEVEL = 0.95
DRAWS = 2000


def bound(draws: int, rate: float = 1 - LEVEL) -> float:
    """The share that so many independent draws of this rate exceed in 1 of 1,000 cases."""
    return float(stats.binom.ppf(0.999, draws, rate)) / draws


def test_intervals_are_those_of_scipy():
    rng = np.random.default_rng(0)
    a, b = rng.normal(1, 2, 6), rng.normal(0, 1, 4)
    one = stats.ttest_1samp(a, 0).confidence_interval(0.9)
    ours = paired(a, 0.9)
    assert ours is not None and (ours.low, ours.high) == pytest.approx(tuple(one))
    two = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.9)
    other = unpaired(a, b, 0.9)
    assert other is not None and (other.low, other.high) == pytest.approx(tuple(two))
    assert ours.deviation == pytest.approx(np.std(a, ddof=1))
    assert other.deviation == pytest.approx(np.sqrt(np.var(a, ddof=1) + np.var(b, ddof=1)))


def test_what_has_no_interval_or_no_width():
    assert paired([1.0], LEVEL) is None
    assert unpaired([1.0], [1.0, 2.0], LEVEL) is None
    for flat in (paired([0.5, 0.5], LEVEL), unpaired([1.5, 1.5], [1.0, 1.0], LEVEL)):
        assert flat is not None and (flat.low, flat.high) == (0.5, 0.5) and flat.excludes_zero


@pytest.mark.parametrize("pairs", [2, 3, 5, 10, 40])
@pytest.mark.parametrize("level", [0.95, 0.99])
def test_power_is_the_integral_over_the_deviation_that_is_measured(pairs, level):
    """P(t > c) = E[Phi(shift - c * sqrt(V / df))] with V of chi-square: no noncentral t."""

    def found(v: float, shift: float, critical: float) -> float:
        part = stats.norm.cdf(shift - critical * np.sqrt(v / (pairs - 1)))
        return float(part * stats.chi2.pdf(v, pairs - 1))

    critical = stats.t.ppf((1 + level) / 2, pairs - 1)
    for effect in (0.3, 1.0, 4.0):
        expected, _ = integrate.quad(found, 0, np.inf, (effect * pairs**0.5, critical), limit=200)
        assert power(effect, 1.0, pairs, level) == pytest.approx(expected, abs=1e-6)


def test_the_number_of_pairs_and_the_noise_floor_invert_power():
    for pairs in (2, 3, 5, 17, 400):
        floor = smallest_shown(2.0, pairs, LEVEL)
        assert power(floor, 2.0, pairs, LEVEL) == pytest.approx(POWER, abs=1e-6)
        assert pairs_for(1.001 * floor, 2.0, LEVEL) == pairs
        assert pairs_for(-0.999 * floor, 2.0, LEVEL) == pairs + 1
    assert pairs_for(1e-6, 1.0, LEVEL) is None and pairs_for(0.0, 1.0, LEVEL) is None
    few = pairs_for(0.03, 1.0, LEVEL)
    assert few is not None and 8000 < few < MAX_PAIRS
    assert pairs_for(0.1, 0.0, LEVEL) == 2


# ---- on the pool


def test_the_pool_has_at_least_40_pairs_of_the_changes_of_the_measurement():
    assert POOL["changes"] == MEASURED and POOL["base"] == [*TINY, *BASE]
    assert len(CHANGES) == 5 and SEEDS * len(CHANGES) >= 40


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
        rates.append(np.mean(abs(t) > stats.t.ppf((1 + LEVEL) / 2, pairs - 1)))
        for some in drawn[:5]:  # that is what the tool computes
            estimate = paired(some, LEVEL)
            assert estimate is not None
            outside = abs(some.mean() / some.std(ddof=1)) * pairs**0.5
            critical = stats.t.ppf((1 + LEVEL) / 2, pairs - 1)
            assert estimate.excludes_zero == (outside > critical)
    return float(np.mean(rates))


DIFFERENCES = {arm: (LOSSES[arm] - LOSSES["base"])[:, -1] for arm in CHANGES}
NOISE = {arm: values - values.mean() for arm, values in DIFFERENCES.items()}


def test_labels_swapped_within_pairs_are_claimed_to_differ_as_rarely_as_the_level_says():
    rate = claimed(np.array(list(DIFFERENCES.values())), SEEDS, 0)
    assert rate <= bound(DRAWS)
    two = claimed(np.ones((1, SEEDS)) + 1e-3 * np.arange(SEEDS), 2, 0)
    assert two > bound(DRAWS)  # a rate that is too high is noticed


@pytest.mark.parametrize("pairs", [3, 5, 8])
def test_few_pairs_are_claimed_to_differ_as_rarely_as_normally_distributed_ones(pairs):
    """A pool of ten values is drawn from again and again, and its own rate is not exactly the
    level's: it must be among those of 200 pools of normally distributed differences, whose mean is
    the level's. The arms' means are taken out: with them three differences that are equal but for
    the sign, which no run has by chance, would be claimed to differ in a quarter of cases."""
    rng = np.random.default_rng(pairs)
    normal = rng.normal(size=(200, len(CHANGES), SEEDS))
    normal -= normal.mean(2, keepdims=True)
    rates = [claimed(pool, pairs, i) for i, pool in enumerate(normal)]
    assert claimed(np.array(list(NOISE.values())), pairs, 0) <= np.quantile(rates, 0.99)


def test_runs_of_disjoint_seeds_are_claimed_to_differ_as_rarely_as_the_level_says():
    rng = np.random.default_rng(1)
    claims, narrow = [], []
    for _ in range(DRAWS):
        arm = LOSSES[CHANGES[rng.integers(len(CHANGES))]][:, -1]
        labels = rng.integers(0, 2, SEEDS).astype(bool)  # which of a pair is called the arm
        first, second = np.where(labels, arm, LOSSES["base"][:, -1]), LOSSES["base"][:, -1].copy()
        second[labels], second[~labels] = LOSSES["base"][labels, -1], arm[~labels]
        seeds = rng.permutation(SEEDS)
        estimate = unpaired(first[seeds[: SEEDS // 2]], second[seeds[SEEDS // 2 :]], LEVEL)
        assert estimate is not None
        claims.append(estimate.excludes_zero)
        narrow.append(abs(estimate.mean) > (estimate.high - estimate.low) / 6)
    assert np.mean(claims) <= bound(DRAWS)
    assert np.mean(narrow) > bound(DRAWS)


def test_planted_differences_are_found_as_often_as_predicted():
    """To the noise of pairs of the pool with random signs a difference is added: the one that so
    many pairs are predicted to show, by the deviation of that noise."""
    rng = np.random.default_rng(2)
    found: dict[tuple[str, int], float] = {}
    for arm, pairs in product(CHANGES, (4, 6, 8)):
        planted = smallest_shown(float(NOISE[arm].std()), pairs, LEVEL)
        hits = 0
        for _ in range(DRAWS // 10):
            drawn = rng.choice(NOISE[arm], pairs, replace=False) * signs(rng, pairs)
            estimate = paired(drawn + planted, LEVEL)
            assert estimate is not None
            hits += estimate.low > 0
        found[arm, pairs] = hits / (DRAWS // 10)
    assert np.mean(list(found.values())) == pytest.approx(POWER, abs=0.05), found
    assert all(abs(rate - POWER) < 0.25 for rate in found.values()), found


def test_the_real_difference_of_the_learning_rate_is_found_by_as_many_pairs_as_predicted():
    differences = DIFFERENCES["learning rate"]
    whole = paired(differences, LEVEL)
    assert whole is not None and whole.high < 0
    for pairs in (2, 3, 4):
        predicted = power(whole.mean, whole.deviation, pairs, LEVEL)
        subsets = [paired(c, LEVEL) for c in combinations(differences, pairs)]
        rate = np.mean([e is not None and e.high < 0 for e in subsets])
        assert rate == pytest.approx(predicted, abs=0.2)
