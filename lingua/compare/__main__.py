"""Whether runs differ by more than chance:

    python -m lingua.compare A... --against B...
    python -m lingua.compare runs/lr-* --against runs/base-*
    python -m lingua.compare runs/sweep effect=0.005 --json

A and B are dump dirs, folders of them, or patterns. Runs whose configs differ only in the seed are
one arm; runs of two arms with one seed are a pair. Without --against, the arm with the most runs is
what the others are compared with. --json prints all of it for programs.
"""

import glob
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lingua.command import run_command, split_folders
from lingua.compare.arms import Arm, Measured, choose_base, find_arms, label, measure_runs
from lingua.compare.comparison import compare
from lingua.compare.text import UNITS, as_json, lines, wrapped
from lingua.config.load import load
from lingua.config.schema import MOST_STEPS, Free, bounds, require
from lingua.errors import UserError
from lingua.format import printable
from lingua.records import Record, open_runs

USAGE = "usage: python -m lingua.compare A... [--against B...] [key=value ...] [--json]"
MOST_ARMS = 100
MOST_NAMED = 5  # runs, in one line


@dataclass
class CompareArgs:
    # compare after this step, without the runs that were not measured there; null: the last step
    # at which all runs were
    step: Free[int | None] = None
    # the difference for which the number of pairs is computed; null: the measured one
    effect: Free[float | None] = None
    # probability that the true differences are in their intervals: in all of them together where
    # several arms are compared
    level: Free[float] = 0.95
    measure: Free[Literal["nats_per_byte", "nats_per_token", "bits_per_byte"]] = "nats_per_byte"

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 0, "step", most=MOST_STEPS)
        yield from require(self, "above 0 and finite", lambda v: 0 < v < math.inf, "effect")
        yield from require(self, "from 0.5 to 0.9999", lambda v: 0.5 <= v <= 0.9999, "level")


def arguments(argv: Sequence[str]) -> tuple[list[str], list[str], CompareArgs, bool]:
    """(runs before --against, runs after it, keys, whether --json) of a command line. Raises
    UserError."""
    words = [word for word in argv if word != "--json"]
    at = words.index("--against") if "--against" in words else len(words)
    before, keys = split_folders(words[:at])
    after, more = split_folders(words[at + 1 :])
    args, _ = load(CompareArgs, [*keys, *more])
    if not before or (at < len(words) and not after):
        raise UserError(USAGE)
    return before, after, args, len(words) < len(argv)


def main(argv: Sequence[str] | None = None) -> None:
    before, after, args, as_numbers = arguments(sys.argv[1:] if argv is None else argv)
    arms, base, problems = choose_arms(open_all(before), open_all(after) if after else [])
    everything = [run for arm in [*arms, base] for run in arm.runs]
    measured = measure_runs(everything, args.measure, args.step)
    # Bonferroni's correction: the intervals hold all together with at least the level asked for.
    level = 1 - (1 - args.level) / len(arms)
    found = [compare(arm, base, measured, level) for arm in arms]
    problems += [text for run in everything for text in run.problems]
    unit = UNITS[args.measure]
    if as_numbers:
        content = {
            "measure": args.measure,
            "step": measured.steps[-1],
            "left_out": measured.left_out,
            "problems": problems,
            "comparisons": [as_json(c, unit, args.effect) for c in found],
        }
        print(json.dumps(_plain(content), indent=1))
        return
    for line in heading(args, measured, len(arms), problems):
        print(printable(line))
    for c in found:
        print()
        for line in lines(c, unit, args.effect, brief=len(found) > 1):
            print(printable(line))
    if len(found) > 1:
        print("\nOne arm alone: its differences along training, and where its runs first differ")


def choose_arms(runs: list[Record], against: list[Record]) -> tuple[list[Arm], Arm, list[str]]:
    """(arms, the one that they are compared with, which runs are in none). Raises UserError."""
    others = {run.folder.resolve() for run in against}
    runs = [run for run in runs if run.folder.resolve() not in others]
    if not runs:
        raise UserError("the runs before and after --against are the same ones")
    unknown = [run.name for run in (*runs, *against) if not run.config]
    problems = [f"{name} is left out: its config cannot be read" for name in unknown]
    runs, against = ([run for run in some if run.config] for some in (runs, against))
    if not runs or (others and not against):
        raise UserError("; ".join(problems))
    if against:
        arms, base = _against(runs, against)
    else:
        arms = find_arms(runs)
        if len(arms) == 1:
            same = f"all {len(runs)} runs have one config, but for the seed: nothing to compare"
            found = same if len(runs) > 1 else f"{runs[0].name} is the only run"
            raise UserError(f"{found}; name other runs after --against")
        base = choose_base(arms)
        arms = [arm for arm in arms if arm is not base]
    if len(arms) > MOST_ARMS:
        raise UserError(f"{len(arms)} arms are given; must be at most {MOST_ARMS}")
    return arms, base, problems


def _against(runs: list[Record], against: list[Record]) -> tuple[list[Arm], Arm]:
    """The arms of `runs`, and that of `against`, by what they differ in."""
    together = find_arms([*runs, *against])
    base = [arm for arm in together if any(run in arm.runs for run in against)]
    if len(base) > 1:
        names = "; ".join(label(arm, base[i == 0]) for i, arm in enumerate(base))
        raise UserError(f"--against: must be one arm, and is {len(base)}: {names}")
    [one] = base
    arms = [arm for arm in together if arm is not one]
    same = [run for run in one.runs if run not in against]  # of one config: code or data differ
    if same:
        arms.insert(0, Arm(same, one.values))
        one = Arm(against, one.values)
    return arms, one


def open_all(words: Sequence[str]) -> list[Record]:
    """The runs at or below the paths that the words name or match. Raises UserError."""
    paths: list[str] = []
    for word in words:
        if Path(word).exists() or not glob.has_magic(word):
            paths.append(word)
            continue
        found = [path for path in glob.glob(word, recursive=True) if Path(path).is_dir()]
        if not found:
            raise UserError(f"{word}: matches no folder")
        paths += found
    return open_runs(paths)


def heading(args: CompareArgs, measured: Measured, arms: int, problems: list[str]) -> Iterator[str]:
    step = measured.steps[-1]
    yield f"held-out loss after step {step:,} in {UNITS[args.measure]}; lower is better"
    if arms > 1:
        yield from wrapped(
            f"{arms} arms are compared with one: their intervals hold all together with "
            f"{100 * args.level:.4g} % (Bonferroni), so each is wider"
        )
    if measured.shortest:
        names = ", ".join(run.name for run in measured.shortest[:MOST_NAMED])
        more = ", ..." if len(measured.shortest) > MOST_NAMED else ""
        yield from wrapped(
            f"note: this is the last step that all runs have; {names}{more} "
            f"{'have' if len(measured.shortest) > 1 else 'has'} no later one, others have; step=N "
            "chooses another"
        )
    for text in (*measured.left_out, *problems):
        yield from wrapped(f"note: {text}")


def _plain(value: Any) -> Any:
    """Without numbers that JSON lacks."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    run_command(main)
