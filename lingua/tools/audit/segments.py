"""Which steps of a run are computed again: from one saved step to the next."""

import random
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from lingua.base.dump_dir import CONFIG, VALIDATION
from lingua.base.errors import UserError
from lingua.tools.audit.due import may_measure
from lingua.tools.audit.files import Config, RunFiles, config_of, read_text


@dataclass(frozen=True)
class Part:
    """Steps of a segment that one start of the run has made, and that one start computes again."""

    last: int
    config: str  # text of its config.yaml
    topology: list[int]
    measured: bool = False  # whether the held-out loss was measured for the save of `last`

    @cached_property
    def settings(self) -> Config:
        """The config, flat. Raises UserError."""
        return config_of(self.config.encode(), CONFIG)


@dataclass(frozen=True)
class Segment:
    """Steps that follow each other."""

    start: Path | None  # checkpoint before the first step; None: what the run started from
    first: int
    last: int
    end: Path | None  # checkpoint of the last step, where it was saved
    parts: list[Part] = field(default_factory=list)  # of a segment that is to be computed

    def __str__(self) -> str:
        return f"steps {self.first} to {self.last}"

    def to_json(self) -> dict[str, Any]:
        return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        paths = {k: values[k] and Path(values[k]) for k in ("start", "end")}
        return cls(**values | paths | {"parts": [Part(**part) for part in values["parts"]]})


def segments_of(record: RunFiles) -> list[Segment]:
    """All steps of a run that are recorded, divided at its checkpoints. Raises UserError."""
    starts, checkpoints = record.starts, record.checkpoints
    begin = starts[0]["step"] if starts else 0  # a run that branches from another begins there
    made = max([record.summary[1], *(c.step for c in checkpoints)])
    by_step = {c.step: c.path for c in checkpoints if c.step > begin}
    ends = sorted({*by_step, *([made] if made > begin else [])})
    if not ends:
        raise UserError(f"{record.folder}: has no step to compare with: none is recorded or saved")
    segments = []
    for before, last in zip([begin, *ends], ends, strict=False):
        segments.append(Segment(by_step.get(before), before + 1, last, by_step.get(last)))
    return segments


def starts_of(record: RunFiles, first: int, last: int) -> list[dict[str, Any]]:
    """The events of the starts that made these steps: the last one before them, those inside."""
    starts = [e for e in record.starts if e["step"] < last]
    before = [e for e in starts if e["step"] < first]
    return before[-1:] + starts[len(before) :]


def parts_of(record: RunFiles, segment: Segment, last: int) -> Iterator[Part]:
    """The parts of a segment up to its step `last`: they end where a start with another config or
    mesh follows, and at saves for which the held-out loss was measured outside of its period. Where
    a start's config is not recorded, by an earlier version, there is one part, with the config of
    the end."""
    first, starts = segment.first, starts_of(record, segment.first, last)
    meshes = [start.get("topology") or [1, 1, 1] for start in starts] or [[1, 1, 1]]
    if not starts or any(start.get("config") is None for start in starts):
        config = read_text((segment.end or record.folder) / CONFIG).decode()
        yield Part(last, config, meshes[0])
        return
    held_out = {line["step"] for line in record.lines(VALIDATION)}
    alike = [(start["config"], mesh) for start, mesh in zip(starts, meshes, strict=True)]
    ends = [*(start["step"] for start in starts[1:]), last]
    for i, (start, mesh, end) in enumerate(zip(starts, meshes, ends, strict=True)):
        part, begin = Part(end, start["config"], mesh), max(start["step"], first - 1)
        measured: set[int] = set()
        if part.settings.get("checkpoint.keep_best"):
            periods = {**part.settings, "checkpoint.keep_best": False}
            outside = (step for step in held_out if not may_measure(periods, step))
            measured = {step for step in outside if begin < step <= end}
        goes_on = alike[i : i + 1] == alike[i + 1 : i + 2] or end == begin
        for step in sorted(measured | (set() if goes_on else {end})):
            yield replace(part, last=step, measured=step in measured)


def choose(record: RunFiles, steps: str | None, sample: int, seed: int | str) -> list[Segment]:
    """The segments to compute: those with the `steps` "A..B", the last one up to B; else a `sample`
    drawn by the seed. The first one, from the run's start, is drawn only where it is no longer than
    others that end with a checkpoint. Raises UserError."""
    segments = segments_of(record)
    if steps is not None:
        match = re.fullmatch(r"(\d{1,10})(?:\.\.(\d{1,10}))?", steps)
        low, high = segments[0].first, segments[-1].last
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not low <= first <= last <= high:
            need = f"must be A..B with {low} <= A <= B <= {high}, the steps that are recorded"
            raise UserError(f"steps = {steps}: {need}")
        chosen = [s for s in segments if s.last >= first and s.first <= last]
        return [_with_parts(record, s, min(s.last, last)) for s in chosen]
    whole = [s for s in segments if s.end is not None] or segments
    longest = max((s.last - s.first for s in whole[1:]), default=whole[0].last)
    drawn = [s for s in segments if s.start is not None or s.last - s.first <= longest]
    chosen = random.Random(f"{seed}").sample(drawn, min(sample, len(drawn)))
    return [_with_parts(record, s, s.last) for s in sorted(chosen, key=lambda s: s.first)]


def _with_parts(record: RunFiles, s: Segment, last: int) -> Segment:
    end = s.end if last == s.last else None
    return replace(s, last=last, end=end, parts=list(parts_of(record, s, last)))
