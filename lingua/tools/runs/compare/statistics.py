"""Intervals of mean differences, what they rest on, and how many pairs would show one.

Runs that share a seed share initial values and rows, so their losses vary together: the interval
of paired differences is narrower than that of two separate samples as far as they do. Intervals
are of Student's t, which is exact for few runs where differences are normally distributed; that of
`anytime_interval` holds besides for everyone who looks after each pair.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lingua.base.errors import import_optional

POWER = 0.8  # probability of showing a difference that counts as large enough to be shown
BOUND = 0.9  # probability that the upper bound of a deviation is above the true one
MAX_PAIRS = 10_000  # beyond, nobody trains them
MIXTURE = (
    0.5  # inverse variance of the effects, in deviations, for which the anytime interval is narrow
)
# {runs of the smaller arm: most of the larger} where Welch's interval claims at most 6.5 % of
# differences that are none, in simulations of normal and of t3 losses of equal variance.
WELCH_LIMITS = {2: 2, 3: 10}
FAR, UNFIT = 0.01, 0.05  # p values below which a pair is far, a distribution not normal
UNEQUAL = 0.05  # p value below which variances are called unequal

Values = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Estimate:
    """A mean difference; in the unit of the values."""

    mean: float
    low: float
    high: float  # low and high end of the interval
    deviation: float  # standard deviation of one difference
    freedom: float  # degrees of freedom of `deviation`
    level: float  # probability with which an interval like this one contains the true difference

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    def widened(self, slack: float) -> "Estimate":
        """The interval where all values may be wrong by `slack` in the same direction."""
        return replace(self, low=self.low - slack, high=self.high + slack)


def paired(differences: Values, level: float) -> Estimate | None:
    """The interval of Student's t of the mean of one sample; None for fewer than two."""
    n = len(differences)
    if n < 2:
        return None
    values = np.array(differences)
    mean, deviation = float(values.mean()), float(values.std(ddof=1))
    half = deviation / math.sqrt(n) * _critical(n - 1, level)
    return Estimate(mean, mean - half, mean + half, deviation, n - 1, level)


def unpaired(arm: Values, base: Values, level: float) -> Estimate | None:
    """Welch's interval of the mean of `arm` minus that of `base`, whose variances may differ; None
    where one of them has fewer than two values."""
    if min(len(arm), len(base)) < 2:
        return None
    mean = float(np.mean(arm) - np.mean(base))
    parts = [float(np.var(values, ddof=1)) / len(values) for values in (arm, base)]
    error, deviation = math.sqrt(sum(parts)), math.sqrt(np.var(arm, ddof=1) + np.var(base, ddof=1))
    if error == 0:
        return Estimate(mean, mean, mean, deviation, math.inf, level)
    # Welch (1947): the degrees of freedom of the sum of two variances.
    shares = [
        (part / error**2) ** 2 / (n - 1)
        for part, n in zip(parts, map(len, (arm, base)), strict=True)
    ]
    freedom = 1 / sum(shares)
    half = error * _critical(freedom, level)
    return Estimate(mean, mean - half, mean + half, deviation, freedom, level)


def welch_holds(runs: int, base_runs: int) -> bool:
    """Whether Welch's interval of so many runs keeps its level."""
    few, many = sorted((runs, base_runs))
    return many <= WELCH_LIMITS.get(few, math.inf)


def anytime_interval(differences: Values, level: float) -> Estimate | None:
    """The interval of a confidence sequence of normal differences with unknown deviation: with
    probability `level` those after the first, second, ... pair all contain the true difference, so
    one may look after each pair and stop when zero is excluded. None for fewer than two pairs.

    It contains the differences m that a scale-invariant e-value does not refute,
    sqrt(c / (n + c)) * (S / (S - T^2 / (n + c)))^(n / 2) < 1 / (1 - level), with S the sum of
    (x - m)^2, T that of x - m and c = MIXTURE (Wang and Ramdas 2024, Anytime-valid t-tests and
    confidence sequences for Gaussian means with unknown variance, arXiv 2310.03722).
    """
    n = len(differences)
    if n < 2:
        return None
    values = np.array(differences)
    mean, deviation = float(values.mean()), float(values.std(ddof=1))
    ratio = ((n + MIXTURE) / (MIXTURE * (1 - level) ** 2)) ** (1 / n)
    rest = 1 - ratio * MIXTURE / (n + MIXTURE)  # none: every difference is still possible
    half = deviation * math.sqrt((ratio - 1) * (n - 1) / (n * rest)) if rest > 0 else math.inf
    return Estimate(mean, mean - half, mean + half, deviation, n - 1, level)


