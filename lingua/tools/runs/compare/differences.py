"""Where two runs first differ, in rows, rate, weights or loss, and why; what is not the same in all
runs of a comparison."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lingua.base.dump_dir import CHECKPOINTS, MANIFEST, STATE, STEP_FOLDER
from lingua.base.files import load_json
from lingua.base.format import counted
from lingua.run.args import kind_of
from lingua.run.records import CODE_HASH, Columns, Record
from lingua.tools.runs.held_out import heldout
from lingua.tools.runs.report.code import changed_files, code_files, code_place
from lingua.tools.runs.settings import differing, setting

MAX_FILES = 5  # changed files to name
# What a run has recorded at some steps: int64 [n], increasing, and float64 [n] or objects.
Series = tuple[np.ndarray, np.ndarray]
VERSIONS, MACHINE = ("lingua", "torch", "python"), ("device", "cpu_capability", "topology")


@dataclass(frozen=True)
class Aspect:
    """One thing that two runs may differ in, at the steps of which both have a record."""

    name: str
    steps: int  # how many both have
    equal_until: int | None  # the last one before the first difference; None: there is none
    first: int | None  # the first one at which they differ; None: they do not
    values: tuple[Any, Any] | None = None  # values at the first difference
    missing: str = ""  # why there is no step to compare


def first_differences(a: Record, b: Record) -> list[Aspect]:
    """Returns where two runs first differ in rows, rate, gradient norm, loss, weights and held-out
    loss. Numbers are compared exactly."""
    return [
        _rows(a, b),
        _aspect("learning rate", *(_numbers(r.metrics, "lr") for r in (a, b))),
        _aspect("loss", *(_numbers(r.metrics, "loss") for r in (a, b))),
        _aspect("gradient norm", *(_numbers(r.metrics, "grad_norm") for r in (a, b))),
        _weights(a, b),
        _aspect("held-out loss", *(heldout(r) for r in (a, b))),
    ]


def same_run(a: Record, b: Record) -> bool:
    """Whether all that both have recorded of their training is equal, to the last bit, and that
    includes losses."""
    aspects = {aspect.name: aspect for aspect in first_differences(a, b)}
    known = aspects["loss"].steps or aspects["held-out loss"].steps
    return bool(known) and all(aspect.first is None for aspect in aspects.values())


def _aspect(name: str, a: Series, b: Series) -> Aspect:
    if not len(a[0]) or not len(b[0]):
        return Aspect(name, 0, None, None, missing="not recorded")
    steps, i, j = np.intersect1d(a[0], b[0], assume_unique=True, return_indices=True)
    if not len(steps):
        return Aspect(name, 0, None, None, missing="no step of both is recorded")
    x, y = a[1][i], b[1][j]
    unequal = x != y
    if x.dtype == y.dtype == np.float64:
        unequal &= ~(np.isnan(x) & np.isnan(y))  # NaN does not equal itself
    if not unequal.any():
        return Aspect(name, len(steps), int(steps[-1]), None)
    n = int(unequal.argmax())
    first, second = (None if v != v else v for v in (x[[n]].tolist() + y[[n]].tolist()))
    until = int(steps[n - 1]) if n else None
    return Aspect(name, len(steps), until, int(steps[n]), (first, second))


def _rows(a: Record, b: Record) -> Aspect:
    return _aspect("rows", *(_texts(r.metrics, "batch_hash") for r in (a, b)))


def _weights(a: Record, b: Record) -> Aspect:
    """Compares the checksums of checkpoints that were saved by equally many ranks."""
    saved = [_checkpoints(r) for r in (a, b)]
    common = saved[0].keys() & saved[1].keys()
    alike = sorted(step for step in common if saved[0][step].keys() == saved[1][step].keys())
    sums = (np.array([of_run[step] for step in alike], object) for of_run in saved)
    aspect = _aspect("weights", *((np.array(alike, np.int64), values) for values in sums))
    if alike or not (saved[0] and saved[1]):
        return aspect
    return replace(aspect, missing="no checkpoint of one step, saved by as many ranks")


def _numbers(columns: Columns, name: str) -> Series:
    return (columns.step, columns[name]) if name in columns else (columns.step[:0],) * 2


def _texts(columns: Columns, name: str) -> Series:
    texts = np.array(columns.text(name), object)
    known = np.array([text is not None for text in texts], bool)
    return columns.step[known], texts[known]


def _checkpoints(record: Record) -> dict[int, Any]:
    """{step: checksums of the files with parameters and moments} of the run's checkpoints."""
    saved = {}
    for path in _checkpoint_folders(record):
        try:
            files = _load(record, path / MANIFEST)["files"]
            sums = {n: e["xxh3_64"] for n, e in files.items() if n.endswith(".distcp")}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # it is no checkpoint
        if sums:
            saved[int(path.name)] = sums
    return saved


def _checkpoint_folders(record: Record) -> list[Path]:
    named = record.config.get("checkpoint.path")
    root = Path(str(named)) if named else record.resolve(record.folder / CHECKPOINTS)
    try:
        return sorted(p for p in root.iterdir() if STEP_FOLDER.fullmatch(p.name)) if root else []
    except OSError:
        return []


def _load(record: Record, path: Path) -> dict[str, Any]:
    """What a file of a checkpoint has, which must be in the folder of all checkpoints."""
    place = record.resolve(path, path.parents[1])
    return {} if place is None else load_json(place)


# ---- why


@dataclass(frozen=True)
class Cause:
    """A possible cause (config, data, code, versions or machine), and how two runs differ in it."""

    kind: str
    text: str


