"""Arms against one other: the differences of their held-out losses, and what decides on them."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from lingua.run.records import Record
from lingua.tools.runs.compare.arms import SEED, Arm, By, HeldOutLosses, label, listed
from lingua.tools.runs.compare.differences import only_rounding, same_run, unlike, unlike_rows
from lingua.tools.runs.compare.statistics import (
    NO_SPREAD,
    Estimate,
    Spread,
    anytime_interval,
    far_value,
    is_normal,
    paired,
    pooled,
    seed_gain,
    sign_flip,
    unpaired,
)
from lingua.tools.runs.held_out import heldout
from lingua.tools.runs.launches import (
    assumes_equal,
    first_result,
    launched_at,
    unfinished,
    was_stopped,
)

ROUNDING = 1e-4  # differences of losses that may be rounding, relative
GAIN_PAIRS = 5  # pairs below which the worth of common seeds is not known within a factor of ten


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
    stopped: list[str]  # names of runs that were stopped before their end
    lost: list[str]  # names of those of all these without a loss at the step that is compared

    @property
    def bad(self) -> list[str]:
        return self.failed + self.diverged


@dataclass
class Comparison:
    """`arm` minus `base`: negative is better. Runs whose loss is not finite, or that failed or were
    stopped before the last step, are in no number."""

    arm: Arm
    base: Arm
    steps: Sequence[float]  # at which both were measured; the numbers are of the last one
    by: By  # what `steps` are
    level: float  # probability of the intervals, but for that of `pooled`, which is of all arms
    arm_losses: dict[str, float]  # after the last step, by seed
    base_losses: dict[str, float]
    pairs: list[Pair]
    paired: Estimate | None  # None for fewer than two pairs
    unpaired: Estimate | None  # None where an arm has fewer than two runs
    along: list[tuple[float, int, float, Estimate | None]]  # step, pairs, mean, interval
    outcomes: tuple[Outcome, Outcome]  # the arm's and the base's
    unlike: list[str]  # what is not the same in all runs besides the keys that name the arms
    identical: list[Pair]  # pairs of which both are the same run
    rounding: bool  # all pairs are the same mathematics, in another order of additions
    notes: list[str]  # what a reader must know besides
    slack: float  # how wrong interpolated losses may make a difference; the intervals include it
    anytime: Estimate | None = None  # the interval that decides where pairs were added on the way
    pooled: Estimate | None = None  # the interval that decides where arms are said to vary alike
    assumed: str = ""  # how it is known that arms have one variance
    blocks: bool = False  # `pooled` compares within seeds
    added: str = ""  # why `anytime` decides; empty: it does not

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
    def survivors(self) -> str:
        """Which runs the numbers are of, where others have no loss; empty: of all."""
        lost = {name for outcome in self.outcomes for name in outcome.lost}
        stopped = {name for outcome in self.outcomes for name in outcome.stopped}
        kinds = ["survived"] * bool(lost - stopped) + ["were not stopped"] * bool(lost & stopped)
        return f"Of the runs that {' and '.join(kinds)}: " if kinds else ""

    @property
    def smaller(self) -> int:
        """Runs of the smaller arm."""
        return min(len(self.arm_losses), len(self.base_losses))

    @property
    def is_paired(self) -> bool:
        """By the number of runs alone: choosing by the result, such as the narrower interval, would
        be wrong more often than the level says."""
        return len(self.pairs) >= max(2, self.smaller / 2)

    @property
    def estimate(self) -> Estimate | None:
        """The interval that decides; None where none does."""
        if self.is_flat:
            return None
        if self.added:
            return self.anytime if self.is_paired else None
        return self.pooled or (self.paired if self.is_paired else self.unpaired)

    @property
    def is_flat(self) -> bool:
        """Whether an arm, or the difference within pairs, is the same for all seeds, but for
        rounding: then nothing is known of chance."""
        e = self.paired if self.is_paired else None
        return bool(self.constant) or (e is not None and e.deviation <= self._no_spread)

    @property
    def _no_spread(self) -> float:
        return NO_SPREAD * max(map(abs, (*self.arm_losses.values(), *self.base_losses.values())))

    @property
    def constant(self) -> list[str]:
        """The arms in which runs of several seeds all have the same loss, but for rounding."""
        arms = ((self.arm_label, self.arm_losses), (self.base_label, self.base_losses))
        spreads = [(name, [*x.values()]) for name, x in arms if len(x) > 1]
        return [name for name, x in spreads if np.std(x, ddof=1) <= self._no_spread]

    @property
    def is_identical(self) -> bool:
        return 0 < len(self.pairs) == len(self.identical)

    @property
    def differences(self) -> np.ndarray:
        """Of the pairs, after the last step: float64 [pairs]."""
        return np.array([pair.differences[-1] for pair in self.pairs])

    @property
    def sign_flip(self) -> float | None:
        """p value of the test that needs no normal distribution; None for fewer than two pairs."""
        x, slack = self.differences, self.slack
        return sign_flip(x - np.clip(x.mean(), -slack, slack)) if len(x) > 1 else None

    @property
    def is_normal(self) -> bool:
        return is_normal(self.differences)

    @property
    def far(self) -> tuple[Pair, Estimate] | None:
        """A pair that is far from the rest, and the interval of the others."""
        at = far_value(self.differences)
        if at is None:
            return None
        interval = anytime_interval if self.added else paired
        rest = interval(np.delete(self.differences, at), self.level)
        return None if rest is None else (self.pairs[at], rest.widened(self.slack))

    @property
    def atypical(self) -> tuple[int, int]:
        """How many runs of the arm and of the base failed, diverged, or are far from the rest: of a
        far pair the run that is further from the median of its arm, without pairs one of an arm."""
        bad = [set(outcome.bad) for outcome in self.outcomes]
        losses = self.arm_losses, self.base_losses
        if self.is_paired and self.far:
            pair = self.far[0]
            medians = [float(np.median([*of.values()])) for of in losses]
            arm_off = abs(pair.arm_losses[-1] - medians[0])
            is_arm = arm_off >= abs(pair.base_losses[-1] - medians[1])
            bad[0 if is_arm else 1].add((pair.arm if is_arm else pair.base).name)
        for names, arm, of in zip(bad, (self.arm, self.base), losses, strict=True):
            at = None if self.is_paired else far_value([*of.values()])
            if at is not None:
                names.add(next(run.name for run in arm.runs if _seed(run) == [*of][at]))
        return len(bad[0]), len(bad[1])

    @property
    def spread(self) -> Spread | None:
        """By which new pairs are planned; None where the deviation of a pair is not known."""
        if self.estimate is None or not (self.blocks if self.pooled else self.is_paired):
            return None
        e = self.pooled or self.paired
        return None if e is None else Spread.of(e.widened(-self.slack), len(self.pairs))

    @property
    def smallest_effect(self) -> float | None:
        """The true difference that as many new pairs would show four times out of five."""
        known = self.spread
        return None if known is None else self.slack + known.smallest_effect(len(self.pairs))

    @property
    def gain(self) -> tuple[float, float, float] | None:
        """How many times as many runs the same certainty takes where seeds are not shared, by the
        runs in pairs, and its interval; None for few."""
        if len(self.pairs) < GAIN_PAIRS or self.spread is None or self.rounding:
            return None
        arm, base = ([getattr(p, x)[-1] for p in self.pairs] for x in ("arm_losses", "base_losses"))
        return seed_gain(arm, base, self.level)

    def pairs_for(self, effect: float, pilot: int | None = None) -> int | None:
        """How many new pairs show a true difference, by the deviation that was measured, or as if
        so many pairs had measured it. None: over MAX_PAIRS, or no deviation is known."""
        known = self.spread
        if known is None:
            return None
        if pilot is not None:
            known = replace(known, freedom=known.arms * (pilot - 1))
        return known.pairs_for(max(0.0, effect - self.slack))


def compare_all(
    arms: Sequence[Arm],
    base: Arm,
    measured: HeldOutLosses,
    level: float = 0.95,
    anytime: bool | None = None,
    variance: Literal["separate", "equal"] | None = None,
    given: Sequence[Record] = (),
) -> list[Comparison]:
    """Each arm against `base`; the intervals hold all together with at least `level`.

    Args:
        anytime: whether they hold for those who look after each pair; None: where a run is not over
            or was launched after others had a result.
        variance: one for each difference (Bonferroni), or one of all arms, which are said to vary
            alike; None: as all of them were launched, else separate. No loss decides it: tests of
            equal variances miss what makes intervals wrong.
        given: runs that may be in no arm, since they have not begun.
    """
    alone = 1 - (1 - level) / len(arms)
    comparisons = [_alone(arm, base, measured, alone) for arm in arms]
    looked = "it is asked for" if anytime else _looked(given, comparisons)
    added = "" if anytime is False else looked
    for c in comparisons if added else ():
        c.added, c.anytime = added, anytime_interval(c.differences, alone)
    for c in comparisons if looked and not added else ():
        c.notes.append(f"{looked}; anytime=false states that no result has decided on that")
    launched = variance is None and assumes_equal([r for a in (*arms, base) for r in a.runs])
    if (variance == "equal" or launched) and not added:
        for c in comparisons:
            c.assumed = "was assumed at the launch" if launched else "is assumed by variance=equal"
        # Seeds are blocks of the paired arms. Another one has an interval of its own, if any.
        together = [c for c in comparisons if c.is_paired] or comparisons
        able = sum(c.is_paired or c.unpaired is not None for c in comparisons)
        _pool(together, 1 - (1 - level) * len(together) / max(able, len(together)))
    for c in comparisons:
        intervals = (c.paired, c.unpaired, c.anytime, c.pooled)
        c.paired, c.unpaired, c.anytime, c.pooled = (e and e.widened(c.slack) for e in intervals)
    return comparisons


def _pool(comparisons: list[Comparison], level: float) -> None:
    """Sets the intervals of one variance, with seeds as blocks where all arms are paired. Arms
    without spread are no evidence of it."""
    used = [c for c in comparisons if c.arm_losses and c.base_losses and not c.is_flat]
    if not used:
        return
    arms = [used[0].base_losses, *(c.arm_losses for c in used)]
    blocks = all(c.is_paired for c in used)
    for c, estimate in zip(used, pooled(arms, level, blocks) or [], strict=False):
        c.pooled, c.blocks = estimate, blocks


def _alone(arm: Arm, base: Arm, measured: HeldOutLosses, level: float) -> Comparison:
    """The comparison of two arms whose runs were all measured at `measured.steps`, but for those
    that failed or were stopped, without an interval of several arms."""
    notes: list[str] = []
    runs = [_once(one, measured, notes) for one in (arm, base)]
    finite = [[r for r in some if math.isfinite(measured.losses[id(r)][-1])] for some in runs]
    labels = label(arm, base), label(base, arm)
    named = [key for key in arm.values if arm.values[key] != base.values[key]]
    until = measured.steps[-1] if measured.by == "step" else None
    outcomes = [_outcome(*of, until) for of in zip(labels, runs, finite, strict=True)]
    seeds = [{_seed(r): r for r in those} for those in finite]
    pairs = [
        Pair(a, b, measured.losses[id(a)], measured.losses[id(b)])
        for seed, a in seeds[0].items()
        if (b := seeds[1].get(seed)) is not None
    ]
    both = [(pair.arm, pair.base) for pair in pairs]
    single = seeds[0].keys() ^ seeds[1].keys()
    lone = [run.name for one in seeds for seed, run in one.items() if seed in single]
    if lone and (pairs or 1 in map(len, seeds)):
        notes.append(f"in no pair, as the other arm has no loss of the seed: {listed(lone)}")
    differences = np.array([p.differences for p in pairs]).reshape(len(pairs), len(measured.steps))
    slack = np.zeros(len(measured.steps))
    for some in finite if measured.errors else ():
        errors = [measured.errors[id(r)] for r in some]  # runs of an arm share all but their noise
        slack += np.abs(np.mean(errors, 0)).sum(0) if some else 0.0
    if slack[-1] > 0:
        notes.append(
            "losses are interpolated between measurements; for the error of that the intervals are "
            f"{slack[-1]:.1g} wider at each end, and less with a smaller validation.every"
        )
    along = []
    for step, column, error in zip(measured.steps, differences.T, slack.tolist(), strict=True):
        known = column[np.isfinite(column)]
        if len(known):
            e = paired(known, level)
            along.append((step, len(known), float(known.mean()), e and e.widened(error)))
    texts = measured.texts([*runs[0], *runs[1]])
    last, base_last = (
        {seed: float(measured.losses[id(r)][-1]) for seed, r in one.items()} for one in seeds
    )
    return Comparison(
        arm=arm,
        base=base,
        steps=measured.steps,
        by=measured.by,
        level=level,
        arm_losses=last,
        base_losses=base_last,
        pairs=pairs,
        paired=paired(differences[:, -1], level),
        unpaired=unpaired(list(last.values()), list(base_last.values()), level),
        along=along,
        outcomes=(outcomes[0], outcomes[1]),
        unlike=unlike(dict(zip(labels, runs, strict=True)), named, texts) + unlike_rows(both),
        identical=[pair for pair in pairs if same_run(pair.arm, pair.base)],
        rounding=bool(pairs) and all(map(_is_rounding, pairs)),
        notes=notes + _cautions(arm, base, measured.by),
        slack=float(slack[-1]),
    )


def _outcome(name: str, runs: list[Record], finite: list[Record], step: float | None) -> Outcome:
    failed = [run for run in runs if run.state == "failed"]
    stopped = [run for run in runs if was_stopped(run, step)]
    others = [run for run in runs if run not in failed]
    infinite = [run for run in others if not np.isfinite(heldout(run)[1][-1:]).all()]
    diverged = [run for run in others if run in infinite or run not in (*finite, *stopped)]
    lost = [run for run in runs if run not in finite]
    names = ([run.name for run in some] for some in (failed, diverged, stopped, lost))
    return Outcome(name, len(runs), *names)


def _looked(given: Sequence[Record], comparisons: Sequence[Comparison]) -> str:
    """Why one who saw results may have decided by them how many runs there are; empty where nothing
    says so. Depends on no loss."""
    until = comparisons[0].steps[-1] if comparisons[0].by == "step" else None
    for run in (*given, *(run for c in comparisons for run in (*c.arm.runs, *c.base.runs))):
        if how := unfinished(run, until):
            return f"{run.name} {how}"
    for c in comparisons:
        arm, base = first_result(c.arm.runs), first_result(c.base.runs)
        for run in (*c.arm.runs, *c.base.runs) if arm and base else ():
            launched = launched_at(run)
            if arm and base and launched and launched > max(arm, base)[0]:
                return f"{run.name} was launched after {arm[1]} and {base[1]} had a result"
    return ""


def _is_rounding(pair: Pair) -> bool:
    largest = np.abs(pair.differences).max()
    return bool(largest < ROUNDING * pair.base_losses[-1]) and only_rounding(pair.arm, pair.base)


def _seed(record: Record) -> str:
    """The seed of a run; of one without a seed its folder, which no other run has."""
    seeded = SEED in record.config
    return json.dumps(record.config[SEED], default=str) if seeded else str(record.folder)


def _once(arm: Arm, measured: HeldOutLosses, notes: list[str]) -> list[Record]:
    """The measured runs of an arm, one of each seed: a second one is no further evidence."""
    kept: dict[str, Record] = {}
    for record in (r for r in arm.runs if id(r) in measured.losses):
        first = kept.setdefault(_seed(record), record)
        if first is not record:
            notes.append(f"{record.name} is left out: {first.name} has its config and seed")
    return list(kept.values())


def _cautions(arm: Arm, base: Arm, by: By) -> list[str]:
    """Returns a line for each way in which the two arms are not measured alike."""
    a, b = arm.runs[0], base.runs[0]
    cautions = []
    for key, meaning in (
        ("data.global_batch_size", "so a step has another number of rows"),
        ("data.seq_len", "so a step has another number of tokens"),
        ("steps", "so this step is at another part of the schedule"),
    ):
        values = [run.config.get(key) for run in (a, b)]
        if values[0] != values[1] and (by == "step" or key == "steps"):
            cautions.append(f"{key} is {values[0]} and {values[1]}, {meaning}")
    return cautions
