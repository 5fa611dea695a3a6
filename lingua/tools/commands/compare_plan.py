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

from lingua.base.errors import UserError
from lingua.base.format import align, printable, short_time
from lingua.config.load import load
from lingua.config.schema import MAX_STEPS, Free, bounds, require


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
    # Imported here, since --help needs no numpy.
    from lingua.tools.runs.compare.arms import measure_runs, open_all
    from lingua.tools.runs.compare.pilot import plan
    from lingua.tools.runs.compare.statistics import BOUND, MAX_PAIRS, POWER
    from lingua.tools.runs.compare.text import UNITS, about, wrapped

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
