"""Reading what runs have written: `open_runs(["runs"])` gives a Record of every run below a folder.

Nothing is written or locked, and torch is not imported. The files may be of another version, cut
off by a kill, or anybody's: what cannot be read is left out and named in `Record.problems`.
"""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from lingua.base.dump_dir import (
    AUDIT,
    BASE_CONFIG,
    CODE,
    CODE_COMMIT,
    CONFIG,
    EVALUATION,
    LOCK,
    METRICS,
    SAMPLES,
    TRAIN_LOG,
    VALIDATION,
)
from lingua.base.errors import UserError
from lingua.base.files import file_size, load_json, read_bytes
from lingua.base.format import counted
from lingua.base.lock import LIFETIME_S, read_lock, runs_here
from lingua.config.values import plain, read_file

CONFIGS = (CONFIG, BASE_CONFIG)  # the resolved one exists once a run has started
DUMP_DIR_FILES = (METRICS, TRAIN_LOG, BASE_CONFIG)  # a dump dir has one of them and a config
# Keys that only name a run, a place or its last step; what is trained does not depend on them.
NAMES = {"name", "dump_dir", "stop_at", "checkpoint.path"}
NAMES |= {"logging.wandb.name", "logging.wandb.dir"}
CODE_HASH = "code"  # stands among the keys of a config: the hash of the code that trained the run
# Values that are filled in when a run starts, or not known: they differ from no other.
UNRESOLVED = {"model.vocab_size": -1, "data.global_batch_size": None, CODE_HASH: None}
NOT_GIVEN = "not given"  # value of a key that a config lacks
MAPPINGS = ("data.sources", "data.source_files", "eval.job")  # keys whose value is a mapping
MAX_PROBLEMS = 5  # unreadable lines to report for a file
MAX_STEP = 1 << 53  # the first whole numbers that float64 lacks are above it


# ---- which runs


def find_runs(paths: Iterable[Path | str]) -> list[Path]:
    """The dump dirs at or below `paths`, sorted, each once. What is inside of a dump dir is not
    searched, nor are hidden folders and copies of the code; a link is followed only where it is one
    of `paths`. Raises UserError where a path has none."""
    run_of_path: dict[Path, Path] = {}  # by resolved path: a run may be below several of `paths`
    for path in map(Path, paths):
        if not path.is_dir():
            raise UserError(f"{path}: {'must be a folder' if path.exists() else 'does not exist'}")
        runs = list(_dump_dirs(path))
        if not runs:
            need = f"a dump dir has {CONFIG}, or {BASE_CONFIG} if it was only launched"
            raise UserError(f"{path}: no run there or below; {need}")
        for run in runs:
            run_of_path.setdefault(run.resolve(), run)
    return sorted(run_of_path.values())


def open_runs(paths: Iterable[Path | str], tail: int | None = None) -> list["Record"]:
    """A Record of each run at or below `paths`, named by its shortest unique path suffix. Raises
    UserError as find_runs. For `tail` see Record."""
    folders = find_runs(paths)
    parts = [folder.absolute().parts for folder in folders]
    names: dict[int, str] = {}
    for length in range(1, max(map(len, parts)) + 1):
        ends = ["/".join(p[-length:]) for p in parts]
        times = Counter(ends)
        for i, end in enumerate(ends):
            if times[end] == 1:
                names.setdefault(i, end)
    return [Record(f, names.get(i, str(f)), tail) for i, f in enumerate(folders)]


def _dump_dirs(top: Path) -> Iterator[Path]:
    folders = [top]
    while folders:
        folder = folders.pop()
        try:
            entries = {entry.name: entry for entry in os.scandir(folder)}
            inner = sorted(n for n, e in entries.items() if e.is_dir(follow_symlinks=False))
        except OSError:  # out of reach
            continue
        if any(n in entries for n in CONFIGS) and any(n in entries for n in DUMP_DIR_FILES):
            yield folder
        else:
            is_launch = CODE_COMMIT in entries
            folders += [folder / name for name in inner[::-1] if not _is_left(name, is_launch)]


def _is_left(name: str, is_launch: bool) -> bool:
    """Whether a folder is not searched: a hidden one, or a copy of the code of a launch, of which
    an earlier one is `code.1` (lingua.tools.slurm.freeze.move_away)."""
    return name[0] == "." or (is_launch and bool(re.fullmatch(rf"{CODE}(\.\d+)?", name)))


# ---- one run


