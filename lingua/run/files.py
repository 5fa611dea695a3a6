"""What a run has written, as plain values. The files may be of another version, cut off by a kill,
or anybody's: what cannot be read is left out, with a line that names it. torch is not imported."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from lingua.base.dump_dir import BASE_CONFIG, CONFIG
from lingua.base.errors import UserError
from lingua.base.files import file_size, read_bytes
from lingua.checkpoint.starts import in_order
from lingua.config.values import plain, read_file

CONFIGS = (CONFIG, BASE_CONFIG)  # the resolved one exists once a run has started
MAPPINGS = ("data.sources", "data.source_files", "eval.job")  # keys whose value is a mapping
MAX_PROBLEMS = 5  # unreadable lines to report for a file
MAX_STEP = 1 << 53  # the first whole numbers that float64 lacks are above it


def read_config(
    folder: Path, resolve: Callable[[Path], Path | None] = Path
) -> tuple[dict[str, Any], list[str]]:
    """({"optim.lr": 0.001, ...}, what could not be read): the resolved config of the run in a dump
    dir, or that of the launch where the run has not started. `resolve` returns the path to open, or
    None for a file that must not be read."""
    problems: list[str] = []
    for path in (folder / name for name in CONFIGS):
        if (real := resolve(path)) is not None and real.exists():
            try:
                return flat(plain(read_file(path, str(path), read_bytes(real)))), problems
            except UserError as error:
                problems.append(str(error))
            except OSError as error:
                problems.append(f"{path}: cannot be read: {error.strerror or error}")
    return {}, problems


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a .jsonl file that have a valid `step`, an int; none where it cannot be read."""
    try:
        file_size(path)
        with path.open("rb") as file:
            return list(parse_lines(file, str(path), []))
    except OSError:
        return []


def parse_lines(
    texts: Iterable[bytes], path: str, problems: list[str], numbered: bool = True
) -> Iterator[dict[str, Any]]:
    """One by one, the lines of a .jsonl file that have a valid `step`, an int, in the order of the
    run's starts. Those left out are added to `problems`, with their numbers if they are `numbered`
    from the start of the file."""
    return in_order(_valid_lines(texts, path, problems, numbered))


def _valid_lines(
    texts: Iterable[bytes], path: str, problems: list[str], numbered: bool
) -> Iterator[dict[str, Any]]:
    n = 0
    for number, text in enumerate(texts, 1):
        if text.strip():
            try:
                line = _parse(text)
            except ValueError as error:
                n += 1
                where = f"{path}:{number}" if numbered else path
                problems += [f"{where}: a line is left out: {error}"] * (n <= MAX_PROBLEMS)
            else:
                yield line
    if n > MAX_PROBLEMS:
        problems.append(f"{path}: {n - MAX_PROBLEMS:,} more lines are left out")


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
    step: Any = line.get("step")
    if type(step) not in (int, float) or not (0 <= step < MAX_STEP and step == int(step)):
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
