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
from lingua.tools.runs.compare.statistics import MAX_PAIRS, NO_SPREAD, PILOT, POWER, Spread
from lingua.tools.runs.compare.text import UNITS, about, wrapped


@dataclass
class PilotArgs:
    pilot: Free[str]  # folder of runs whose losses differ by chance as those of the comparison will
    effect: Free[float]  # the smallest difference that would matter
    arms: Free[int] = 2  # arms of the comparison, the base among them
    # measured by the losses after this step; null: the last one that all runs of the pilot have
    step: Free[int | None] = None
    level: Free[float] = 0.95  # level with which all intervals of the comparison hold together
    measure: Free[Literal["nats_per_byte", "nats_per_token", "bits_per_byte"]] = "nats_per_byte"

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 0, "step", maximum=MAX_STEPS)
        yield from bounds(self, 2, "arms", maximum=1000)
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
    result = plan(records, measured, args.effect, args.level, args.arms)
    step = int(measured.steps[-1])
    if len(words) < len(argv):
        print(json.dumps({**asdict(result), "step": step}, indent=1))
        return
    rows = [["pilot", "seeds", "runs", "training"]]
    for need in result.needs:
        seconds = result.seconds and need.runs and need.runs * result.seconds
        pairs = f"over {MAX_PAIRS:,}" if need.pairs is None else f"{need.pairs:,}"
        runs = "" if need.runs is None else f"{need.runs:,}"
        rows.append([need.pilot, pairs, runs, short_time(seconds) if seconds else "unknown"])
    per_run = "" if result.seconds is None else f", {short_time(result.seconds)} each in the pilot"
    two = "two arms" if args.arms == 2 else f"the base and one of {args.arms - 1} others"
    lines = [
        f"To show a difference of {args.effect:.4g} {UNITS[args.measure]} between {two} with "
        f"common seeds in {100 * POWER:.0f} % of cases, at {100 * args.level:.4g} %:",
        "",
        *align(rows, left=1),
        "",
        f"deviation of a difference: {result.deviation:.4g}, of {result.measured_by}; "
        f"the {100 * POWER:.0f} % are the mean over the true deviations that this leaves possible",
        f"training: of all runs, one after another{per_run}",
        about("step", step),
    ]
    for line in lines:
        print(*map(printable, wrapped(line) or [""]), sep="\n")


@dataclass(frozen=True)
class Need:
    """What showing an effect takes by a pilot."""

    pilot: str
    pairs: int | None  # None: more than MAX_PAIRS
    runs: int | None  # of all arms


@dataclass(frozen=True)
class Plan:
    """Arms of as many seeds as a difference takes."""

    deviation: float  # of one difference
    measured_by: str  # the runs that it is of
    needs: list[Need]  # by the pilot, and by a larger one where it is small
    seconds: float | None  # mean training time of a run of the pilot; None: not recorded


def plan(
    records: Sequence[Record], measured: HeldOutLosses, effect: float, level: float, arms: int
) -> Plan:
    """Raises UserError where no two runs of the pilot differ in nothing but the seed."""
    deviation, freedom, measured_by = _deviation(records, measured)
    alone = 1 - (1 - level) / (arms - 1)  # see compare_all
    needs = []
    for pilot, degrees in (
        ("this one", freedom),
        (f"{PILOT} seeds, if they measured the same", PILOT - 1),
    ):
        if degrees >= freedom:
            pairs = Spread(deviation, degrees, alone).pairs_for(effect)
            needs.append(Need(pilot, pairs, pairs and arms * pairs))
    last = np.array([measured.steps[-1]])
    seconds = float(np.mean([Axes.of(record.metrics).at(last)[2] for record in records]))
    return Plan(deviation, measured_by, needs, seconds if math.isfinite(seconds) else None)


def _deviation(records: Sequence[Record], measured: HeldOutLosses) -> tuple[float, float, str]:
    """(standard deviation of one difference, its degrees of freedom, of which runs it is)."""
    arms = find_arms(records)
    base = choose_base(arms)
    others = [arm for arm in arms if arm is not base]
    comparisons = (
        compare_all(others, base, measured, anytime=False, variance="equal") if others else []
    )
    spreads = [c.spread for c in comparisons]
    if spreads and spreads[0] and None not in spreads:
        pairs = counted(sum(len(c.pairs) for c in comparisons), "pair")
        alike = ", of arms that are assumed to vary alike" if len(spreads) > 1 else ""
        return spreads[0].deviation, spreads[0].freedom, f"{pairs}{alike}"
    losses = [[float(measured.losses[id(run)][-1]) for run in arm.runs] for arm in arms]
    losses = [[loss for loss in values if math.isfinite(loss)] for values in losses]
    several = [values for values in losses if len(values) > 1]
    if not several:
        raise UserError(
            "pilot: no two of its runs differ in nothing but the seed, so nothing is known of "
            "chance; run one config with two seeds or more"
        )
    varied = [x for x in several if np.std(x, ddof=1) > NO_SPREAD * max(map(abs, x))]
    if not varied:
        raise UserError("pilot: the seed has no effect on its losses, so more seeds show nothing")
    freedom = sum(len(values) - 1 for values in varied)
    squares = sum(len(values) * float(np.var(values)) for values in varied)
    runs = counted(sum(len(values) for values in varied), "run")
    return (
        math.sqrt(2 * squares / freedom),
        freedom,
        f"{runs} without pairs; with common seeds fewer may do",
    )
