"""Which runs are compared: arms of runs that train the same but for the seed, and their pairs.

arms = find_arms(records)  # by config
losses = measure_runs(records, "nats_per_byte", None)  # up to the last step that all have
"""

import glob
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lingua.base.errors import UserError
from lingua.base.format import counted
from lingua.run.args import kind_of
from lingua.run.records import CODE_HASH, Record
from lingua.tools.runs.held_out import THEN, heldout, heldout_texts
from lingua.tools.runs.launches import not_given, was_stopped
from lingua.tools.runs.records import open_runs
from lingua.tools.runs.settings import NOT_GIVEN, differing, settings_of

SEED = "seed"
MAX_LABEL = 60  # characters of an arm's label
MAX_NAMED = 5  # runs, in a message
MAX_ARMS = 100

By = Literal["step", "tokens", "flops", "time"]  # what is equal where runs are compared


@dataclass
class Arm:
    """Runs of one config and one code, but for the seed and operational keys."""

    runs: list[Record]
    values: dict[str, Any]  # the keys in which arms differ, `code` among them


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


def find_arms(records: Sequence[Record], code: bool = True) -> list[Arm]:
    """Runs grouped by what they train, in the order of the runs; without `code` those of different
    code are together."""
    left_out = {SEED} if code else {SEED, CODE_HASH}
    keys = [k for k in differing(records) if k not in left_out and kind_of(k) != "operational"]
    groups: dict[str, Arm] = {}
    for record, values in zip(records, settings_of(records, keys), strict=True):
        group = json.dumps(values, sort_keys=True, default=str)
        groups.setdefault(group, Arm([], values)).runs.append(record)
    return list(groups.values())


def label(arm: Arm, other: Arm) -> str:
    """Returns the name of an arm beside another: by the keys in which they differ,
    `optim.lr=0.004`, or by its runs where the configs are equal."""
    keys = [key for key in arm.values if arm.values[key] != other.values[key]]
    if not keys:
        first, last = arm.runs[0].name, arm.runs[-1].name
        return first if len(arm.runs) == 1 else f"{first} ... {last}"
    values = {key: arm.values[key] for key in keys}
    text = " ".join(
        f"{key} {NOT_GIVEN}" if value == NOT_GIVEN
        else f"{key}={json.dumps(value, default=str)}".replace('"', "")
        for key, value in values.items()
    )  # fmt: skip
    return text if len(text) <= MAX_LABEL else f"{text[: MAX_LABEL - 3]}..."


def choose_base(arms: Sequence[Arm]) -> Arm:
    """The arm that the others are compared with where none is given: that of the most runs; of
    those the one in whose config the fewest keys differ from the others'."""

    def distance(arm: Arm) -> int:
        return sum(arm.values[k] != other.values[k] for other in arms for k in arm.values)

    return min(arms, key=lambda arm: (-len(arm.runs), distance(arm)))


@dataclass
class HeldOutLosses:
    """Held-out losses of runs at the steps that all those have which did not fail, or at equal
    amounts of what `by` names."""

    steps: Sequence[float]  # increasing; whole numbers where they are steps
    # {id(record): float64 [steps]}; NaN: diverged, or a failed run was not measured there
    losses: dict[int, np.ndarray]
    left_out: list[str]  # messages about runs without a loss, and about a step that was chosen
    shortest: list[Record]  # the runs that have nothing after the last of `steps`, where others do
    by: By = "step"
    measure: str = "nats_per_byte"
    # {id(record): float64 [2, steps]} of interpolate; empty where nothing is interpolated
    errors: dict[int, np.ndarray] = field(default_factory=dict)

    def texts(self, records: Sequence[Record]) -> list[str]:
        """The held-out text of each run where it is compared, see heldout_texts: equal for runs
        whose losses compare."""
        if self.by == "step":
            return heldout_texts(records, self.measure, self.steps)
        texts = zip(records, heldout_texts(records, self.measure), strict=True)
        # One that changed did so at a step, which is another amount in another run.
        return [f"{text} in {run.name}" if THEN in text else text for run, text in texts]


def measure_runs(records: Sequence[Record], name: str, step: int | None) -> HeldOutLosses:
    """The losses called `name`, up to the last step that all runs have which did not fail, or to
    `step`, which runs that failed or were stopped before may lack. Other runs without any are left
    out, as are those that have none at `step`. Raises UserError where no step is left."""
    measured: dict[int, dict[int, float]] = {}
    for record in records:
        at, values = heldout(record, name)
        measured[id(record)] = dict(zip(at.tolist(), values.tolist(), strict=True))
    left_out, used, ended = [], [], []  # the last: they may lack a loss, and count
    for record in records:
        known = measured[id(record)]
        last = max(known, default=-1)
        if record.state == "failed":
            ended.append(record)
        elif known and (step is None or step in known):
            used.append(record)
        elif was_stopped(record, step) and last < (step or 0):
            ended.append(record)
        elif not known:
            left_out.append(f"{record.name} has no held-out loss in {name} yet")
        else:
            has = f"{counted(len(known), 'measurement')}, the last at step {last:,}"
            left_out.append(f"{record.name} has no held-out loss at step {step:,} ({has})")
    decisive = used or [r for r in ended if measured[id(r)] and step in (None, *measured[id(r)])]
    common = set.intersection(*(set(measured[id(r)]) for r in decisive)) if decisive else set()
    steps = sorted(s for s in common if step is None or s <= step)
    if not steps:
        raise UserError(_no_step(records, measured, name))
    if step is not None:
        newest = max(map(max, filter(None, measured.values())))
        left_out.append(f"step {step:,} was chosen, of steps up to {newest:,}")
    longer = [r for r in used if max(measured[id(r)]) > steps[-1]]
    shortest = [r for r in used if r not in longer] if longer and step is None else []
    losses = {
        id(r): np.array([measured[id(r)].get(s, np.nan) for s in steps]) for r in (*used, *ended)
    }
    return HeldOutLosses(steps, losses, left_out, shortest, measure=name)


