"""What a run had spent at a step, and held-out losses by it: after as many tokens, FLOPs or seconds
of training."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lingua.base.errors import UserError
from lingua.run.records import Columns, Record
from lingua.tools.runs.compare.arms import By, HeldOutLosses
from lingua.tools.runs.held_out import heldout

POINTS = 8  # at which runs are compared along training, between the first and the last common one


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
        known = len(self.step) > 1
        axes = [step.astype(np.float64)]
        for values in (self.tokens, self.time):
            inside = np.interp(step, self.step, values)
            rate = values[-1] / self.step[-1] if known and self.step[-1] else np.nan
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
    """The losses called `name` at equal amounts of `by`, the largest of which is the largest that
    all runs have which did not fail; between two measurements of a run on the line between them.
    Other runs without any loss are left out. Raises UserError where no amount is common."""
    curves = {}
    for record in records:
        steps, values = heldout(record, name)
        if len(steps):
            curves[id(record)] = spent(record, by, steps), values
    failed = [record for record in records if record.state == "failed"]
    used = [record for record in records if id(record) in curves and record not in failed]
    ends = [(x[0], x[-1]) for x, _ in (curves[id(record)] for record in used)]
    first, last = max((a for a, _ in ends), default=1.0), min((b for _, b in ends), default=0.0)
    if first > last:
        raise UserError(f"by={by}: no amount at which all runs have a held-out loss in {name}")
    points = np.linspace(first, last, POINTS if first < last else 1)
    shortest = [record for record in used if curves[id(record)][0][-1] == last]
    missing = [record for record in records if record not in used and record not in failed]
    losses = {id(record): np.full(len(points), np.nan) for record in failed}
    for run, (x, values) in curves.items():
        losses[run] = np.interp(points, x, values, left=np.nan, right=np.nan)
    return HeldOutLosses(
        points.tolist(),
        losses,
        [f"{record.name} has no held-out loss in {name} yet" for record in missing],
        shortest if len(shortest) < len(used) else [],
        by,
    )
