"""Which runs are compared: arms of runs whose configs differ in the seed alone, and their pairs.

arms = find_arms(records)  # by config
losses = measure_runs(records, "nats_per_byte", None)  # up to the last step that all have
"""

import glob
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lingua.base.errors import UserError
from lingua.base.format import counted
from lingua.tools.runs.records import Record, differing, heldout, open_runs

SEED = "seed"
MAX_LABEL = 60  # characters of an arm's label
MAX_NAMED = 10  # runs, in a message
MAX_ARMS = 100


@dataclass
class Arm:
    """Runs of one config, but for the seed."""

    runs: list[Record]
    values: dict[str, Any]  # the config keys in which arms differ


def open_all(words: Sequence[str]) -> list[Record]:
    """The runs at or below the paths that the words name or match. Raises UserError."""
    paths: list[str] = []
    for word in words:
        if Path(word).exists() or not glob.has_magic(word):
            paths.append(word)
            continue
        matches = [path for path in glob.glob(word, recursive=True) if Path(path).is_dir()]
        if not matches:
            raise UserError(f"{word}: matches no folder")
        paths += matches
    return open_runs(paths)


def find_arms(records: Sequence[Record]) -> list[Arm]:
    """Runs grouped by their configs, in the order of the runs."""
    keys = [key for key in differing(records) if key != SEED]
    groups: dict[str, Arm] = {}
    for record in records:
        values = {key: record.config.get(key) for key in keys}
        group = json.dumps(values, sort_keys=True, default=str)
        groups.setdefault(group, Arm([], values)).runs.append(record)
    return list(groups.values())


def label(arm: Arm, other: Arm) -> str:
    """What to call an arm beside another: by the keys in which they differ, `optim.lr=0.004`, or by
    its runs where the configs are equal."""
    keys = [key for key in arm.values if arm.values[key] != other.values[key]]
    if not keys:
        first, last = arm.runs[0].name, arm.runs[-1].name
        return first if len(arm.runs) == 1 else f"{first} ... {last}"
    values = (json.dumps(arm.values[key], default=str).replace('"', "") for key in keys)
    text = " ".join(f"{key}={value}" for key, value in zip(keys, values, strict=True))
    return text if len(text) <= MAX_LABEL else f"{text[: MAX_LABEL - 3]}..."


def choose_base(arms: Sequence[Arm]) -> Arm:
    """The arm that the others are compared with where none is given: that of the most runs; of
    those the one in whose config the fewest keys differ from the others'."""

    def distance(arm: Arm) -> int:
        return sum(arm.values[k] != other.values[k] for other in arms for k in arm.values)

    return min(arms, key=lambda arm: (-len(arm.runs), distance(arm)))


@dataclass
class HeldOutLosses:
    """Held-out losses of runs at the steps that they have in common."""

    steps: list[int]  # increasing
    losses: dict[int, np.ndarray]  # {id(record): float64 [steps]}; not finite: diverged
    left_out: list[str]  # messages about runs without a loss
    shortest: list[Record]  # the runs that have nothing after the last of `steps`, where others do


def measure_runs(records: Sequence[Record], name: str, step: int | None) -> HeldOutLosses:
    """The losses called `name`, up to the last step that all runs have, or to `step`. Runs without
    any are left out, as are those that have none at `step`. Raises UserError where no step is left.
    """
    measured: dict[int, dict[int, float]] = {}
    for record in records:
        at, values = heldout(record, name)
        measured[id(record)] = dict(zip(at.tolist(), values.tolist(), strict=True))
    left_out, used = [], []
    for record in records:
        known = measured[id(record)]
        if not known:
            left_out.append(f"{record.name} has no held-out loss in {name} yet")
        elif step is not None and step not in known:
            has = f"{counted(len(known), 'measurement')}, the last at step {max(known):,}"
            left_out.append(f"{record.name} has no held-out loss at step {step:,} ({has})")
        else:
            used.append(record)
    common = set.intersection(*(set(measured[id(r)]) for r in used)) if used else set()
    steps = sorted(s for s in common if step is None or s <= step)
    if not steps:
        raise UserError(_no_step(records, measured, name))
    last = steps[-1]
    longer = [r for r in used if max(measured[id(r)]) > last]
    shortest = [r for r in used if max(measured[id(r)]) == last] if longer and step is None else []
    losses = {id(r): np.array([measured[id(r)][s] for s in steps], np.float64) for r in used}
    return HeldOutLosses(steps, losses, left_out, shortest)


def _no_step(records: Sequence[Record], measured: dict[int, dict[int, float]], name: str) -> str:
    """Why there is nothing to compare."""
    rows = [f"no step at which all runs have a held-out loss in {name}; give step=N, or fewer runs"]
    for record in records[:MAX_NAMED]:
        steps = sorted(measured[id(record)])
        which = ", ".join(f"{s:,}" for s in steps[-3:]) or "none"
        rows.append(f"{record.name}: {counted(len(steps), 'step')}, the last of them {which}")
    return "\n  ".join(rows)


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
            what = same if len(runs) > 1 else f"{runs[0].name} is the only run"
            raise UserError(f"{what}; name other runs after --against")
        base = choose_base(arms)
        arms = [arm for arm in arms if arm is not base]
    if len(arms) > MAX_ARMS:
        raise UserError(f"{len(arms)} arms are given; must be at most {MAX_ARMS}")
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
    same = [run for run in one.runs if run not in against]  # their code or data differ
    if same:
        arms.insert(0, Arm(same, one.values))
        one = Arm(against, one.values)
    return arms, one
