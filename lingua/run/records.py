"""A run as a Record of what it has written.

Nothing is written or locked, and torch is not imported. What cannot be read is left out and named
in `Record.problems`.
"""

import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lingua.base.dump_dir import CONFIG, EVALUATION, LOCK, METRICS, SAMPLES, VALIDATION
from lingua.base.format import counted
from lingua.base.lock import LIFETIME_S, read_lock, runs_here
from lingua.run.files import grouped, read_config, read_lines

CODE_HASH = "code"  # stands among the keys of a config: the hash of the code that trained the run


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

    def __repr__(self) -> str:
        step = f"{self.newest.get('step', 0):,}" + ("" if self.end is None else f" of {self.end:,}")
        loss = "".join(f", loss {loss:.4g}" for loss in self.metrics.numbers("loss")[-1:])
        return f"<Record of {self.folder}: {self.state}, step {step}{loss}>"

    @cached_property
    def config(self) -> dict[str, Any]:
        """{"optim.lr": 0.001, ...}: the resolved config, or that of the launch where the run has
        not started; empty where it cannot be read."""
        config, problems = read_config(self.folder)
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
        lines, problems = read_lines(self.folder / file, tail)
        self.problems += problems
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


def is_held(lock: Path) -> bool:
    """Whether a process holds a lock. Changes nothing, and does not wait: a holder on another
    machine has renewed the file's date within LIFETIME_S by this machine's clock."""
    try:
        content, renewed_ns = read_lock(lock)
    except OSError:
        return False
    runs = runs_here(content)
    return time.time() - renewed_ns / 1e9 <= LIFETIME_S if runs is None else runs
