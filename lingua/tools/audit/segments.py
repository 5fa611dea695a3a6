"""Which steps of a run are computed again: from one saved step to the next."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lingua.base.dump_dir import CONFIG
from lingua.base.errors import UserError
from lingua.checkpoint.folder import Checkpoint
from lingua.tools.audit.receipt import checkpoints_of
from lingua.tools.runs.records import Record


@dataclass(frozen=True)
class Segment:
    """Steps that follow each other."""

    start: Path | None  # checkpoint before the first step; None: what the run started from
    first: int
    last: int
    end: Path | None  # checkpoint of the last step, where it was saved
    config: Path  # config.yaml of the start that made them

    def __str__(self) -> str:
        return f"steps {self.first} to {self.last}"

    def to_json(self) -> dict[str, Any]:
        return {k: str(v) if isinstance(v, Path) else v for k, v in vars(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        paths = {k: v and Path(v) for k, v in values.items() if k not in ("first", "last")}
        return cls(**values | paths)


def segments_of(record: Record, checkpoints: Sequence[Checkpoint]) -> list[Segment]:
    """All steps of a run that are recorded, divided at its checkpoints."""
    starts = [e["step"] for e in record.events if e["event"] == "start"]
    begin = starts[0] if starts else 0  # a run that branches from another begins at its step
    made = max([*record.metrics.step.tolist(), *(c.step for c in checkpoints)], default=0)
    by_step = {c.step: c.path for c in checkpoints if c.step > begin}
    ends = sorted({*by_step, *([made] if made > begin else [])})
    if not ends:
        raise UserError(f"{record.folder}: has no step to compare with: none is recorded or saved")
    segments = []
    for before, last in zip([begin, *ends], ends, strict=False):
        saved = by_step.get(last)
        config = (saved or record.folder) / CONFIG
        segments.append(Segment(by_step.get(before), before + 1, last, saved, config))
    return segments


def choose(record: Record, steps: str | None, sample: int, seed: int | str) -> list[Segment]:
    """The segments to compute: those with the `steps` "A..B", the last one up to B; else a `sample`
    of those that end with a checkpoint, drawn by the seed. The first one, from the run's start, is
    drawn only where it is no longer than others. Raises UserError."""
    segments = segments_of(record, checkpoints_of(record))
    if steps is not None:
        match = re.fullmatch(r"(\d{1,10})(?:\.\.(\d{1,10}))?", steps)
        low, high = segments[0].first, segments[-1].last
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not low <= first <= last <= high:
            need = f"must be A..B with {low} <= A <= B <= {high}, the steps that are recorded"
            raise UserError(f"steps = {steps}: {need}")
        return [_up_to(last, s) for s in segments if s.last >= first and s.first <= last]
    whole = [s for s in segments if s.end is not None] or segments
    longest = max((s.last - s.first for s in whole[1:]), default=whole[0].last)
    drawn = [s for s in whole if s.start is not None or s.last - s.first <= longest]
    chosen = random.Random(f"{seed}").sample(drawn, min(sample, len(drawn)))
    return sorted(chosen, key=lambda s: s.first)


def _up_to(last: int, s: Segment) -> Segment:
    return s if s.last <= last else Segment(s.start, s.first, last, None, s.config)
