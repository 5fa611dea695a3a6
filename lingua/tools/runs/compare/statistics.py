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
MAX_PAIRS = 10_000  # beyond, nobody trains them
PILOT = 5  # pairs that measure a deviation well enough to plan by it
MIXTURE = (
    0.5  # inverse variance of the effects, in deviations, for which the anytime interval is narrow
)
FAR, UNFIT = 0.01, 0.05  # p values below which a value is far, a distribution not normal
# Deviations of losses that may be rounding, relative to the loss: additions in another order change
# those of the recorded pool, in float32, by up to 1e-6, and seeds by 1e-2.
NO_SPREAD = 3e-6

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
    """The interval of the mean of `arm` minus that of `base`, whose variances may differ; None
    where one of them has fewer than two values.

    Its degrees of freedom are those of the smaller sample, with which it never claims more normal
    differences that are none than the level says (Mickey and Brown 1966, Bounds on the distribution
    functions of the Behrens-Fisher statistic). Those that Welch estimates claim too many where one
    sample has two or three values, the more the nearer the level is to 1.
    """
    if min(len(arm), len(base)) < 2:
        return None
    mean = float(np.mean(arm) - np.mean(base))
    variances = [float(np.var(values, ddof=1)) for values in (arm, base)]
    error = math.sqrt(variances[0] / len(arm) + variances[1] / len(base))
    freedom = min(len(arm), len(base)) - 1
    half = error * _critical(freedom, level)
    return Estimate(mean, mean - half, mean + half, math.sqrt(sum(variances)), freedom, level)


def anytime_interval(
    differences: Values, level: float, freedom: float = 0, variance: float = 0.0
) -> Estimate | None:
    """The interval of a confidence sequence of normal differences with unknown deviation: with
    probability `level` those after the first, second, ... pair all contain the true difference, so
    one may look after each pair and stop when zero is excluded. None for fewer than two pairs.

    It contains the differences m that a scale-invariant e-value does not refute,
    sqrt(c / (n + c)) * (S / (S - T^2 / (n + c)))^(n / 2) < 1 / (1 - level), with S the sum of
    (x - m)^2, T that of x - m and c = MIXTURE (Wang and Ramdas 2024, Anytime-valid t-tests and
    confidence sequences for Gaussian means with unknown variance, arXiv 2310.03722). With a prior
    of `freedom` degrees, S has freedom * variance besides, and n / 2 is (n + freedom) / 2.
    """
    n = len(differences)
    if n < 2:
        return None
    values = np.array(differences)
    mean, deviation = float(values.mean()), float(values.std(ddof=1))
    ratio = ((n + MIXTURE) / (MIXTURE * (1 - level) ** 2)) ** (1 / (n + freedom))
    rest = 1 - ratio * MIXTURE / (n + MIXTURE)  # none: every difference is still possible
    squares = deviation**2 * (n - 1) + freedom * variance
    half = math.sqrt(squares * (ratio - 1) / (n * rest)) if rest > 0 else math.inf
    return Estimate(mean, mean - half, mean + half, deviation, n - 1, level)


# ---- several arms


def pooled(arms: Sequence[dict[str, float]], level: float, blocks: bool) -> list[Estimate] | None:
    """The differences of arms to a base, in their order, if all vary alike: intervals of one
    variance that hold all together with `level`. Least squares of value = arm + seed, or without
    `blocks` of value = arm, and Dunnett's critical value (1955, A multiple comparison procedure for
    comparing several treatments with a control). None where no degree of freedom is left, or a
    difference cannot be estimated.

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
    return [
        Estimate(mean, mean - half, mean + half, deviation * math.sqrt(2), freedom, level)
        for mean, half in zip(solution[:k].tolist(), halves.tolist(), strict=True)
    ]


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


# ---- what the interval of pairs rests on


def sign_flip(differences: Values) -> float:
    """p value of the mean among those with flipped signs: exact for few independent differences
    that are distributed symmetrically about zero, however that is; of n pairs at least 2 / 2^n."""
    test = _scipy().permutation_test(
        (np.array(differences),), np.mean, permutation_type="samples", n_resamples=1 << 14,
        vectorized=True, random_state=np.random.default_rng(0),
    )  # fmt: skip
    return float(test.pvalue)


def far_value(values: Values) -> int | None:
    """The index of a value that is far from the rest by the test of Grubbs (1950), corrected for
    having looked at all; None where none is, and for fewer than four."""
    n = len(values)
    values = np.array(values)
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


def seed_gain(arm: Values, base: Values, level: float) -> tuple[float, float, float]:
    """Variance of an unpaired difference over that of a paired one, and its interval. That of the
    variances of sum and difference is of the F distribution: exact where both vary alike, else
    wider than it needs to be (Pitman 1939, Biometrika 31)."""
    both = np.array([arm, base])
    ratio = float(np.var(both.sum(0), ddof=1) / np.var(both[0] - both[1], ddof=1))
    factor = float(_scipy().f.ppf((1 + level) / 2, len(arm) - 1, len(arm) - 1))
    return (1 + ratio) / 2, (1 + ratio / factor) / 2, (1 + ratio * factor) / 2


# ---- how many pairs


@dataclass(frozen=True)
class Spread:
    """What is known of the deviation of a difference, and how new pairs will be judged."""

    deviation: float
    freedom: float  # its degrees of freedom: the fewer, the more true deviations are possible
    level: float  # of the interval of one difference
    arms: float = 1  # that measure one deviation, each with as many pairs

    @staticmethod
    def of(estimate: Estimate, pairs: int) -> "Spread":
        """That of an estimate from so many pairs, for others that are judged like it."""
        e = estimate
        critical = (e.high - e.mean) / e.deviation * math.sqrt(pairs)
        level = 1 - 2 * float(_scipy().t.sf(critical, e.freedom))
        return Spread(e.deviation, e.freedom, level, e.freedom / (pairs - 1))

    def power(self, effect: float, pairs: int) -> float:
        """Probability that the interval of so many new pairs is on the side of zero that it should
        be on, where the true difference is `effect`: by the noncentral t distribution (Cohen 1988,
        Statistical Power Analysis for the Behavioral Sciences, 2.4), in the mean over the true
        deviations that are possible."""
        stats, shares = _scipy(), (np.arange(100) + 0.5) / 100
        measured = np.sqrt(stats.chi2.ppf(shares, self.freedom) / self.freedom)  # over the true one
        shift = abs(effect) / self.deviation * measured * math.sqrt(pairs)
        freedom = self.arms * (pairs - 1)
        return float(stats.nct.sf(_critical(freedom, self.level), freedom, shift).mean())

    def pairs_for(self, effect: float) -> int | None:
        """The fewest new pairs that show `effect` with probability POWER; None: over MAX_PAIRS."""
        if self.power(effect, MAX_PAIRS) < POWER:
            return None
        counts = range(2, MAX_PAIRS)  # power rises with their number
        return 2 + bisect_left(counts, POWER, key=lambda n: self.power(effect, n))

    def smallest_effect(self, pairs: int) -> float:
        """The true difference that so many new pairs show with probability POWER."""
        high = self.deviation
        while self.power(high, pairs) < POWER:
            high *= 2
        solve = _scipy("optimize").brentq
        return float(solve(lambda effect: self.power(effect, pairs) - POWER, 0, high))


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
