"""How many seeds a difference takes and how long they train, from the losses of a pilot."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lingua.base.errors import UserError
from lingua.base.format import counted
from lingua.run.records import Record
from lingua.tools.runs.axes import Axes
from lingua.tools.runs.compare.arms import HeldOutLosses, choose_base, find_arms
from lingua.tools.runs.compare.comparison import compare_all
from lingua.tools.runs.compare.statistics import deviation_bound, pairs_for


@dataclass(frozen=True)
class Need:
    """What showing an effect takes if one difference has this standard deviation."""

    kind: str  # measured, or its upper bound
    deviation: float
    pairs: int | None  # None: more than MAX_PAIRS

    @property
    def runs(self) -> int | None:
        return self.pairs and 2 * self.pairs


@dataclass(frozen=True)
class Plan:
    """Two arms of as many seeds as a difference takes."""

    needs: list[Need]
    measured_by: str  # the runs that the deviation is of
    seconds: float | None  # mean training time of a run of the pilot; None: not recorded


def plan(records: Sequence[Record], measured: HeldOutLosses, effect: float, level: float) -> Plan:
    """Raises UserError where no two runs of the pilot differ in nothing but the seed."""
    deviation, freedom, measured_by = _deviation(records, measured)
    if deviation == 0:
        raise UserError("pilot: the seed has no effect on its losses, so more seeds show nothing")
    needs = [
        Need(kind, value, pairs_for(effect, value, level))
        for kind, value in (
            ("measured", deviation),
            ("upper bound", deviation_bound(deviation, freedom)),
        )
    ]
    last = np.array([measured.steps[-1]])
    seconds = float(np.mean([Axes.of(record.metrics).at(last)[2] for record in records]))
    return Plan(needs, measured_by, seconds if math.isfinite(seconds) else None)


def _deviation(records: Sequence[Record], measured: HeldOutLosses) -> tuple[float, float, str]:
    """(standard deviation of one difference, its degrees of freedom, of which runs it is)."""
    arms = find_arms(records)
    base = choose_base(arms)
    others = [arm for arm in arms if arm is not base]
    comparisons = compare_all(others, base, measured, anytime=False) if others else []
    if comparisons and all(c.is_paired for c in comparisons):
        e = comparisons[0].pooled or comparisons[0].paired
        if e is not None:
            pairs = counted(sum(len(c.pairs) for c in comparisons), "pair")
            return e.deviation, e.freedom, pairs
    losses = [
        [loss for run in arm.runs if math.isfinite(loss := float(measured.losses[id(run)][-1]))]
        for arm in arms
    ]
    freedom = sum(max(0, len(values) - 1) for values in losses)
    if freedom == 0:
        raise UserError(
            "pilot: no two of its runs differ in nothing but the seed, so nothing is known of "
            "chance; run one config with two seeds or more"
        )
    squares = sum(len(values) * float(np.var(values)) for values in losses if values)
    runs = counted(sum(len(values) for values in losses), "run")
    return (
        math.sqrt(2 * squares / freedom),
        freedom,
        f"{runs} without pairs; with common seeds fewer may do",
    )