class Columns(dict[str, np.ndarray]):
    """Lines about steps, by column: `columns["loss"]` is float64 [lines], NaN where a line has null
    or no finite number; `step` is int64 [lines], increasing. The columns are those with a number in
    some line, in the order of the file, after `step`; another name is a KeyError.

    It is a dict, since `pandas.DataFrame(columns)` takes columns of no other Mapping.
    """

    def __init__(self, lines: Sequence[dict[str, Any]]) -> None:
        """Every line has a valid `step`. One that is not below the step of every later line is
        left out: the run was resumed before it."""
        steps = np.array([line["step"] for line in lines], np.int64)
        least_later = np.minimum.accumulate(steps[::-1])[::-1][1:]
        kept = np.append(steps[:-1] < least_later, [True] * (len(steps) > 0)).astype(bool)
        self.step: np.ndarray = steps[kept]
        self._lines = [line for line, keep in zip(lines, kept.tolist(), strict=True) if keep]
        names = dict.fromkeys(key for line in self._lines for key in line)
        arrays = {name: self.numbers(name) for name in names if name != "step"}
        numbers = {name: array for name, array in arrays.items() if not np.isnan(array).all()}
        super().__init__({"step": self.step, **numbers})

    def __missing__(self, name: str) -> np.ndarray:
        raise KeyError(f"{name}: no line has a number of this name; the columns are {list(self)}")

    def __repr__(self) -> str:
        return f"<{counted(len(self.step), 'line')}: {', '.join(self)}>"

    def numbers(self, name: str) -> np.ndarray:
        """A column, also one that no line has: all its values are NaN then."""
        if (known := self.get(name)) is not None:
            return known
        values = [line.get(name) for line in self._lines]
        if not set(map(type, values)) <= {int, float, type(None)}:
            values = [v if type(v) in (int, float) else None for v in values]
        array = np.array(values, np.float64)
        return np.where(np.isfinite(array), array, np.nan)

    def has(self, name: str) -> bool:
        """Whether some line has the column, be it without a number."""
        return any(name in line for line in self._lines)

    def text(self, name: str) -> list[str | None]:
        """A column of text, such as `batch_hash`; None where a line has none."""
        values = [line.get(name) for line in self._lines]
        return [v if isinstance(v, str) else None for v in values]


class Record:
    """The files that one run has written. Each is read when it is first asked for, and kept."""

    def __init__(
        self, folder: Path | str, name: str | None = None, tail: int | None = None
    ) -> None:
        """With `tail`, of metrics.jsonl only the start and the lines in that many last bytes are
        read."""
        self.folder = Path(folder)
        self.name = name or self.folder.absolute().name
        self.tail = tail
        self.problems: list[str] = []  # what could not be read, of the files read so far

    @cached_property
    def config(self) -> dict[str, Any]:
        """{"optim.lr": 0.001, ...}: the resolved config, or that of the launch where the run has
        not started; empty where it cannot be read."""
        for path in (self.folder / name for name in CONFIGS):
            if path.exists():
                try:
                    return flat(plain(read_file(path, str(path))))
                except (UserError, OSError) as error:
                    self.problems.append(str(error))
        return {}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The config, with the hash of the code that trained the run as `code`: None where a start
        has not recorded it; of a run that was resumed with other code, all of them."""
        starts = [event.get(CODE_HASH) for event in self.events if event["event"] == "start"]
        known = dict.fromkeys(code for code in starts if isinstance(code, str))
        code = " then ".join(known) if known and None not in starts else None
        return {**self.config, CODE_HASH: code}

    @cached_property
    def state(self) -> str:
        """running, finished, stopped, failed or not started: from the lock, which a killed run
        leaves behind, and from the newest line."""
        lock, newest = self.folder / LOCK, self.newest
        if is_held(lock):
            return "running"
        if lock.exists() or (newest.get("event") == "stop" and "error" in newest):
            return "failed"
        if self.end is not None and newest.get("step", 0) >= self.end:
            return "finished"
        return "stopped" if newest or (self.folder / CONFIG).exists() else "not started"

    @property
    def end(self) -> int | None:
        """The step that the run trains up to, by its config."""
        ends = [v for v in (self.config.get("steps"), self.config.get("stop_at")) if type(v) is int]
        return min(ends, default=None)

    @property
    def has_begun(self) -> bool:
        """Whether it has a result: a step, a held-out loss or a failure."""
        return bool(len(self.metrics.step) or self.validation) or self.state == "failed"

    def lines(self, file: str, tail: int | None = None) -> list[dict[str, Any]]:
        """The lines of a .jsonl file of the dump dir that have a valid `step`, an int."""
        path = self.folder / file
        problems: list[str] = []
        try:
            size = file_size(path)
            data = read_bytes(path) if tail is None else _end(path, size, tail)
        except FileNotFoundError:
            return []
        except OSError as error:
            self.problems.append(f"{path}: cannot be read: {error}")
            return []
        lines = []
        for number, text in enumerate(data.split(b"\n"), 1):
            if text.strip():
                try:
                    lines.append(_parse(text))
                except ValueError as error:
                    where = f"{path}:{number}" if tail is None or size <= tail else str(path)
                    problems.append(f"{where}: a line is left out: {error}")
        more = [f"{path}: {len(problems) - MAX_PROBLEMS:,} more lines are left out"]
        self.problems += problems[:MAX_PROBLEMS] + more * (len(problems) > MAX_PROBLEMS)
        return lines

    @cached_property
    def _metrics(self) -> list[dict[str, Any]]:
        return self.lines(METRICS, self.tail)

    @property
    def newest(self) -> dict[str, Any]:
        """The newest line of metrics.jsonl; empty if there is none."""
        return self._metrics[-1] if self._metrics else {}

    @cached_property
    def metrics(self) -> Columns:
        return Columns([line for line in self._metrics if "event" not in line])

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """Lines with an `event`: start, stop, topology, or of an app's own."""
        return [line for line in self._metrics if isinstance(line.get("event"), str)]

    @cached_property
    def validation(self) -> dict[str, Columns]:
        """The held-out losses of each source."""
        lines = grouped(self.lines(VALIDATION), "source")
        return {source: Columns(source_lines) for source, source_lines in sorted(lines.items())}

    @cached_property
    def evaluation(self) -> list[dict[str, Any]]:
        return self.lines(EVALUATION)

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        return self.lines(SAMPLES)