# ---- several arms


@dataclass(frozen=True)
class Pooled:
    """The differences of several arms to one base, with one variance; their intervals hold all
    together with the level."""

    estimates: list[Estimate]  # in the order of the arms
    unequal: float  # p value that the deviation of one arm differs from the others'; 1: not known


def pooled(arms: Sequence[dict[str, float]], level: float, blocks: bool) -> Pooled | None:
    """Least squares of value = arm + seed, or without `blocks` of value = arm, and Dunnett's
    critical value (1955, A multiple comparison procedure for comparing several treatments with a
    control). None where no degree of freedom is left, or a difference cannot be estimated.

    Args:
        arms: values by seed; the first arm is the base.
    """
    seeds = list(dict.fromkeys(seed for arm in arms for seed in arm))
    values = np.array([value for arm in arms for value in arm.values()])
    of_arm = np.repeat(np.arange(len(arms)), [len(arm) for arm in arms])
    of_seed = np.array([seeds.index(seed) for arm in arms for seed in arm])
    groups = of_seed[:, None] == np.arange(len(seeds)) if blocks else np.ones((len(values), 1))
    design = np.hstack([of_arm[:, None] == np.arange(1, len(arms)), groups]).astype(np.float64)
    solution, _, rank, _ = np.linalg.lstsq(design, values)
    freedom = len(values) - int(rank)
    if freedom < 1 or rank < design.shape[1]:
        return None
    k = len(arms) - 1
    error = values - design @ solution
    deviation = math.sqrt(float(error @ error) / freedom)
    covariance = np.linalg.inv(design.T @ design)[:k, :k]
    scale = np.sqrt(np.diag(covariance))
    critical = dunnett(covariance / np.outer(scale, scale), freedom, level)
    halves = critical * deviation * scale
    estimates = [
        Estimate(mean, mean - half, mean + half, deviation * math.sqrt(2), freedom, level)
        for mean, half in zip(solution[:k].tolist(), halves.tolist(), strict=True)
    ]
    return Pooled(estimates, unequal_variance(arms, blocks))


def dunnett(correlation: np.ndarray, freedom: int, level: float) -> float:
    """The value below which the largest of correlated t values stays, disregarding signs, with
    probability `level`; to about a thousandth."""
    stats, k = _scipy(), len(correlation)
    if k == 1:
        return _critical(freedom, level)
    joint = stats.multivariate_t(shape=correlation, df=freedom, allow_singular=True)

    def excess(value: float) -> float:
        ends = np.full(k, value)
        rng = np.random.default_rng(0)  # the integration is random: the same in each call
        inside = joint.cdf(ends, lower_limit=-ends, maxpts=5000, random_state=rng)
        return float(inside) - level

    # At least that of one t value, and at most Bonferroni's.
    low, high = 0.99 * _critical(freedom, level), 1.01 * _critical(freedom, 1 - (1 - level) / k)
    return float(_scipy("optimize").brentq(excess, low, high, xtol=1e-3))


def unequal_variance(arms: Sequence[dict[str, float]], blocks: bool) -> float:
    """The smallest p value of an F test of the deviation of one arm, in what it differs by from the
    mean of the others, against that of the others; times the number of arms (Bonferroni). 1 where
    too few runs are there."""
    if blocks:
        common = [seed for seed in arms[0] if all(seed in arm for arm in arms)]
        if len(common) < 2:
            return 1.0
        table = np.array([[arm[seed] for seed in common] for arm in arms])
        table = table - table.mean(0)
        rows = list(table * math.sqrt(len(arms) / (len(arms) - 1)))
        # The sum of squares of one arm, and that of all others after it.
        squares = [float(((row - row.mean()) ** 2).sum()) for row in rows]
        total = float(((table - table.mean(1, keepdims=True)) ** 2).sum())
        freedoms = [len(common) - 1] * len(arms)
        every = (len(arms) - 1) * (len(common) - 1)
    else:
        samples = [np.array(list(arm.values())) for arm in arms]
        squares = [float(((x - x.mean()) ** 2).sum()) for x in samples]
        freedoms = [len(x) - 1 for x in samples]
        total, every = sum(squares), sum(freedoms)
    smallest = 1.0
    for square, freedom in zip(squares, freedoms, strict=True):
        rest, others = total - square, every - freedom
        if freedom > 0 and others > 0 and rest > 0:
            above = float(_scipy().f.sf(square / freedom / (rest / others), freedom, others))
            smallest = min(smallest, 2 * min(above, 1 - above))
    return min(1.0, smallest * len(arms))


