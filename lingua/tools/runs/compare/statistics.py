"""Intervals of a mean difference, and how many pairs would show one.

Runs that share a seed share initial values and rows, so their losses vary together: the interval
of paired differences is narrower than that of two separate samples as far as they do. Both are
intervals of Student's t, which is exact for few runs where differences are normally distributed.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lingua.base.errors import import_optional

POWER = 0.8  # probability of showing a difference that counts as large enough to be shown
MAX_PAIRS = 10_000  # beyond, nobody trains them


@dataclass(frozen=True)
class Estimate:
    """A mean difference; in the unit of the values."""

    mean: float
    low: float
    high: float  # low and high end of the interval
    deviation: float  # standard deviation of one difference
    level: float  # probability with which an interval like this one contains the true difference

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def paired(differences: Sequence[float] | np.ndarray, level: float) -> Estimate | None:
    """The interval of Student's t of the mean of one sample; None for fewer than two."""
    n = len(differences)
    if n < 2:
        return None
    values = np.array(differences)
    mean, deviation = float(values.mean()), float(values.std(ddof=1))
    half = deviation / math.sqrt(n) * _critical(n - 1, level)
    return Estimate(mean, mean - half, mean + half, deviation, level)


def unpaired(
    arm: Sequence[float] | np.ndarray, base: Sequence[float] | np.ndarray, level: float
) -> Estimate | None:
    """Welch's interval of the mean of `arm` minus that of `base`, whose variances may differ; None
    where one of them has fewer than two values."""
    if min(len(arm), len(base)) < 2:
        return None
    mean = float(np.mean(arm) - np.mean(base))
    parts = [float(np.var(values, ddof=1)) / len(values) for values in (arm, base)]
    error, deviation = math.sqrt(sum(parts)), math.sqrt(np.var(arm, ddof=1) + np.var(base, ddof=1))
    if error == 0:
        return Estimate(mean, mean, mean, deviation, level)
    # Welch (1947): the degrees of freedom of the sum of two variances.
    shares = [
        (part / error**2) ** 2 / (n - 1)
        for part, n in zip(parts, map(len, (arm, base)), strict=True)
    ]
    half = error * _critical(1 / sum(shares), level)
    return Estimate(mean, mean - half, mean + half, deviation, level)


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


def smallest_shown(deviation: float, pairs: int, level: float) -> float:
    """The true difference that so many pairs show with probability POWER: the noise floor."""
    few, enough = 0.0, 1.0  # differences in standard deviations
    while power(enough, 1.0, pairs, level) < POWER:
        few, enough = enough, 2 * enough
    for _ in range(40):
        middle = (few + enough) / 2
        few, enough = (
            (middle, enough) if power(middle, 1.0, pairs, level) < POWER else (few, middle)
        )
    return deviation * enough


def proportion(count: int, of: int, level: float) -> tuple[float, float]:
    """The interval of a probability that `count` of `of` runs show, exact for few (Clopper and
    Pearson 1934, Biometrika 26)."""
    beta, tail = _scipy().beta, (1 - level) / 2
    low = beta.ppf(tail, count, of - count + 1) if count else 0.0
    high = beta.ppf(1 - tail, count + 1, of - count) if count < of else 1.0
    return float(low), float(high)


def _critical(freedom: float, level: float) -> float:
    return float(_scipy().t.ppf((1 + level) / 2, freedom))


def _scipy() -> Any:
    return import_optional("scipy.stats", "lingua compare")
