"""A run as a Record of what it has written.

Nothing is written or locked, and torch is not imported. What cannot be read is left out and named
in `Record.problems`.
"""

import json
import os
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, repeat
from math import nan
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lingua.base import dump_dir
from lingua.base.files import file_size
from lingua.base.format import counted
from lingua.base.lock import LIFETIME_S, read_lock, runs_here
from lingua.run.files import grouped, parse_lines, read_config

BATCH = 1000  # lines that are parsed before their values are put into columns
CODE_HASH = "code"  # stands among the keys of a config: the hash of the code that trained the run


class Columns(dict[str, np.ndarray]):
    """Lines about steps, by column: `columns["loss"]` is float64 [lines], NaN where a line has null
    or no finite number; `step` is int64 [lines], increasing. The columns are those with a number in
    some line, in the order of the file, after `step`; another name is a KeyError.

    It is a dict, since `pandas.DataFrame(columns)` takes columns of no other Mapping.
    """

    def __init__(self, lines: Iterable[dict[str, Any]]) -> None:
        """Every line has a valid `step`. One that is not below the step of every later line is
        left out: the run was resumed before it. They are not kept: as objects they would take
        five times the size of their file."""
        columns = {"step": _Column(-1)}
        steps = columns["step"].numbers  # exact, since they are below MAX_STEP
        batch: list[dict[str, Any]] = []
        for line in lines:
            last = batch[-1]["step"] if batch else -1
            if line["step"] <= last or len(batch) == BATCH:
                _add(columns, batch)
                batch = []
            if not batch:
                n = bisect_left(steps, line["step"])
                columns = {name: column for name, column in columns.items() if column.cut(n)}
            batch.append(line)
        _add(columns, batch)
        self.step: np.ndarray = np.array(steps, np.int64)
        self._columns = columns
        for column in columns.values():
            column.numbers.extend(repeat(nan, len(steps) - len(column.numbers)))
        arrays = {name: np.frombuffer(c.numbers) for name, c in columns.items() if c.numbers}
        numbers = {name: values for name, values in arrays.items() if not np.isnan(values).all()}
        super().__init__({**numbers, "step": self.step})

    def __missing__(self, name: str) -> np.ndarray:
        raise KeyError(f"{name}: no line has a number of this name; the columns are {list(self)}")

    def __repr__(self) -> str:
        return f"<{counted(len(self.step), 'line')}: {', '.join(self)}>"

    def numbers(self, name: str) -> np.ndarray:
        """A column, also one that no line has: all its values are NaN then."""
        return self[name] if name in self else np.full(len(self.step), nan)

    def has(self, name: str) -> bool:
        """Whether some line has the column, be it without a number."""
        return name in self._columns

    def text(self, name: str) -> list[str | None]:
        """A column of text, such as `batch_hash`; None where a line has none."""
        texts: list[str | None] = [None] * len(self.step)
        for start, end, part in self._columns[name].texts if self.has(name) else ():
            texts[start:end] = json.loads(part)[: end - start]
        return texts


@dataclass
class _Column:
    """The values of a column that are read so far, without an object for each."""

    first: int  # the first line that has it
    numbers: "array[float]" = field(default_factory=lambda: array("d"))  # up to the last number
    texts: list[tuple[int, int, str]] = field(default_factory=list)  # of lines from, to: JSON

    def cut(self, n: int) -> bool:
        """Forget the lines from n on. Returns whether a line is left that has the column."""
        del self.numbers[n:]
        self.texts = [(start, min(end, n), part) for start, end, part in self.texts if start < n]
        return self.first < n


