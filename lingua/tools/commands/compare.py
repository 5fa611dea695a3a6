"""Whether runs differ by more than chance:

    python -m lingua compare A... --against B...
    python -m lingua compare runs/lr-* --against runs/base-*
    python -m lingua compare runs/sweep effect=0.005 --json
    python -m lingua compare plan --help    how many seeds it takes

A and B are dump dirs, folders of them, or patterns. An arm is the runs of one code whose configs
differ in nothing but the seed and operational keys, such as logging.freq; runs of two arms with one
seed are a pair. Without --against, the arm with the most runs is what the others are compared with.
--json prints all of it for programs.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lingua.base.errors import UserError
from lingua.base.format import printable
from lingua.config.load import load
from lingua.config.schema import MAX_STEPS, Free, bounds, require
from lingua.tools.arguments import split_folders

USAGE = "usage: python -m lingua compare A... [--against B...] [key=value ...] [--json]"


@dataclass
class CompareArgs:
    # compare after this step, without the runs that were not measured there; null: the last step
    # at which all runs were
    step: Free[int | None] = None
    # what is equal where runs are compared: the largest that all have; but for steps, losses are
    # interpolated between measurements
    by: Free[Literal["step", "tokens", "flops", "time"]] = "step"
    # a difference that would matter: how many pairs would show it is printed
    effect: Free[float | None] = None
    # probability that the true differences are in their intervals: in all of them together where
    # several arms are compared
    level: Free[float] = 0.95
    # the intervals hold for those who look after each pair; null: where a run is not over, or was
    # launched after others had a result
    anytime: Free[bool | None] = None
    # separate: each difference has its own; equal: you assume that all arms vary alike, whatever
    # the runs have shown, so that all of them measure one variance; null: as all runs were launched
    variance: Free[Literal["separate", "equal"] | None] = None
    measure: Free[Literal["nats_per_byte", "nats_per_token", "bits_per_byte"]] = "nats_per_byte"

    # ignore: runs of different code are in one arm, and a line states it
    code: Free[Literal["compare", "ignore"]] = "compare"
    # ignore: losses on different held-out text are compared, and a line states it
    text: Free[Literal["compare", "ignore"]] = "compare"

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 0, "step", maximum=MAX_STEPS)
        if self.step is not None and self.by != "step":
            yield "step", f"is {self.step}; must be null where runs are compared by {self.by}"
        yield from require(self, "above 0 and finite", lambda v: 0 < v < math.inf, "effect")
        yield from require(self, "from 0.5 to 0.9999", lambda v: 0.5 <= v <= 0.9999, "level")


def arguments(argv: Sequence[str]) -> tuple[list[str], list[str], CompareArgs, bool]:
    """(runs before --against, runs after it, keys, whether --json) of a command line. Raises
    UserError."""
    words = [word for word in argv if word != "--json"]
    at = words.index("--against") if "--against" in words else len(words)
    before, keys = split_folders(words[:at])
    after, more = split_folders(words[at + 1 :])
    args, _ = load(CompareArgs, [*keys, *more], program_doc=__doc__)
    if not before or (at < len(words) and not after):
        raise UserError(USAGE)
    return before, after, args, len(words) < len(argv)


def main(argv: Sequence[str]) -> None:
    if argv and argv[0] == "plan":
        from lingua.tools.runs.compare.pilot import main as plan

        return plan(argv[1:])
    before, after, args, as_numbers = arguments(argv)
    # Imported here, since --help needs no numpy.
    from lingua.tools.runs.compare.arms import check_text, choose_arms, measure_runs, open_all
    from lingua.tools.runs.compare.axis import measure_by
    from lingua.tools.runs.compare.comparison import compare_all
    from lingua.tools.runs.compare.text import UNITS, as_json, heading, lines, plain, rule, wrapped

    runs, against = open_all(before), open_all(after) if after else []
    arms, base, problems = choose_arms(runs, against, args.code == "compare")
    everything = [run for arm in [*arms, base] for run in arm.runs]
    if args.by == "step":
        measured = measure_runs(everything, args.measure, args.step)
    else:
        measured = measure_by(everything, args.measure, args.by)
    if args.text == "compare":
        check_text(everything, measured)
    rules = args.level, args.anytime, args.variance
    comparisons = compare_all(arms, base, measured, *rules, [*runs, *against])
    unit, brief = UNITS[args.measure], len(comparisons) > 1
    shown: list[Any] = [  # before the problems, since more files are read for it
        as_json(c, unit, args.effect) if as_numbers else [*lines(c, unit, args.effect, brief)]
        for c in comparisons
    ]
    problems += dict.fromkeys(text for run in everything for text in run.problems)
    if as_numbers:
        content = {
            "measure": args.measure,
            args.by: measured.steps[-1],
            "left_out": measured.left_out,
            "problems": problems,
            "comparisons": shown,
        }
        print(json.dumps(plain(content), indent=1))
        return
    for line in heading(measured, unit, args.level, len(arms), problems):
        print(printable(line))
    for text in shown:
        print()
        for line in text:
            print(printable(line))
    if brief:
        print()
        for text in filter(None, dict.fromkeys(map(rule, comparisons))):
            print(*map(printable, wrapped(text)), sep="\n")
        print("Name one arm to see its differences along training, and where its runs first differ")