def causes(a: Record, b: Record) -> list[Cause]:
    """Returns what differs between two runs besides their results, as far as it is recorded."""
    causes = []
    for key in _decisive([a, b]):
        values = [setting(run.settings, key) for run in (a, b)]
        is_data = key.startswith("data.sources") or key == "data.stages"
        kind = "code" if key == CODE_HASH else "data" if is_data else "config"
        causes.append(Cause(kind, f"{key}: {values[0]} and {values[1]}"))
    states = [_state(run) for run in (a, b)]
    starts = [_starts(run, state)[0] for run, state in zip((a, b), states, strict=True)]
    causes += [Cause("data", text) for text in _unlike([state.get("data") for state in states])]
    causes += [Cause("code", text) for text in _unlike(starts, ("commit",))]
    causes += [Cause("code", text) for text in _code(a, b)]
    causes += [Cause("versions", text) for text in _unlike(starts, VERSIONS)]
    causes += [Cause("machine", text) for text in _unlike(starts, MACHINE)]
    return causes


def only_rounding(a: Record, b: Record) -> bool:
    """Whether two runs are the same mathematics in another order of additions, by their configs,
    and used the same rows."""
    keys = _decisive([a, b])
    rows = _rows(a, b)
    starts = [_starts(run, {})[0] for run in (a, b)]
    other = bool(keys) or bool(_unlike(starts, ("topology",)))
    same = rows.steps > 0 and rows.first is None
    return other and same and all(kind_of(key) == "additions" for key in keys)


def _decisive(records: Sequence[Record]) -> list[str]:
    """The keys in which runs differ and that a number of training may depend on."""
    return [key for key in differing(records) if kind_of(key) != "operational"]


def unlike(
    arms: Mapping[str, Sequence[Record]], named: Collection[str], texts: Sequence[str]
) -> list[str]:
    """What differs between runs, of one arm or of two, besides the keys `named` by which arms are
    told apart: code, versions, devices, the content of their text, what is held out. `arms` are the
    runs by the arm's label, `texts` what is held out of each."""
    runs = [run for some in arms.values() for run in some]
    unknown = sum(run.settings[CODE_HASH] is None for run in runs)
    of = f"{unknown} of {counted(len(runs), 'run')}"
    lines = [f"the code of {of} is not recorded"] if unknown else []
    facts = {id(run): _facts(run) for run in runs}
    for run, text in zip(runs, texts, strict=True):
        if text:
            facts[id(run)]["held-out text"] = text
    for name in dict.fromkeys(name for known in facts.values() for name in known):
        values = {
            label: Counter(facts[id(run)][name] for run in some if name in facts[id(run)])
            for label, some in arms.items()
        }
        if name not in named and len(set().union(*values.values())) > 1:
            each = (f"{label}: {_counts(counts)}" for label, counts in values.items() if counts)
            lines.append(f"{name} is not the same ({'; '.join(each)})")
    operational = [key for key in differing(runs) if kind_of(key) == "operational"]
    if operational:
        lines.append(f"these keys differ, which change no number: {', '.join(operational)}")
    return lines


def unlike_rows(pairs: Sequence[tuple[Record, Record]]) -> list[str]:
    """In how many pairs the runs trained on different rows, where they have recorded it."""
    rows = [_rows(*pair) for pair in pairs]
    different = sum(aspect.first is not None for aspect in rows)
    known = sum(aspect.steps > 0 for aspect in rows)
    return [f"the rows differ in {different} of {counted(known, 'pair')}"] if different else []


def _counts(counts: Counter[str]) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{value} in {counted(n, 'run')}" for value, n in counts.items())


def _facts(record: Record) -> dict[str, str]:
    """What the starts of a run and its newest checkpoint have recorded besides its config, by
    name; of a run whose starts differ, all of it."""
    state = _state(record)
    starts = _starts(record, state)
    facts: dict[str, str] = {}
    for key in (CODE_HASH, *VERSIONS, *MACHINE):
        values = dict.fromkeys(str(start[key]) for start in starts if start.get(key) is not None)
        if values:
            facts[key] = " then ".join(values)
    data = state.get("data")
    return facts | {str(k): str(v) for k, v in (data if isinstance(data, dict) else {}).items()}


def _unlike(values: Sequence[Any], keys: Sequence[str] | None = None) -> list[str]:
    """`key: value and value` of the keys (None: all) that both mappings have, where they differ."""
    a, b = values
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return []
    both = [k for k in (a if keys is None else keys) if None not in (a.get(k), b.get(k))]
    return [f"{key}: {a[key]} and {b[key]}" for key in both if a[key] != b[key]]


def _state(record: Record) -> dict[str, Any]:
    """train_state.json of the newest checkpoint that has one; empty where there is none."""
    for path in reversed(_checkpoint_folders(record)):
        with suppress(OSError, ValueError):
            return _load(record, path / STATE)
    return {}


def _starts(record: Record, state: dict[str, Any]) -> list[dict[str, Any]]:
    """The starts of the run; its newest checkpoint where none is recorded."""
    starts = [event for event in record.events if event["event"] == "start"]
    saved = state.get("versions")
    return starts or [saved if isinstance(saved, dict) else {}]


def _code(a: Record, b: Record) -> list[str]:
    """Returns the files that differ between the code that two launches copied; none where one has
    no copy."""
    one, other = code_place(a), code_place(b)
    if one is None or other is None or one == other:  # a sweep has one copy
        return []
    changed = changed_files(code_files(a), code_files(b))
    named = ", ".join(changed[:MAX_FILES])
    more = f" and {len(changed) - MAX_FILES:,} more" if len(changed) > MAX_FILES else ""
    return [f"files differ: {named}{more}"] if changed else []