def _add(columns: dict[str, _Column], batch: list[dict[str, Any]]) -> None:
    """Add lines to the columns."""
    n = len(columns["step"].numbers)
    for name in dict.fromkeys(chain.from_iterable(batch)):
        if name not in columns:
            columns[name] = _Column(n + [name in line for line in batch].index(True))
        column, values = columns[name], [line.get(name) for line in batch]
        kinds = set(map(type, values))
        if str in kinds:
            texts = [value if type(value) is str else None for value in values]
            column.texts.append((n, n + len(texts), json.dumps(texts)))
        if kinds & {int, float}:
            if not kinds <= {int, float, type(None)}:
                values = [value if type(value) in (int, float) else None for value in values]
            numbers = np.array(values, np.float64)
            numbers[np.isinf(numbers)] = nan
            column.numbers.extend(repeat(nan, n - len(column.numbers)))
            column.numbers.frombytes(numbers.tobytes())


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

    def __repr__(self) -> str:
        step = f"{self.newest.get('step', 0):,}" + ("" if self.end is None else f" of {self.end:,}")
        loss = "".join(f", loss {loss:.4g}" for loss in self.metrics.numbers("loss")[-1:])
        return f"<Record of {self.folder}: {self.state}, step {step}{loss}>"

    @cached_property
    def launch(self) -> Path:
        """The folder with the code that was copied for the run: its own, or the one above, which
        the runs of a sweep share."""
        own, above = (folder / dump_dir.CODE_COMMIT for folder in (self.folder, self.folder / ".."))
        return above.parent if above.exists() and not own.exists() else self.folder

    def resolve(self, path: Path, root: Path | None = None) -> Path | None:
        """The real path of a file or folder of the run. None where that is neither in its folder
        nor in the copied code: the folder may be anybody's, and what is read of it is passed on.
        With `root`, it must be in that folder."""
        real, top = (Path(os.path.realpath(p)) for p in (path, root or self.folder))
        launch = Path(os.path.realpath(self.launch))
        copied = (dump_dir.CODE, dump_dir.CODE_COMMIT, dump_dir.CODE_DIFF)
        if any(map(real.is_relative_to, [top, *(launch / name for name in copied)])):
            return real
        problem = f"{os.path.normpath(path)}: left out: it is a link to a place outside of the run"
        self.problems += [problem] * (problem not in self.problems)
        return None

    @cached_property
    def config(self) -> dict[str, Any]:
        """{"optim.lr": 0.001, ...}: the resolved config, or that of the launch where the run has
        not started; empty where it cannot be read."""
        config, problems = read_config(self.folder, self.resolve)
        self.problems += problems
        return config

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
        lock, newest = self.folder / dump_dir.LOCK, self.newest
        if is_held(lock):
            return "running"
        if lock.exists() or (newest.get("event") == "stop" and "error" in newest):
            return "failed"
        if self.end is not None and newest.get("step", 0) >= self.end:
            return "finished"
        return "stopped" if newest or (self.folder / dump_dir.CONFIG).exists() else "not started"

    @property
    def end(self) -> int | None:
        """The step that the run trains up to, by its config."""
        ends = [v for v in (self.config.get("steps"), self.config.get("stop_at")) if type(v) is int]
        return min(ends, default=None)

    @property
    def has_begun(self) -> bool:
        """Whether it has a result: a step, a held-out loss or a failure."""
        return bool(len(self.metrics.step) or self.validation) or self.state == "failed"

    def lines(self, file: str) -> list[dict[str, Any]]:
        """The lines of a .jsonl file of the dump dir that have a valid `step`, an int."""
        return list(self._read(file))

    def _read(self, file: str, tail: int | None = None) -> Iterator[dict[str, Any]]:
        path = self.folder / file
        if (real := self.resolve(path)) is None:
            return
        try:
            size = file_size(real)
            start = 0 if tail is None else max(0, size - tail)
            with real.open("rb") as opened:
                texts = _end(opened, start) if start else opened
                yield from parse_lines(texts, str(path), self.problems, numbered=not start)
        except FileNotFoundError:
            pass
        except OSError as error:
            self.problems.append(f"{path}: cannot be read: {error.strerror or error}")

    @cached_property
    def _metrics(self) -> tuple[Columns, list[dict[str, Any]], dict[str, Any]]:
        """(lines about steps, events, the newest line) of metrics.jsonl."""
        events, newest = [], {}

        def steps() -> Iterator[dict[str, Any]]:
            nonlocal newest
            for newest in self._read(dump_dir.METRICS, self.tail):
                if "event" not in newest:
                    yield newest
                elif isinstance(newest["event"], str):
                    events.append(newest)

        return Columns(steps()), events, newest

    @property
    def newest(self) -> dict[str, Any]:
        """The newest line of metrics.jsonl; empty if there is none."""
        return self._metrics[2]

    @property
    def metrics(self) -> Columns:
        return self._metrics[0]

    @property
    def events(self) -> list[dict[str, Any]]:
        """Lines with an `event`: start, stop, topology, or of an app's own."""
        return self._metrics[1]

    @cached_property
    def validation(self) -> dict[str, Columns]:
        """The held-out losses of each source."""
        lines = grouped(self.lines(dump_dir.VALIDATION), "source")
        return {source: Columns(source_lines) for source, source_lines in sorted(lines.items())}

    @cached_property
    def evaluation(self) -> list[dict[str, Any]]:
        return self.lines(dump_dir.EVALUATION)

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        return self.lines(dump_dir.SAMPLES)


def is_held(lock: Path) -> bool:
    """Whether a process holds a lock. Changes nothing, and does not wait: a holder on another
    machine has renewed the file's date within LIFETIME_S by this machine's clock."""
    try:
        content, renewed_ns = read_lock(lock)
    except OSError:
        return False
    runs = runs_here(content)
    return time.time() - renewed_ns / 1e9 <= LIFETIME_S if runs is None else runs


def _end(file: BinaryIO, start: int) -> list[bytes]:
    """The whole lines from the byte `start` on, after the first line of the file where that is an
    event: the start of the run."""
    first = file.readline(start)
    file.seek(start)
    _, *lines = file.read().split(b"\n")
    return [first, *lines] if b'"event"' in first else lines
