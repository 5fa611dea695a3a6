"""Comparing what a run recorded with what computing its steps again gives."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from lingua.base.dump_dir import METRICS, STATE, VALIDATION
from lingua.base.errors import UserError
from lingua.config.values import shorten
from lingua.monitor.metrics import NOT_CHAINED
from lingua.run.args import kind_of
from lingua.run.receipt import saved_state
from lingua.tools.audit.again import Computed, Task, open_saved, recorded_lines
from lingua.tools.audit.records import digest_of_files
from lingua.tools.audit.segments import Segment, starts_of

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
MAX_APART = 0.5  # of anything: a tensor of zeros is 1 apart
OTHERS = "weights"  # numbers of an app: as weights, those below 1 absolutely
MEASURES = ("nats_per_token", "nats_per_byte", "bits_per_byte")  # of held-out text, as losses
NAMES = {
    "batch_hash": "rows",
    "skipped_steps": "skipped steps",
    "lr": "learning rate",
    "tokens": "tokens",
    "loss": "loss",
    "grad_norm": "gradient norm",
}
STATE_KEYS = ("progress", "schedule", "tokens")  # of train_state.json
EXACT = ("batch_hash", "skipped_steps", "lr", "tokens")
# Of a start event; bits depend on it.
START = ("lingua", "torch", "python", "device", "cpu_capability")
INEXACT = "bits not promised, compared to rounding"
MESH = re.compile(
    r"app|distributed\.(dp_replicate|dp_shard|[tc]p_size)"
)  # may be given to an audit


@dataclass
class Verdict:
    """What the comparison of one segment, or of a whole audit, shows."""

    kind: str
    detail: str = ""
    notes: list[str] = field(default_factory=list)  # what else differs, and what is not compared
    conditions: list[str] = field(default_factory=list)  # what the verdict rests on

    @property
    def text(self) -> str:
        separator = " " if self.kind == DIFFERS else ": "
        return "; ".join([separator.join(filter(None, (self.kind, self.detail))), *self.conditions])

    def with_causes(self, prefix: str) -> Self:
        """The verdict, whose detail begins with `prefix` where nothing was compared, and ends with
        what is known to differ besides the numbers where they do."""
        causes = "; ".join(note for note in self.notes if " recorded, " in note)
        known = f"; known to differ: {causes}" if self.kind == DIFFERS and causes else ""
        prefix = prefix if self.kind == NOT_COMPARED else ""
        return replace(self, detail=f"{prefix}{self.detail}{known}")


@dataclass
class Apart:
    """The largest difference by rounding so far, of all that was compared."""

    largest: float = 0.0  # relative
    place: str = ""

    def add(self, apart: float, place: str) -> None:
        if apart > self.largest:
            self.largest, self.place = apart, place


def compare(task: Task, computed: Computed) -> Verdict:
    """The verdict on a segment that was computed again."""
    segment = task.segment
    if task.by is not None and (why := next(missing_values(task, computed), None)) is not None:
        return Verdict(NOT_COMPARED, f"{task.by.file}: {why}")
    decisive, causes = differences(task, computed)
    notes = [*decisive, *causes]
    promises = {part.settings.get("deterministic") for part in segment.parts}
    harmless = ("topology",) if promises == {"mesh"} else ()
    exact = all(promises) and all(note.startswith(harmless) for note in notes)
    apart, recorded = Apart(), recorded_lines(task)
    wrong = compare_lines(segment, recorded, computed, exact, apart)
    if task.heldout and wrong is None:
        wrong = compare_held_out(task, computed, exact, apart)
    if wrong is not None:
        return Verdict(DIFFERS, wrong, notes)
    if segment.end is not None:
        place, by = compare_tensors(segment.end, computed)
        if by > (0 if exact else limit_of("weights", segment, segment.last)):
            after = "; the losses before it fit: it is damaged, or that of another run"
            hint = after if recorded and by > 0.1 else ""
            what = f"weights first: {place} is {by:.1e} apart in the checkpoint{hint}"
            return Verdict(DIFFERS, f"from step {segment.last} on, {what}", notes)
        apart.add(by, f"{place} of step {segment.last}")
        if (wrong := compare_state(segment, computed, exact)) is not None:
            return Verdict(DIFFERS, wrong, notes)
    elif not recorded:
        why = f"nothing is recorded of {segment}: no line of metrics.jsonl, and no checkpoint"
        return Verdict(NOT_COMPARED, why, notes)
    else:
        notes.append(f"no checkpoint of step {segment.last}: weights are not compared")
    limit = f"losses may be {tolerance(segment, segment.last):.0e} apart"
    how = f"at most {apart.largest:.1e} apart, {apart.place} ({limit})"
    if decisive:
        numbers = f"{ROUNDING}, {how}" if apart.largest else EQUAL
        why = f"{'; '.join(decisive)}; the numbers computed here are {numbers}"
        return Verdict(NOT_COMPARED, why, notes[len(decisive) :])
    if not apart.largest:
        return Verdict(EQUAL, notes=notes)
    if all(promises):
        why = f"bits are promised, and {'; '.join(causes)}; {ROUNDING}, {how}"
        return Verdict(NOT_COMPARED, why, notes[len(causes) :])
    return Verdict(ROUNDING, how, notes, [INEXACT])


def missing_values(task: Task, computed: Computed) -> Iterator[str]:
    """Yields what of a segment is recorded and was not computed, with its file."""
    for step, was in recorded_lines(task).items():
        if (now := computed.lines.get(step)) is None:
            yield f"{METRICS} has no line of step {step}"
        for key in NAMES.keys() & was.keys() - (now or {}).keys():
            yield f"{METRICS}: the line of step {step} has no {key}"
    for key in STATE_KEYS:
        if key not in computed.state:
            yield f"{STATE} of step {task.segment.last} has no {key}"


def compare_lines(
    segment: Segment,
    recorded: dict[int, dict[str, Any]],
    computed: Computed,
    exact: bool,
    apart: Apart,
) -> str | None:
    """What differs first between the lines of a segment and those computed; None: nothing."""
    before = segment.first - 1
    for step in sorted(recorded):
        was, now = recorded[step], computed.lines.get(step, {})
        of_now = now if was.get("chain") else {}  # an earlier version may not have had them all
        for key in dict.fromkeys([*NAMES, *was, *of_now]):
            if key in NOT_CHAINED:
                continue
            a, b, name = was.get(key), now.get(key), NAMES.get(key, key)
            by, limit = distance(key, a, b), 0.0
            if not exact and key not in EXACT:
                limit = limit_of(key, segment, step)
            if by > limit:
                return _differs(step, name, a, b, before)
            apart.add(by, f"{name} of step {step}")
        before = step
    return None


def compare_held_out(task: Task, computed: Computed, exact: bool, apart: Apart) -> str | None:
    """What differs first between held-out losses of a segment and those computed; None: nothing.
    Where they were due is not known of a run of an earlier version that was resumed, nor at the
    last line of a run that goes on."""
    segment, record = task.segment, task.record
    starts = starts_of(record, segment.first, segment.last)
    unknown = len(starts) > 1 and not all("config" in start for start in starts)
    recorded = {
        (line["step"], line["source"]): line
        for line in record.lines(VALIDATION, segment.first, segment.last)
    }
    for step, source in sorted(recorded.keys() | computed.held_out.keys()):
        if not segment.first <= step <= segment.last:
            continue
        was, now = (lines.get((step, source)) for lines in (recorded, computed.held_out))
        if was is None and (unknown or (step == segment.last and segment.end is None)):
            continue
        if was is None or now is None:
            one, other = ("no line" if line is None else "a line" for line in (was, now))
            return _differs(step, f"held-out loss of {source}", one, other)
        of_now = now if was.get("chain") else ()  # earlier versions have recorded less
        for key in dict.fromkeys([*was, *of_now]):
            if key in NOT_CHAINED:
                continue
            a, b, name = was.get(key), now.get(key), f"held-out {key} of {source}"
            by = distance(key, a, b)
            of = "loss" if key in MEASURES else OTHERS
            if by > (0 if exact else limit_of(of, segment, step)):
                return _differs(step, name, a, b)
            apart.add(by, f"{name} of step {step}")
    return None


def compare_state(segment: Segment, computed: Computed, exact: bool) -> str | None:
    """What differs first between the state of the checkpoint at the end and that computed."""
    assert segment.end is not None
    was, now = saved_state(segment.end), computed.state
    for key in STATE_KEYS:
        a, b = was.get(key), now.get(key)
        pairs = {"": (a, b)}
        if isinstance(a, dict) and isinstance(b, dict):
            names = a.keys() | (b if was.get("tensors") else {})  # earlier versions have others
            pairs = {f"{name} of its ": (a.get(name), b.get(name)) for name in sorted(names)}
        for name, (one, other) in pairs.items():
            if one != other and name.partition(" ")[0] != "trained_s":
                return _differs(segment.last, f"{name}{key} in the checkpoint", one, other)
    a, b = was.get("held_out"), now.get("held_out")  # the best checkpoint is kept by it
    limit = 0 if exact else limit_of("loss", segment, segment.last)
    if None not in (a, b) and distance("loss", a, b) > limit:
        return _differs(segment.last, "held-out loss in the checkpoint", a, b)
    return None


def _differs(step: int, name: str, was: Any, now: Any, before: int | None = None) -> str:
    """The number that differs first, of those that are recorded: of the steps after `before`, the
    last one compared, there may be others."""
    since = ""
    if before is not None and before < step - 1:
        since = f"; of steps {before + 1} to {step - 1} no number is recorded"
    a, b = (shorten(str(value)) for value in (was, now))
    return f"from step {step} on, {name} first: {a} recorded, {b} here{since}"


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
        if not math.isfinite(apart):
            return name, math.inf
        farthest = max(farthest, (name, apart), key=lambda pair: pair[1])
    return farthest


def distance(key: str, a: Any, b: Any) -> float:
    """How far two recorded values are apart: losses, norms and measures of held-out text
    relatively, other numbers of an app also to 1. None stands for a number that is not finite."""
    if a == b or (a != a and b != b):
        return 0.0
    if not all(isinstance(v, float) for v in (a, b)) or key in EXACT:
        return math.inf
    least = 1e-30 if key in NAMES or key in MEASURES else 1.0
    apart = abs(a - b) / max(abs(a), least)
    return apart if math.isfinite(apart) else math.inf


def tolerance(segment: Segment, step: int) -> float:
    """How far the losses of a step may be apart by rounding, relative."""
    dtype = segment.parts[-1].settings.get("distributed.model_dtype") or "fp32"
    return min(MAX_TOLERANCE, TOLERANCES.get(dtype, 1e-5) * (1 + (step - segment.first) / 100))


def limit_of(key: str, segment: Segment, step: int) -> float:
    """How far numbers of this name, or "weights", may be apart by rounding, relative."""
    return min(MAX_APART, tolerance(segment, step) * FACTORS.get(key, FACTORS[OTHERS]))


def differences(task: Task, computed: Computed) -> tuple[list[str], list[str]]:
    """What is known to differ between the starts that made a segment and the computation, the
    likely cause where numbers differ: (code and data, which are what is audited; what rounding
    depends on)."""
    segment, decisive, causes = task.segment, list[str](), list[str]()
    starts = starts_of(task.record, segment.first, segment.last)
    linked = all(start.get("chain") for start in starts)  # by this version, which records them all
    on_own_mesh = any(part.settings.get("deterministic") is True for part in segment.parts)
    for key in ("code", *START, "topology", *["hosts"] * on_own_mesh):
        if key == "cpu_capability" and computed.starts[0].get("device") != "cpu":
            continue  # a GPU computes
        if key in ("code", "lingua") and task.by is not None:
            continue  # its code is another, as it should be
        now = dict.fromkeys(str(start.get(key)) for start in computed.starts)
        was = dict.fromkeys(str(s.get(key)) for s in starts if linked or s.get(key) is not None)
        if was and list(was) != list(now):
            a, b = (shorten(" then ".join(values)) for values in (was, now))
            note = f"{key}: {a} recorded, {b} here"
            (decisive if key == "code" else causes).append(note)
    saved = segment.end or segment.start
    data = saved_state(saved).get("data", {}) if saved is not None else {}
    for key, content in data.items():
        if (here := computed.state.get("data", {}).get(key)) != content:
            a, b = (shorten(str(value)) for value in (content, here))
            decisive.append(f"data: {key}: {a} recorded, {b} here")
    for word in task.words:
        key, _, value = word.partition("=")
        if kind_of(key) != "operational" and not MESH.fullmatch(key):
            was_given = [part.settings.get(key) for part in segment.parts]
            if any(str(v).lower() != value.lower() for v in was_given):
                causes.append(f"{key}: {was_given[0]} recorded, {value} here, as given")
    if len(starts) > 1 and not all("config" in start for start in starts):
        steps = ", ".join(str(start["step"]) for start in starts[1:])
        causes.append(
            f"starts after steps {steps} recorded, and the keys of the last one used here"
        )
    return decisive, causes


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on all segments: the worst, and of those the first."""
    try:
        return max(verdicts, key=lambda v: WORST.index(v.kind))
    except ValueError:
        raise UserError("nothing was compared") from None