def check_text(records: Sequence[Record], measured: HeldOutLosses) -> None:
    """Raises UserError where the runs that are measured have not the same held-out text at all
    steps that are compared, or a measure per token not the same tokens."""
    used = [record for record in records if id(record) in measured.losses]
    runs_of_text: dict[str, list[str]] = {}
    for record, text in zip(used, measured.texts(used), strict=True):
        if text:
            runs_of_text.setdefault(text, []).append(record.name)
    if len(runs_of_text) > 1:
        rows = ["the runs are measured on different held-out text, so their losses do not compare; "
                "runs of one validation.bytes have the same text under every tokenizer, and "
                "nats_per_byte compares them; text=ignore compares them all the same"]  # fmt: skip
        for text, names in list(runs_of_text.items())[:MAX_NAMED]:
            rows.append(f"{text}: {listed(names)}")
        raise UserError("\n  ".join(rows))


def _no_step(records: Sequence[Record], measured: dict[int, dict[int, float]], name: str) -> str:
    """Why there is nothing to compare."""
    rows = [f"no step at which all runs have a held-out loss in {name}; give step=N, or fewer runs"]
    for record in records[:MAX_NAMED]:
        steps = sorted(measured[id(record)])
        which = ", ".join(f"{s:,}" for s in steps[-3:]) or "none"
        rows.append(f"{record.name}: {counted(len(steps), 'step')}, the last of them {which}")
    return "\n  ".join(rows)


def choose_arms(
    runs: list[Record], against: list[Record], code: bool = True
) -> tuple[list[Arm], Arm, list[str]]:
    """(arms, the one that they are compared with, which runs are in none); `code` as in find_arms.
    Raises UserError."""
    others = {run.folder.resolve() for run in against}
    runs = [run for run in runs if run.folder.resolve() not in others]
    if not runs:
        raise UserError("the runs before and after --against are the same ones")
    given = [*runs, *against]
    problems = [text for run in given if (text := _why_left_out(run))]
    runs, against = ([run for run in some if not _why_left_out(run)] for some in (runs, against))
    if not runs or (others and not against):
        raise UserError("; ".join(problems))
    if against:
        arms, base = _against(runs, against, code)
    else:
        arms = find_arms(runs, code)
        if len(arms) == 1:
            same = f"all {len(runs)} runs have one config, but for the seed: nothing to compare"
            what = same if len(runs) > 1 else f"{runs[0].name} is the only run"
            raise UserError("; ".join([*problems, f"{what}; name other runs after --against"]))
        base = choose_base(arms)
        arms = [arm for arm in arms if arm is not base]
    if len(arms) > MAX_ARMS:
        raise UserError(f"{len(arms)} arms are given; must be at most {MAX_ARMS}")
    for launch, names in not_given(given).items():
        problems.append(
            f"not compared: {counted(len(names), 'other run')} of the launch {launch}, "
            f"{listed(names)}; name the whole folder for intervals that hold for all"
        )
    return arms, base, problems


def _why_left_out(run: Record) -> str:
    """Why a run is in no arm; empty for one that is."""
    if not run.config:
        return f"{run.name} is left out: its config cannot be read"
    return "" if run.has_begun else f"{run.name} is left out: it has not begun"


def _against(runs: list[Record], against: list[Record], code: bool) -> tuple[list[Arm], Arm]:
    """The arms of `runs`, and that of `against`, by what they differ in."""
    together = find_arms([*runs, *against], code)
    base = [arm for arm in together if any(run in arm.runs for run in against)]
    if len(base) > 1:
        names = "; ".join(label(arm, base[i == 0]) for i, arm in enumerate(base))
        hint = "; code=ignore joins runs of different code" if CODE_HASH in base[0].values else ""
        raise UserError(f"--against: must be one arm, and is {len(base)}: {names}{hint}")
    [one] = base
    arms = [arm for arm in together if arm is not one]
    same = [run for run in one.runs if run not in against]  # their operational keys or data differ
    if same:
        arms.insert(0, Arm(same, one.values))
        one = Arm(against, one.values)
    return arms, one


def listed(names: Sequence[str]) -> str:
    """The first names, and dots for more."""
    return ", ".join([*names[:MAX_NAMED], *["..."] * (len(names) > MAX_NAMED)])
