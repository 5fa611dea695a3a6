"""Which runs are compared: arms of runs whose configs differ in the seed alone, and their pairs.

arms = find_arms(records)                 # by config
numbers = Measured.of([*arm.runs, ...])   # at the last step that all runs have measured
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lingua.errors import UserError
from lingua.format import counted
from lingua.records import Record, differing, heldout

SEED = "seed"
MOST_LABEL = 60  # characters
MOST_NAMED = 10  # runs, in a message


@dataclass
class Arm:
    """Runs of one config, but for the seed."""

    runs: list[Record]
    values: dict[str, Any]  # of the config keys in which arms differ


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
    return text if len(text) <= MOST_LABEL else f"{text[: MOST_LABEL - 3]}..."


def choose_base(arms: Sequence[Arm]) -> Arm:
    """The arm that the others are compared with where none is given: that of the most runs; of
    those the one in whose config the fewest keys differ from the others'."""

    def distance(arm: Arm) -> int:
        return sum(arm.values[k] != other.values[k] for other in arms for k in arm.values)

    return min(arms, key=lambda arm: (-len(arm.runs), distance(arm)))


@dataclass
class Measured:
    """Held-out losses of runs at the steps that they have in common."""

    steps: list[int]  # increasing
    losses: dict[int, np.ndarray]  # by id of a Record: float64 [steps]; not finite: diverged
    left_out: list[str]  # which runs have no number, and why
    shortest: list[Record]  # the runs that have nothing after the last of `steps`, where others do


def measure_runs(records: Sequence[Record], name: str, step: int | None) -> Measured:
    """The losses called `name`, up to the last step that all runs have, or to `step`. Runs without
    any are left out, as are those that have none at `step`. Raises UserError where no step is left.
    """
    found: dict[int, dict[int, float]] = {}
    for record in records:
        at, values = heldout(record, name)
        found[id(record)] = dict(zip(at.tolist(), values.tolist(), strict=True))
    left_out, used = [], []
    for record in records:
        known = found[id(record)]
        if not known:
            left_out.append(f"{record.name} has no held-out loss in {name} yet")
        elif step is not None and step not in known:
            has = f"{counted(len(known), 'measurement')}, the last at step {max(known):,}"
            left_out.append(f"{record.name} has no held-out loss at step {step:,} ({has})")
        else:
            used.append(record)
    common = set.intersection(*(set(found[id(r)]) for r in used)) if used else set()
    steps = sorted(s for s in common if step is None or s <= step)
    if not steps:
        raise UserError(_no_step(records, found, name))
    last = steps[-1]
    longer = [r for r in used if max(found[id(r)]) > last]
    shortest = [r for r in used if max(found[id(r)]) == last] if longer and step is None else []
    losses = {id(r): np.array([found[id(r)][s] for s in steps], np.float64) for r in used}
    return Measured(steps, losses, left_out, shortest)


def _no_step(records: Sequence[Record], found: dict[int, dict[int, float]], name: str) -> str:
    """Why there is nothing to compare."""
    rows = [f"no step at which all runs have a held-out loss in {name}; give step=N, or fewer runs"]
    for record in records[:MOST_NAMED]:
        steps = sorted(found[id(record)])
        which = ", ".join(f"{s:,}" for s in steps[-3:]) or "none"
        rows.append(f"{record.name}: {counted(len(steps), 'step')}, the last of them {which}")
    return "\n  ".join(rows)
