"""Comparing what a run recorded with what computing its steps again gives."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from lingua.base.dump_dir import METRICS
from lingua.base.errors import UserError
from lingua.tools.audit.again import Computed, open_saved, starts_of
from lingua.tools.audit.receipt import digest_of_files, saved_state
from lingua.tools.audit.segments import Segment
from lingua.tools.runs.records import Record

# The kinds, the worst last, and the exit code of each.
FITS, EQUAL, ROUNDING = "the files fit", "equal to the bit", "equal up to rounding"
NOT_COMPARED, DIFFERS = "cannot be compared", "differs"
CODES = {FITS: 0, EQUAL: 0, ROUNDING: 0, NOT_COMPARED: 2, DIFFERS: 1}
WORST = list(CODES)
# How far losses may be from each other by rounding, relative, in the first steps after a
# checkpoint: 25 times what `apps.bench promise` measures over 200 steps in float32
# (docs/measurements.md). As much is added for every 100 steps, since differences are carried on.
TOLERANCES = {"fp32": 1e-5, "bf16": 1e-3}
FACTORS = {"loss": 1, "grad_norm": 10, "weights": 100}  # norms and weights move more than means
MAX_TOLERANCE = 0.01  # of losses, however long the segment is
EXACT = {"batch_hash": "rows", "skipped_steps": "skipped steps", "lr": "learning rate"}
NAMES = {"loss": "loss", "grad_norm": "gradient norm"}
# Of a start event; bits depend on it.
START = ("code", "lingua", "torch", "python", "device", "cpu_capability")


@dataclass
class Verdict:
    """What the comparison of one segment, or of a whole audit, shows."""

    kind: str
    detail: str = ""
    notes: list[str] = field(default_factory=list)  # what else differs, and what is not compared

    @property
    def text(self) -> str:
        separator = " " if self.kind == DIFFERS else ": "
        return f"{self.kind}{separator}{self.detail}" if self.detail else self.kind

    def with_causes(self, prefix: str) -> Self:
        """The verdict, whose detail begins with `prefix` where nothing was compared, and ends with
        what is known to differ besides the numbers where they do."""
        causes = "; ".join(note for note in self.notes if " recorded, " in note)
        known = f"; known to differ: {causes}" if self.kind == DIFFERS and causes else ""
        prefix = prefix if self.kind == NOT_COMPARED else ""
        return replace(self, detail=f"{prefix}{self.detail}{known}")


def compare(segment: Segment, record: Record, computed: Computed) -> Verdict:
    """The verdict on a segment that was computed again."""
    notes = differences(segment, record, computed)
    exact = expects_equal(segment, record, computed, notes)
    recorded = {
        line["step"]: line
        for line in record.lines(METRICS)
        if "event" not in line and segment.first <= line["step"] <= segment.last
    }
    farthest, largest = "", 0.0
    for step in sorted(recorded.keys() & computed.lines.keys()):
        was, now = recorded[step], computed.lines[step]
        for key, name in EXACT.items():
            if was.get(key) != now.get(key):
                return _differs(step, name, was.get(key), now.get(key), notes)
        for key, name in NAMES.items():
            apart = relative(was.get(key), now.get(key))
            if apart > (0 if exact else tolerance(segment, record, step) * FACTORS[key]):
                return _differs(step, name, was.get(key), now.get(key), notes)
            if apart > largest:
                farthest, largest = f"{name} of step {step}", apart
    if segment.end is not None:
        place, apart = compare_tensors(segment.end, computed)
        if apart > (0 if exact else tolerance(segment, record) * FACTORS["weights"]):
            after = "; the losses before it fit: it is damaged, or that of another run"
            hint = after if recorded and apart > 0.1 else ""
            what = f"weights first: {place} is {apart:.1e} apart in the checkpoint{hint}"
            return Verdict(DIFFERS, f"from step {segment.last} on, {what}", notes)
        if apart > largest:
            farthest, largest = f"{place} of step {segment.last}", apart
    elif not recorded:
        why = f"nothing is recorded of {segment}: no line of metrics.jsonl, and no checkpoint"
        return Verdict(NOT_COMPARED, why, notes)
    else:
        notes.append(f"no checkpoint of step {segment.last}: weights are not compared")
    if not largest:
        return Verdict(EQUAL, notes=notes)
    limit = f"losses may be {tolerance(segment, record):.0e} apart"
    return Verdict(ROUNDING, f"at most {largest:.1e} apart, {farthest} ({limit})", notes)


def _differs(step: int, name: str, was: Any, now: Any, notes: list[str]) -> Verdict:
    return Verdict(DIFFERS, f"from step {step} on, {name} first: {was} recorded, {now} here", notes)


def compare_tensors(saved: Path, computed: Computed) -> tuple[str, float]:
    """(the tensor that is farthest from its saved value, how far: the norm of the difference
    relative to its norm); 0 where all bits are equal."""
    source = open_saved(saved)
    if digest_of_files(source) == computed.state["tensors"]:
        return "", 0.0
    other = open_saved(computed.end)
    if source.shapes() != other.shapes():
        return "the set of tensors", math.inf
    farthest = ("one bit", 2.0**-60)  # hashes differ, so something does
    for name in source.tensors:
        [a], [b] = (s.whole([name]).values() for s in (source, other))
        a, b = a.double(), b.double()
        apart = float((a - b).norm() / b.norm().clamp(min=torch.finfo(torch.float32).tiny))
        farthest = max(farthest, (name, apart), key=lambda pair: pair[1])
    return farthest


def relative(a: Any, b: Any) -> float:
    """How far two recorded numbers are apart; None stands for one that is not finite."""
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    return abs(a - b) / max(abs(a), 1e-30)


def tolerance(segment: Segment, record: Record, step: int | None = None) -> float:
    """How far the losses of a step may be apart by rounding, relative."""
    n = (segment.last if step is None else step) - segment.first
    dtype = record.config.get("distributed.model_dtype") or "fp32"
    return min(MAX_TOLERANCE, TOLERANCES[dtype] * (1 + n / 100))


def expects_equal(
    segment: Segment, record: Record, computed: Computed, notes: Sequence[str]
) -> bool:
    """Whether the run promises equal bits here: `deterministic: mesh`, the same code, versions and
    type of device, and no tensor parallelism."""
    promises = record.config.get("deterministic") == "mesh" and computed.topology[2] == 1
    return promises and not any(note.startswith(START) for note in notes)


def differences(segment: Segment, record: Record, computed: Computed) -> list[str]:
    """What is known to differ between the start that made a segment and the computation: the likely
    cause where numbers differ."""
    starts, notes = starts_of(record, segment), []
    for key in (*START, "topology"):
        now = computed.start.get(key)
        if key == "cpu_capability" and computed.start.get("device") != "cpu":
            continue  # a GPU computes
        values = dict.fromkeys(str(start[key]) for start in starts if start.get(key) is not None)
        if values and list(values) != [str(now)]:
            notes.append(f"{key}: {' then '.join(values)} recorded, {now} here")
    saved = segment.end or segment.start
    data = saved_state(saved).get("data", {}) if saved is not None else {}
    for key, was in data.items():
        now = computed.state["data"].get(key)
        if now != was:
            notes.append(f"data: {key}: {was} recorded, {now} here")
    if len(starts) > 1:  # config.yaml is that of the last one
        steps = ", ".join(str(start["step"]) for start in starts[1:])
        notes.append(f"starts after steps {steps} recorded, and the keys of the last one used here")
    return notes


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on all segments: the worst, and of those the first."""
    try:
        return max(verdicts, key=lambda v: WORST.index(v.kind))
    except ValueError:
        raise UserError("nothing was compared") from None