# ---- what the interval of pairs rests on


def sign_flip(differences: Values) -> float:
    """p value of the mean among those with flipped signs: exact for few independent differences
    that are distributed symmetrically about zero, however that is; of n pairs at least 2 / 2^n."""
    test = _scipy().permutation_test(
        (np.array(differences),), np.mean, permutation_type="samples", n_resamples=1 << 14,
        vectorized=True, random_state=np.random.default_rng(0),
    )  # fmt: skip
    return float(test.pvalue)


def far_pair(differences: Values) -> int | None:
    """The index of a difference that is far from the rest by the test of Grubbs (1950), corrected
    for having looked at all; None where none is, and for fewer than four."""
    n = len(differences)
    values = np.array(differences)
    if n < 4 or values.std() == 0:
        return None
    distance = abs(values - values.mean()) / values.std(ddof=1)
    at = int(distance.argmax())
    rest = (n - 1) ** 2 / n - distance[at] ** 2
    t = distance[at] * math.sqrt((n - 2) / rest) if rest > 0 else math.inf
    return at if 2 * n * float(_scipy().t.sf(t, n - 2)) < FAR else None


def is_normal(differences: Values) -> bool:
    """Whether the test of Shapiro and Wilk (1965) does not refute a normal distribution."""
    values = np.array(differences)
    return bool(len(values) < 3 or np.ptp(values) == 0 or _scipy().shapiro(values).pvalue >= UNFIT)


# ---- how many pairs


def power(effect: float, deviation: float, pairs: int, level: float) -> float:
    """Probability that the interval of so many pairs is on the side of zero that it should be on,
    where the true difference is `effect`: by the noncentral t distribution (Cohen 1988, Statistical
    Power Analysis for the Behavioral Sciences, 2.4)."""
    shift = abs(effect) / deviation * math.sqrt(pairs)
    return float(_scipy().nct.sf(_critical(pairs - 1, level), pairs - 1, shift))


def pairs_for(effect: float, deviation: float, level: float) -> int | None:
    """The fewest pairs that show `effect` with probability POWER; None for over MAX_PAIRS."""
    if deviation == 0:
        return 2
    if effect == 0 or power(effect, deviation, MAX_PAIRS, level) < POWER:
        return None
    counts = range(2, MAX_PAIRS)  # power rises with the number of pairs
    return 2 + bisect_left(counts, POWER, key=lambda n: power(effect, deviation, n, level))


def deviation_bound(deviation: float, freedom: float) -> float:
    """An upper bound of the true deviation, which is above it with probability BOUND."""
    return deviation * math.sqrt(freedom / float(_scipy().chi2.ppf(1 - BOUND, freedom)))


def smallest_effect(deviation: float, freedom: int, pairs: int, level: float) -> float:
    """The true difference that as many new pairs show with probability POWER: the multiple of a
    measured deviation, of `freedom` degrees, that is right in the mean over what would be measured.
    """
    stats, critical = _scipy(), _critical(freedom, level)
    shares = (np.arange(400) + 0.5) / 400
    measured = np.sqrt(stats.chi2.ppf(shares, freedom) / freedom)  # over the true deviation

    def shown(effect: float) -> float:
        shift = effect * measured * math.sqrt(pairs)
        return float(stats.nct.sf(critical, freedom, shift).mean()) - POWER

    high = 1.0
    while shown(high) < 0:
        high *= 2
    return deviation * float(_scipy("optimize").brentq(shown, 0, high))


def proportion(count: int, of: int, level: float) -> tuple[float, float]:
    """The interval of a probability that `count` of `of` runs show, exact for few (Clopper and
    Pearson 1934, Biometrika 26)."""
    beta, tail = _scipy().beta, (1 - level) / 2
    low = beta.ppf(tail, count, of - count + 1) if count else 0.0
    high = beta.ppf(1 - tail, count + 1, of - count) if count < of else 1.0
    return float(low), float(high)


def _critical(freedom: float, level: float) -> float:
    return float(_scipy().t.ppf((1 + level) / 2, freedom))


def _scipy(module: str = "stats") -> Any:
    return import_optional(f"scipy.{module}", "lingua compare")
