"""One arm against another: the difference of their held-out losses, and what it means in words."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lingua.tools.runs.compare.arms import SEED, Arm, HeldOutLosses, label
from lingua.tools.runs.compare.differences import only_rounding, same_run, unlike, unlike_rows
from lingua.tools.runs.compare.statistics import (
    Estimate,
    paired,
    pairs_for,
    smallest_shown,
    unpaired,
)
from lingua.tools.runs.records import Record, heldout

ROUNDING = 1e-4  # differences of losses that may be rounding, relative


@dataclass
class Pair:
    """Two runs with one seed; `losses` are float64 [steps] of each."""

    arm: Record
    base: Record
    arm_losses: np.ndarray
    base_losses: np.ndarray

    @property
    def differences(self) -> np.ndarray:
        return self.arm_losses - self.base_losses


@dataclass
class Outcome:
    """How the runs of an arm ended, one run of each seed."""

    label: str
    runs: int
    failed: list[str]  # names of runs that ended with an error or were killed
    diverged: list[str]  # names of the others whose last held-out loss is not finite
    lost: int  # how many of them have no loss at the step that is compared

    @property
    def bad(self) -> list[str]:
        return self.failed + self.diverged


@dataclass
class Comparison:
    """`arm` minus `base`: negative is better. Runs whose loss is not finite, or that failed before
    the last step, are in no number."""

    arm: Arm
    base: Arm
    steps: list[int]  # at which both were measured; the numbers are of the last one
    level: float  # probability of the intervals
    arm_losses: list[float]  # after the last step
    base_losses: list[float]
    pairs: list[Pair]
    paired: Estimate | None  # None for fewer than two pairs
    unpaired: Estimate | None  # None where an arm has fewer than two runs
    along: list[tuple[int, int, float, Estimate | None]]  # step, pairs, mean, interval
    outcomes: tuple[Outcome, Outcome]  # of the arm and of the base
    unlike: list[str]  # what is not the same in all runs besides the keys that name the arms
    identical: list[Pair]  # pairs of which both are the same run
    rounding: bool  # all pairs are the same mathematics, in another order of additions
    notes: list[str]  # what a reader must know besides

    @property
    def one_on_one(self) -> tuple[Record, Record] | None:
        """The two runs of the first pair, or the only two runs."""
        if self.pairs:
            return self.pairs[0].arm, self.pairs[0].base
        alone = len(self.arm.runs) == len(self.base.runs) == 1
        return (self.arm.runs[0], self.base.runs[0]) if alone else None

    @property
    def arm_label(self) -> str:
        return label(self.arm, self.base)

    @property
    def base_label(self) -> str:
        return label(self.base, self.arm)

    @property
    def survivors(self) -> bool:
        """Whether the numbers are of the runs that survived, and others did not."""
        return any(outcome.lost for outcome in self.outcomes)

    @property
    def estimate(self) -> Estimate | None:
        """The interval that decides: that of the pairs where there are two or more. It is not the
        narrower one, since choosing by the result would be wrong more often than the level says."""
        return self.paired or self.unpaired

    @property
    def is_identical(self) -> bool:
        return 0 < len(self.pairs) == len(self.identical)

    @property
    def noise_floor(self) -> float | None:
        """The smallest true difference that as many pairs would show four times out of five."""
        if self.paired is None:
            return None
        return smallest_shown(self.paired.deviation, len(self.pairs), self.level)

    @property
    def gain(self) -> float | None:
        """Variance of an unpaired difference over that of a paired one, of the runs in pairs: how
        many times as many runs the same certainty takes where seeds are not shared."""
        if self.paired is None or self.paired.deviation == 0 or self.rounding:
            return None
        both = [[p.arm_losses[-1], p.base_losses[-1]] for p in self.pairs]
        return float(np.var(both, axis=0, ddof=1).sum() / self.paired.deviation**2)

    def pairs_for(self, effect: float | None) -> tuple[float, int | None] | None:
        """(a true difference, how many pairs show it); without `effect` that which was measured.
        None where no deviation is known."""
        if self.paired is None or self.paired.deviation == 0:
            return None
        effect = abs(self.paired.mean) if effect is None else effect
        return effect, pairs_for(effect, self.paired.deviation, self.level)


def compare_all(
    arms: Sequence[Arm], base: Arm, measured: HeldOutLosses, level: float
) -> list[Comparison]:
    """Each arm against `base`; the intervals hold all together with at least `level`, by
    Bonferroni's correction."""
    return [compare(arm, base, measured, 1 - (1 - level) / len(arms)) for arm in arms]


