"""When a change is kept: a rule over a whole series of tries that bounds the mean share of false
ones among those that are kept, whoever looks after each pair and however many tries there are. For
normal differences that is proved without the prior and with fresh runs of the base for each try;
tests/tools/study/test_rule.py simulates the rest.

A pair is a run of the base and one of the changed code, of one seed; its difference is the base's
loss minus the other. Differences are evidence, an e-value, that the true one is above 0. A try is
kept once its e-value reaches what its place in the series asks for (e-LOND: Xu and Ramdas 2024,
Online multiple testing with e-values, arXiv 2311.06412), and dropped once little hope is left
(futility: Lan, Simon and Halperin 1982).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lingua.base.errors import import_optional
from lingua.tools.runs.compare.statistics import MIXTURE, anytime_interval

MIN_PAIRS = 2  # before a try is decided
PRIOR_FREEDOM, PRIOR_AFTER = 4.0, 3  # the prior's degrees of freedom, and decided tries before it
HOPE = 0.84  # of the normal distribution: one effect in five of this size looks smaller
DECAY = 1.3  # of the share of the error that try t is given, t ** -DECAY: many tries have some
LEVEL = 0.95  # of the interval that is printed


@dataclass(frozen=True)
class Test:
    """What is fixed before the first run of a try."""

    number: int  # of the tries of a series, from 1
    needed: float  # e-value at which it is kept
    effect: float  # that is worth keeping, in the unit of the losses
    margin: float  # a loss of less is accepted: 0, but for a simplification
    max_pairs: int
    freedom: float = 0.0  # of the prior on the variance of a difference; 0: none
    variance: float = 0.0  # by that prior


@dataclass(frozen=True)
class Look:
    """What the pairs so far show."""

    pairs: int
    mean: float  # difference, above 0 where the change is better
    low: float  # ends of an interval that holds at all looks of one try, if there is no prior
    high: float
    deviation: float  # standard deviation of a difference
    e: float  # e-value against "it is not better", or "it is worse by the margin"
    verdict: Literal["kept", "dropped"] | None  # None: not decided
    reason: str = ""


def next_test(
    number: int,
    n_kept: int,
    earlier: Iterable[tuple[float, int]],
    error: float,
    effect: float,
    margin: float,
    max_pairs: int,
) -> Test:
    """The test of try `number` of a series of which `n_kept` are kept so far.

    Its share of the error is that of e-LOND, error * share(number) * (n_kept + 1), where all shares
    add up to 1. The prior on the deviation is that of Smyth 2004 (Linear models and empirical Bayes
    methods, 3.1) with fixed degrees of freedom: the pooled variance of the `earlier` decided tries,
    (standard deviation, pairs) of each, once there are PRIOR_AFTER.
    """
    known = [(deviation, n) for deviation, n in earlier if n > 1 and deviation > 0]
    share = number**-DECAY / float(_special().zeta(DECAY))
    needed = 1 / (error * share * (n_kept + 1))
    if len(known) < PRIOR_AFTER:
        return Test(number, needed, effect, margin, max_pairs)
    squares = sum(deviation**2 * (n - 1) for deviation, n in known)
    variance = squares / sum(n - 1 for _, n in known)
    return Test(number, needed, effect, margin, max_pairs, PRIOR_FREEDOM, variance)


def e_value(n: int, total: float, squares: float, freedom: float, variance: float) -> float:
    """The e-value of n differences of which the sum and the sum of squares are given, against a
    mean of 0 or less: the right Haar mixture over the deviation, and a half normal one of variance
    1 / MIXTURE over the mean in deviations (Perez-Ortiz, Lardy, de Heide and Grünwald 2022,
    E-statistics, group invariance and anytime valid testing). With a prior of `freedom` degrees it
    is one in the mean over deviations that are distributed as the prior says."""
    s, df = squares + freedom * variance, n + freedom
    if s == 0:
        return 0.0
    b = s - total**2 / (n + MIXTURE)
    at = total * math.sqrt(df / (b * (n + MIXTURE)))
    log = 0.5 * math.log(MIXTURE / (n + MIXTURE)) + df / 2 * math.log(s / b)
    return 2 * math.exp(min(log, 700.0)) * float(_special().stdtr(df, at))


def look(test: Test, differences: Sequence[float]) -> Look:
    """What a try's pairs show, in the order of their seeds. At least MIN_PAIRS."""
    n = len(differences)
    estimate = anytime_interval(differences, LEVEL, test.freedom, test.variance)
    assert estimate is not None
    mean, deviation = estimate.mean, estimate.deviation
    shifted = [x + test.margin for x in differences]
    squares = math.fsum(x * x for x in shifted)
    e = e_value(n, math.fsum(shifted), squares, test.freedom, test.variance)
    prior = test.freedom * test.variance
    spread = math.sqrt(((n - 1) * deviation**2 + prior) / (n - 1 + test.freedom))
    best = mean + HOPE * spread / math.sqrt(n)
    verdict: Literal["kept", "dropped"] | None = None
    reason = ""
    if e >= test.needed:
        verdict = "kept"
    elif not any(differences) and not test.margin:
        verdict, reason = "dropped", "its losses are those of the base to the bit"
    elif best + test.margin < (test.margin or test.effect) / 2:
        worse = f"it is worse by {-mean:.2g}" if mean < 0 else "it gains too little"
        verdict = "dropped"
        reason = f"no more than {best:.2g} better" if best > 0 else worse
        reason += f" with {n} pairs"
    elif n >= test.max_pairs:
        verdict, reason = "dropped", f"not shown with {n} pairs"
    return Look(n, mean, estimate.low, estimate.high, deviation, e, verdict, reason)


def _special():  # type: ignore[no-untyped-def]
    return import_optional("scipy.special", "lingua study")
