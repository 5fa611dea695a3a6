"""The files of a run as an audit reads them. They may be anybody's: each value that is computed
with has the type that a run writes, checked here, where it is parsed. Lines are read one at a time,
since there may be millions."""

from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from types import NoneType
from typing import Any

import orjson

from lingua.base.dump_dir import CONFIG, METRICS, RECEIPT, STATE, VALIDATION
from lingua.base.errors import UserError
from lingua.base.files import file_size, load_json, read_bytes
from lingua.checkpoint.folder import Checkpoint, read_state
from lingua.checkpoint.starts import in_order
from lingua.config.values import plain, read_file, show
from lingua.run.files import MAX_STEP, flat
from lingua.run.receipt import checkpoint_folder, checkpoints_of
from lingua.run.records import Record

Config = dict[str, Any]  # flat; empty where it is not known
Types = dict[str, tuple[type, ...]]  # by dotted path, in which `*` is each entry; absent is None
GROUP, INT, FLAG, TEXT = (dict, NoneType), (int, NoneType), (bool, NoneType), (str, NoneType)
# What is not computed with has no type here: it is compared, and an app may have its own.
CONFIG_TYPES: Types = {
    "steps": INT, "stop_at": INT, "deterministic": (*FLAG, str), "logging": GROUP,
    "logging.freq": INT, "validation": GROUP, "validation.every": INT, "eval": GROUP,
    "eval.every": INT, "checkpoint": GROUP, "checkpoint.path": TEXT, "checkpoint.keep_best": FLAG,
    "checkpoint.dump": GROUP, "checkpoint.dump.every": INT, "checkpoint.eval": GROUP,
    "checkpoint.eval.every": INT, "distributed": GROUP, "distributed.model_dtype": TEXT,
}  # fmt: skip
RECEIPT_TYPES: Types = {
    "run": (dict,), "run.config": (dict,), "run.data": (dict,), "run.tensors": (dict,),
    "run.chains": (dict,), "run.chains.*": (dict,), "run.chains.*.lines": (int,),
    "run.held_out": (dict,), "checkpoints": GROUP, "events": GROUP, "events.lines": (int,),
    "starts": (list,), "starts.*": (dict,),
}  # fmt: skip
LINE_TYPES: Types = {"step": (int,), "chain": TEXT}
HELD_OUT_TYPES: Types = {"source": (str,)}
EVENT_TYPES: Types = {"event": (str,)}
START_TYPES: Types = {"config": TEXT, "topology": (list, NoneType), "topology.*": (int,)}
NAMES = {dict: "a mapping", list: "a list", int: "a whole number", str: "text"}
NAMES |= {bool: "true or false", NoneType: "null"}
TAIL_BYTES = 1 << 16  # of metrics.jsonl, which show whether the run is running


class UnreadableError(UserError):
    """A file is out of reach: whether it fits is not known."""