def audited(record: Record) -> str:
    """Date and verdict of the audit that is recorded in a run's folder; empty where none is."""
    try:
        entry = load_json(record.folder / AUDIT)
        return f"{str(entry['date'])[:10]}, {entry['kind']}: {entry['verdict']}"
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError) as error:
        record.problems.append(f"{record.folder / AUDIT}: cannot be read: {error}")
        return ""


def grouped(lines: Sequence[dict[str, Any]], key: str) -> dict[str, list[dict[str, Any]]]:
    """The lines that have a text as `key`, by that text."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if isinstance(name := line.get(key), str):
            groups.setdefault(name, []).append(line)
    return groups


# ---- numbers of runs


def heldout(record: Record, measure: str = "nats_per_byte") -> tuple[np.ndarray, np.ndarray]:
    """(steps, int64 [n]; values, float64 [n]): the held-out loss of all sources together, as the
    console shows it and as the best checkpoint is chosen: the mean weighted with the bytes of each
    source (with its tokens for a measure per token; equally where a file has neither).

    The steps are those at which every source was measured that the last two measurements had, so
    that one cut off by a kill does not count. A loss that is not finite is NaN.
    """
    parts, common = _measured(record, measure)
    size = "tokens" if measure.endswith("_per_token") else "bytes"
    if not common:
        return np.zeros(0, np.int64), np.zeros(0)
    values = np.array([c.numbers(measure)[np.searchsorted(c.step, common)] for c in parts])
    weights = np.array([c.numbers(size)[np.searchsorted(c.step, common)] for c in parts])
    if not (weights > 0).all():  # NaN included
        weights = np.ones_like(values)
    return np.array(common, np.int64), (values * weights).sum(0) / weights.sum(0)


def _measured(record: Record, measure: str) -> tuple[list[Columns], list[int]]:
    """(the sources that count, the steps at which all of them were measured), see heldout."""
    parts = [c for c in record.validation.values() if c.has(measure)]
    at = {id(c): set(c.step.tolist()) for c in parts}
    steps = sorted(set().union(*at.values()))
    parts = [c for c in parts if not at[id(c)].isdisjoint(steps[-2:])]
    return parts, sorted(set(steps).intersection(*(at[id(c)] for c in parts)))


def heldout_texts(records: Sequence[Record], measure: str = "nats_per_byte") -> list[str]:
    """The text of each run's newest held-out loss: equal for the same text. It is known by its
    hashes where all runs have recorded them, else by its bytes; empty where neither is known."""
    texts = []
    for record in records:
        parts, common = _measured(record, measure)
        at = [(c, c.step.tolist().index(common[-1])) for c in parts if common]
        texts.append(sorted((c.numbers("bytes")[i], c.text("text")[i] or "") for c, i in at))
    hashed = all(text for parts in texts for _, text in parts)
    return [
        " and ".join(
            f"{size:,.0f} bytes{f' {text}' * hashed}" for size, text in parts if size == size
        )
        for parts in texts
    ]


def smooth(values: np.ndarray, step: np.ndarray, half_life: float | None = None) -> np.ndarray:
    """Exponential moving average over the steps: a value counts half as much as one that is
    `half_life` steps later. NaN does not count, and stays NaN.

    Args:
        values: float64 [lines].
        step: int64 [lines], increasing.
        half_life: in steps; None: a twentieth of the lines, at least one and at most ten, times
            the median number of steps between two of them.

    Returns:
        float64 [lines]: at line i the sum of w_j * values[j] over j <= i, divided by that of w_j,
        with w_j = 0.5 ** ((step[i] - step[j]) / half_life).
    """
    gaps = np.diff(step, prepend=step[:1])
    if half_life is None:
        between = float(np.median(gaps[1:])) if len(gaps) > 1 else 1.0
        half_life = min(10.0, max(1.0, len(values) / 20)) * between
    total = weight = 0.0
    smoothed = []
    for value, decay in zip(values.tolist(), (0.5 ** (gaps / half_life)).tolist(), strict=True):
        total, weight = total * decay, weight * decay
        if value == value:
            total, weight = total + value, weight + 1.0
        smoothed.append(total / weight if value == value else np.nan)
    return np.array(smoothed)


def differing(records: Sequence[Record]) -> list[str]:
    """The config keys whose values differ between runs, in the order of the configs, without names
    and places; `code` is one of them. A value differs from none, and a group from null: it is then
    one key."""
    keys = dict.fromkeys(key for record in records for key in record.settings)
    wholes = {group for key in keys for group in _groups(key) if group in keys}
    keys = dict.fromkeys(key for key in keys if wholes.isdisjoint(_groups(key)))
    return [key for key in keys if key not in NAMES and len(_distinct(records, key)) > 1]


def setting(settings: Mapping[str, Any], key: str) -> Any:
    """The value of a key; of a group a mapping of its keys; NOT_GIVEN where there is none."""
    if key in settings:
        return settings[key]
    group = f"{key}."
    inner = {k.removeprefix(group): v for k, v in settings.items() if k.startswith(group)}
    return inner or NOT_GIVEN


def settings_of(records: Sequence[Record], keys: Iterable[str]) -> list[dict[str, Any]]:
    """{key: value} of each run. A value that a start fills in, or that is not known, is that of the
    other runs where they have one alone."""
    values = [{key: setting(record.settings, key) for key in keys} for record in records]
    for key in UNRESOLVED.keys() & set(keys):
        known = _distinct(records, key)
        for run in values:
            if run[key] in (UNRESOLVED[key], NOT_GIVEN) and len(known) == 1:
                run[key] = known[0]
    return values


def _distinct(records: Sequence[Record], key: str) -> list[Any]:
    """The different values of a key, without those that a start fills in or that are not known."""
    values: list[Any] = []
    for record in records:
        value = setting(record.settings, key)
        unresolved = key in UNRESOLVED and value in (UNRESOLVED[key], NOT_GIVEN)
        if not unresolved and value not in values:
            values.append(value)
    return values


def _groups(key: str) -> list[str]:
    """["a", "a.b"] of "a.b.c"."""
    return [key[:i] for i, c in enumerate(key) if c == "."]


def is_held(lock: Path) -> bool:
    """Whether a process holds a lock. Changes nothing, and does not wait: a holder on another
    machine has renewed the file's date within LIFETIME_S by this machine's clock."""
    try:
        content, renewed_ns = read_lock(lock)
    except OSError:
        return False
    runs = runs_here(content)
    return time.time() - renewed_ns / 1e9 <= LIFETIME_S if runs is None else runs


# ---- files


def _end(path: Path, size: int, tail: int) -> bytes:
    """The whole lines in the last `tail` bytes, after the first line where that is an event: the
    start of the run."""
    with path.open("rb") as file:
        if size <= tail:
            return file.read(tail)
        first = file.readline(tail)
        file.seek(size - tail)
        end = file.read(tail).partition(b"\n")[2]
    return first + end if b'"event"' in first else end


def _parse(text: bytes) -> dict[str, Any]:
    """A line with a step. Raises ValueError, which says why it is none."""
    try:
        line = orjson.loads(text)
    except ValueError:
        try:
            line = json.loads(text, parse_int=float)  # orjson refuses NaN, json takes it
        except (ValueError, RecursionError):
            raise ValueError("it is incomplete, or no JSON") from None
    if not isinstance(line, dict):
        raise ValueError("it is no JSON object")
    step = line.get("step")
    if isinstance(step, bool) or not isinstance(step, int | float):
        raise ValueError("it has no valid step")
    if not (0 <= step < MAX_STEP and step == int(step)):
        raise ValueError("it has no valid step")
    line["step"] = int(step)
    return line


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim.lr": 0.001, ...} of nested mappings, but for those that are values."""
    keys: dict[str, Any] = {}
    for name, value in values.items():
        key = prefix + name
        if isinstance(value, dict) and value and key not in MAPPINGS:
            keys |= flat(value, f"{key}.")
        else:
            keys[key] = value
    return keys
