"""What a run has written, as plain values. The files may be of another version, cut off by a kill,
or anybody's: what cannot be read is left out, with a line that names it. torch is not imported."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from lingua.base.dump_dir import BASE_CONFIG, CONFIG
from lingua.base.errors import UserError
from lingua.base.files import file_size, read_bytes
from lingua.config.values import plain, read_file

CONFIGS = (CONFIG, BASE_CONFIG)  # the resolved one exists once a run has started
MAPPINGS = ("data.sources", "data.source_files", "eval.job")  # keys whose value is a mapping
MAX_PROBLEMS = 5  # unreadable lines to report for a file
MAX_STEP = 1 << 53  # the first whole numbers that float64 lacks are above it


def read_config(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """({"optim.lr": 0.001, ...}, what could not be read): the resolved config of the run in a dump
    dir, or that of the launch where the run has not started."""
    problems: list[str] = []
    for path in (folder / name for name in CONFIGS):
        if path.exists():
            try:
                return flat(plain(read_file(path, str(path)))), problems
            except (UserError, OSError) as error:
                problems.append(str(error))
    return {}, problems


def read_lines(path: Path, tail: int | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """(the lines of a .jsonl file that have a valid `step`, an int; what could not be read). With
    `tail`, only the start of the run and the lines in that many last bytes."""
    try:
        size = file_size(path)
        data = read_bytes(path) if tail is None else _end(path, size, tail)
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"{path}: cannot be read: {error}"]
    lines, problems = [], []
    for number, text in enumerate(data.split(b"\n"), 1):
        if text.strip():
            try:
                lines.append(_parse(text))
            except ValueError as error:
                where = f"{path}:{number}" if tail is None or size <= tail else str(path)
                problems.append(f"{where}: a line is left out: {error}")
    more = [f"{path}: {len(problems) - MAX_PROBLEMS:,} more lines are left out"]
    return lines, problems[:MAX_PROBLEMS] + more * (len(problems) > MAX_PROBLEMS)


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


def grouped(lines: Sequence[dict[str, Any]], key: str) -> dict[str, list[dict[str, Any]]]:
    """The lines that have a text as `key`, by that text."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if isinstance(name := line.get(key), str):
            groups.setdefault(name, []).append(line)
    return groups