class RunFiles:
    """What one run has written. Everything raises UserError for what no run writes, and
    UnreadableError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def config(self) -> Config:
        return read_config(self.folder / CONFIG)

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The whole ones, by step."""
        try:
            return checkpoints_of(self.folder, self.config)
        except OSError as error:
            raise _unreadable(checkpoint_folder(self.folder, self.config), error) from None

    @cached_property
    def receipt(self) -> dict[str, Any]:
        """receipt.json, empty where there is none."""
        path = self.folder / RECEIPT
        if not path.exists():
            return {}
        values = read_values(path)
        check_types(values, RECEIPT_TYPES, str(path))
        return values

    def lines(self, file: str, first: int = 0, last: int = MAX_STEP) -> Iterator[dict[str, Any]]:
        """The lines of a .jsonl file about these steps."""
        lines = numbered_lines(self.folder / file)
        return (line for _, line in lines if first <= line["step"] <= last)

    def step_lines(self, first: int = 0, last: int = MAX_STEP) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl about these steps that are no events."""
        return (line for line in self.lines(METRICS, first, last) if "event" not in line)

    @cached_property
    def summary(self) -> tuple[list[dict[str, Any]], int, bool]:
        """(events, the highest step of other lines, whether one of these has no link), of
        metrics.jsonl."""
        events, last, unlinked = list[dict[str, Any]](), 0, False
        for line in self.lines(METRICS):
            if "event" in line:
                events.append(line)
            else:
                last, unlinked = max(last, line["step"]), unlinked or not line.get("chain")
        return events, last, unlinked

    @property
    def events(self) -> list[dict[str, Any]]:
        return self.summary[0]

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The events of its starts."""
        return [event for event in self.events if event["event"] == "start"]

    @property
    def is_running(self) -> bool:
        return Record(self.folder, tail=TAIL_BYTES).state == "running"

    def wrong(self) -> Iterator[str]:
        """What no run writes, with its place: of each kind of file the first. Raises
        UnreadableError."""

        def checkpoint(checkpoint: Checkpoint) -> None:
            read_values(checkpoint.path / STATE)
            read_state(checkpoint)
            read_config(checkpoint.path / CONFIG)

        checks: list[Callable[[], object]] = [lambda: self.config, lambda: self.receipt]
        checks += [lambda: list(map(self.start_config, self.starts))]
        checks += [lambda: list(map(checkpoint, self.checkpoints))]
        checks += [lambda: sum(1 for _ in self.lines(VALIDATION))]
        for check in checks:
            try:
                check()
            except UnreadableError:
                raise
            except UserError as error:
                yield " ".join(str(error).split())

    def start_config(self, start: dict[str, Any]) -> Config:
        """The configuration of a start, as its event has it; empty where it has none."""
        where = f"{self.folder / METRICS}: config of the start after step {start['step']}"
        text = start.get("config")
        return {} if text is None else config_of(text.encode(), where)


# ---- one file


def numbered_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, line) of each line of a .jsonl file, but for one at its end that a kill has cut off
    and those that a start has added after a later one had: the next start removes them."""
    return in_order(_valid_lines(path))


def _valid_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, text in enumerate(_texts(path), 1):
        if not text.strip():
            continue
        try:
            line = orjson.loads(text)
            orjson.dumps(line)  # of fewer levels
        except (ValueError, TypeError):
            line = None
        where = f"{path}:{number}: is no line of a run"
        if not isinstance(line, dict):
            if not text.endswith(b"\n"):
                return
            raise UserError(f"{where}: it is no JSON object, or has too many levels")
        types = LINE_TYPES | (EVENT_TYPES if "event" in line else {})
        types |= START_TYPES if line.get("event") == "start" else {}
        types |= HELD_OUT_TYPES if path.name == VALIDATION else {}
        check_types(line, types, where)
        if not 0 <= line["step"] < MAX_STEP or line.get("event") == "":
            raise UserError(f"{where}: it has no valid step, or its event no name")
        yield number, line


def _texts(path: Path) -> Iterator[bytes]:
    try:
        file_size(path)  # a pipe has no end
        with path.open("rb") as file:
            yield from file
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unreadable(path, error) from None


def read_text(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> UserError:
    kind = UserError if error.errno is None else UnreadableError  # not a file, or out of reach
    return kind(f"{path}: cannot be read: {error.strerror or error}")


def read_values(path: Path) -> dict[str, Any]:
    """The JSON object in a file, with numbers and levels that a run can write."""
    try:
        values = load_json(path, read_text(path))
        orjson.dumps(values)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from None
    return values


def read_config(path: Path) -> Config:
    return config_of(read_text(path), str(path))


@lru_cache(maxsize=100)
def config_of(text: bytes, where: str) -> Config:
    """A configuration that a run has written. Callers share it."""
    values = plain(read_file(Path(where), where, text))
    check_types(values, CONFIG_TYPES, where)
    return flat(values)


def check_types(values: dict[str, Any], types: Types, where: str) -> None:
    """Raise UserError for the first value that has another type."""
    for path, allowed in types.items():
        for name, value in _at(values, path):
            if type(value) not in allowed:
                need = " or ".join(NAMES[kind] for kind in allowed)
                raise UserError(f"{where}: {name} = {show(value)}: must be {need}")


def _at(values: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(name, value) of each place that a dotted path names in `values`, whose type is known."""
    key, _, rest = path.partition(".")
    if values is None:
        return
    entries = values.items() if isinstance(values, dict) else enumerate(values)
    for name, value in entries if key == "*" else [(key, values.get(key))]:
        for inner, end in _at(value, rest) if rest else [("", value)]:
            yield f"{name}.{inner}" if rest else str(name), end
