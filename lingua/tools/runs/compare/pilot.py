"""How many seeds a comparison takes, before anything runs:

    python -m lingua compare plan effect=0.01 pilot=runs/base

The pilot is a folder of runs, or a pattern: one config with two seeds or more, or pairs of two
configs, which measure what common seeds are worth.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from lingua.base.errors import UserError
from lingua.base.format import align, counted, printable, short_time
from lingua.config.load import load
from lingua.config.schema import MAX_STEPS, Free, bounds, require
from lingua.run.records import Record
from lingua.tools.runs.compare.arms import (
    HeldOutLosses,
    choose_base,
    find_arms,
    measure_runs,
    open_all,
)
from lingua.tools.runs.compare.axis import Axes
from lingua.tools.runs.compare.comparison import compare_all
from lingua.tools.runs.compare.statistics import BOUND, MAX_PAIRS, POWER, deviation_bound, pairs_for
from lingua.tools.runs.compare.text import UNITS, about, wrapped


@dataclass
class PilotArgs:
    pilot: Free[str]  # folder of runs whose losses differ by chance as those of the comparison will
    effect: Free[float]  # the smallest difference that would matter
    # measured by the losses after this step; null: the last one that all runs of the pilot have
    step: Free[int | None] = None
    level: Free[float] = 0.95  # level of the interval that is to exclude zero
    measure: Free[Literal["nats_per_byte", "nats_per_token", "bits_per_byte"]] = "nats_per_byte"

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 0, "step", maximum=MAX_STEPS)
        yield from require(self, "above 0 and finite", lambda v: 0 < v < math.inf, "effect")
        yield from require(self, "from 0.5 to 0.9999", lambda v: 0.5 <= v <= 0.9999, "level")


def main(argv: Sequence[str]) -> None:
    words = [word for word in argv if word != "--json"]
    args, _ = load(PilotArgs, words, program_doc=__doc__)
    records = [run for run in open_all([args.pilot]) if run.config and run.has_begun]
    if not records:
        raise UserError(f"pilot = {args.pilot}: none of its runs has begun")
    measured = measure_runs(records, args.measure, args.step)
    records = [run for run in records if id(run) in measured.losses]
    result = plan(records, measured, args.effect, args.level)
    step = int(measured.steps[-1])
    if len(words) < len(argv):
        needs = [{**asdict(need), "runs": need.runs} for need in result.needs]
        print(json.dumps({**asdict(result), "needs": needs, "step": step}, indent=1))
        return
    rows = [["deviation of a difference", "", "seeds", "runs", "training"]]
    for need in result.needs:
        chance = f" ({100 * BOUND:.0f} %)" if need.kind != "measured" else ""
        seconds = result.seconds and need.runs and need.runs * result.seconds
        pairs = f"over {MAX_PAIRS:,}" if need.pairs is None else f"{need.pairs:,}"
        runs = "" if need.runs is None else f"{need.runs:,}"
        rows.append([need.kind + chance, f"{need.deviation:.4g}", pairs, runs,
                     short_time(seconds) if seconds else "unknown"])  # fmt: skip
    per_run = "" if result.seconds is None else f", {short_time(result.seconds)} each in the pilot"
    lines = [
        f"To show a difference of {args.effect:.4g} {UNITS[args.measure]} between two arms with "
        f"common seeds in {100 * POWER:.0f} % of cases, at {100 * args.level:.4g} %:",
        "",
        *align(rows, left=1),
        "",
        f"deviation: of {result.measured_by}",
        f"training: of all runs, one after another{per_run}",
        about("step", step),
    ]
    for line in lines:
        print(*map(printable, wrapped(line) or [""]), sep="\n")


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