def compare(arm: Arm, base: Arm, measured: HeldOutLosses, level: float) -> Comparison:
    """The comparison of two arms whose runs were all measured at `measured.steps`, but for those
    that failed."""
    notes: list[str] = []
    runs = [_once(one, measured, notes) for one in (arm, base)]
    finite = [[r for r in some if math.isfinite(measured.losses[id(r)][-1])] for some in runs]
    labels = label(arm, base), label(base, arm)
    outcomes = [_outcome(*of) for of in zip(labels, runs, finite, strict=True)]
    seeds = [{_seed(r): r for r in those if SEED in r.config} for those in finite]
    pairs = [
        Pair(a, b, measured.losses[id(a)], measured.losses[id(b)])
        for seed, a in seeds[0].items()
        if (b := seeds[1].get(seed)) is not None
    ]
    both = [(pair.arm, pair.base) for pair in pairs]
    differences = np.array([p.differences for p in pairs]).reshape(len(pairs), len(measured.steps))
    along = []
    for step, column in zip(measured.steps, differences.T, strict=True):
        known = column[np.isfinite(column)]
        if len(known):
            along.append((step, len(known), float(known.mean()), paired(known, level)))
    last, base_last = ([float(measured.losses[id(r)][-1]) for r in some] for some in finite)
    return Comparison(
        arm=arm,
        base=base,
        steps=measured.steps,
        level=level,
        arm_losses=last,
        base_losses=base_last,
        pairs=pairs,
        paired=paired(differences[:, -1], level),
        unpaired=unpaired(last, base_last, level),
        along=along,
        outcomes=(outcomes[0], outcomes[1]),
        unlike=[
            *unlike(dict(zip(labels, runs, strict=True)), _named(arm, base)),
            *unlike_rows(both),
        ],
        identical=[pair for pair in pairs if same_run(pair.arm, pair.base)],
        rounding=bool(pairs) and all(map(_is_rounding, pairs)),
        notes=notes + _cautions(arm, base),
    )


def _named(arm: Arm, base: Arm) -> list[str]:
    return [key for key in arm.values if arm.values[key] != base.values[key]]


def _outcome(name: str, runs: list[Record], finite: list[Record]) -> Outcome:
    failed = [run for run in runs if run.state == "failed"]
    others = [run for run in runs if run not in failed]
    diverged = [r for r in others if r not in finite or not np.isfinite(heldout(r)[1][-1:]).all()]
    lost = len(runs) - len(finite)
    return Outcome(name, len(runs), [r.name for r in failed], [r.name for r in diverged], lost)


def _is_rounding(pair: Pair) -> bool:
    largest = np.abs(pair.differences).max()
    return bool(largest < ROUNDING * pair.base_losses[-1]) and only_rounding(pair.arm, pair.base)


def _seed(record: Record) -> str:
    return json.dumps(record.config[SEED], default=str)


def _once(arm: Arm, measured: HeldOutLosses, notes: list[str]) -> list[Record]:
    """The measured runs of an arm, one of each seed: a second one is no further evidence."""
    kept: dict[str, Record] = {}
    for i, record in enumerate(r for r in arm.runs if id(r) in measured.losses):
        seed = _seed(record) if SEED in record.config else f"none {i}"
        first = kept.setdefault(seed, record)
        if first is not record:
            notes.append(f"{record.name} is left out: {first.name} has its config and seed")
    return list(kept.values())


def _cautions(arm: Arm, base: Arm) -> list[str]:
    """Where the two arms are not measured alike."""
    a, b = arm.runs[0], base.runs[0]
    cautions = []
    for key, meaning in (
        ("data.global_batch_size", "so a step has another number of rows"),
        ("data.seq_len", "so a step has another number of tokens"),
        ("steps", "so this step is at another part of the schedule"),
    ):
        values = [run.config.get(key) for run in (a, b)]
        if values[0] != values[1]:
            cautions.append(f"{key} is {values[0]} and {values[1]}, {meaning}")
    return cautions
