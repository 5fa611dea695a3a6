"""What a run had spent at a step, and held-out losses by it: after as many tokens, FLOPs or seconds
of training."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lingua.base.errors import UserError
from lingua.run.records import Columns, Record
from lingua.tools.runs.compare.arms import By, HeldOutLosses, find_arms
from lingua.tools.runs.compare.differences import MACHINE
from lingua.tools.runs.held_out import SAME, heldout, interpolate

SPREAD = 0.05  # by which the speeds of runs of one arm may differ without a note


@dataclass(frozen=True)
class Axes:
    """The steps at which a run wrote metrics, with the tokens and the seconds of training then."""

    step: np.ndarray
    tokens: np.ndarray
    time: np.ndarray

    @staticmethod
    def of(metrics: Columns) -> "Axes":
        """Both are 0 at step 0, and NaN in a run that has not written them."""
        step = metrics.step.astype(np.float64)
        tokens, seconds = metrics.numbers("tokens"), metrics.numbers("step_time_s")
        time = np.cumsum(np.nan_to_num(seconds) * np.diff(step, prepend=0.0))
        time = np.round(time, 3) if np.isfinite(seconds).any() else np.full(len(step), np.nan)
        return Axes(np.append(0.0, step), np.append(0.0, tokens), np.append(0.0, time))

    def at(self, step: np.ndarray) -> list[np.ndarray]:
        """Steps, tokens and seconds; between two lines and after the last, in proportion."""
        axes = [step.astype(np.float64)]
        for values in (self.tokens, self.time):
            inside = np.interp(step, self.step, values)
            rate = values[-1] / self.step[-1] if self.step[-1] else np.nan
            axes.append(np.where(step > self.step[-1], values[-1] + rate * (step - self.step[-1]),
                                  inside))  # fmt: skip
        return axes


def spent(record: Record, by: By, steps: np.ndarray) -> np.ndarray:
    """What a run had spent at `steps`: float64 [steps] of steps, tokens, FLOPs or seconds. Raises
    UserError where that is not recorded."""
    step, tokens, time = Axes.of(record.metrics).at(steps)
    values = {"step": step, "tokens": tokens, "time": time}.get(by, tokens)
    if by == "flops":
        starts = [event for event in record.events if event["event"] == "start"]
        per_token = starts[0].get("flops_per_token") if starts else None
        values = values * (per_token if isinstance(per_token, int | float) else np.nan)
    if np.isnan(values).any():
        raise UserError(f"by={by}: {record.name} has not recorded it; compare by=step")
    return values


def measure_by(records: Sequence[Record], name: str, by: By) -> HeldOutLosses:
    """The losses called `name` at the amounts of `by` at which the run that ends first was
    measured, of those that did not fail; of the others interpolated. Other runs without any loss
    are left out. Raises UserError where no amount is common."""
    curves = {}
    for record in records:
        steps, values = heldout(record, name)
        x, at = np.unique(spent(record, by, steps), return_index=True)
        if (x > 0).any():
            curves[id(record)] = x[x > 0], values[at[x > 0]]
    failed = [record for record in records if record.state == "failed"]
    used = [record for record in records if id(record) in curves and record not in failed]
    amounts = [curves[id(record)][0] for record in used]
    points = min(amounts, key=lambda x: x[-1], default=np.zeros(0))
    points = points[points >= max((x[0] for x in amounts), default=0.0)]
    if not len(points):
        none = f"by={by}: no amount at which all runs have a held-out loss in {name}"
        raise UserError(f"{none}; compare by=step, or run with a smaller validation.every")
    end = points[-1] * (1 + SAME)
    shortest = [record for record, x in zip(used, amounts, strict=True) if x[-1] <= end]
    missing = [record for record in records if record not in used and record not in failed]
    notes = [f"{record.name} has no held-out loss in {name} yet" for record in missing]
    losses = {id(record): np.full(len(points), np.nan) for record in failed}
    errors = {}
    for run, (x, values) in curves.items():
        losses[run], errors[run] = interpolate(points, x, values)
    return HeldOutLosses(
        points.tolist(),
        losses,
        notes + (_machines(used) if by == "time" else []),
        shortest if len(shortest) < len(used) else [],
        by,
        measure=name,
        errors=errors,
    )


def _machines(records: Sequence[Record]) -> list[str]:
    """A note where seconds depend on more than the configs."""
    starts = [event for run in records for event in run.events if event["event"] == "start"]
    why = [k for k in (*MACHINE, "hosts") if len({str(start.get(k)) for start in starts}) > 1]
    arms = [[Axes.of(run.metrics) for run in arm.runs] for arm in find_arms(records)]
    speeds = [[axes.step[-1] / axes.time[-1] for axes in arm] for arm in arms]
    if (spread := max(max(speed) / min(speed) for speed in speeds) - 1) > SPREAD:
        why.append(f"speed within an arm (by {100 * spread:.0f} %)")
    text = "seconds of training depend on the machine and its load, and these differ"
    return [f"{text}: {', '.join(why)}; tokens and FLOPs do not depend on them"] if why else []
