"""How the code of runs differs, from what a launch copies: `code`, `code.commit`, `code.diff`.

A run of a sweep has them in the folder above its own.
"""

import difflib
import filecmp
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lingua.base.dump_dir import CODE, CODE_COMMIT, CODE_DIFF
from lingua.base.files import file_size
from lingua.run.records import Record

MAX_FILE_BYTES = 1 << 18  # a larger file is not compared line by line
MAX_LINES = 1000  # lines of the diff between two copies


def code_differences(records: Sequence[Record]) -> list[dict[str, Any]]:
    """[{commit, changes, runs, difference}, ...]: a version of the code each, its runs, and how the
    copy differs from that of the first version."""
    versions: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        versions.setdefault(_version(record), []).append(record)
    if not any(commit for commit, _ in versions):
        return []
    first = next(iter(versions.values()))[0]
    differences = []
    for (commit, changes), runs in versions.items():
        lines = _diff(first, runs[0])
        if len(lines) > MAX_LINES:
            lines = [*lines[:MAX_LINES], f"... {len(lines) - MAX_LINES:,} more lines"]
        names = [run.name for run in runs]
        differences.append({"commit": commit or "not recorded", "changes": changes.count("\n"),
                      "runs": names, "difference": "\n".join(lines)})  # fmt: skip
    return differences


def _version(record: Record) -> tuple[str, str]:
    """The commit and the uncommitted changes; where there is no copy, the commit of a start."""
    if not (record.launch / CODE_COMMIT).exists():
        starts = [e.get("commit") for e in record.events if e["event"] == "start"]
        return str(starts[-1] or "") if starts else "", ""
    places = [record.resolve(record.launch / name) for name in (CODE_COMMIT, CODE_DIFF)]
    return _content(places[0]).strip(), _content(places[1])


def code_place(record: Record) -> Path | None:
    """The real path of the run's copied code; None where there is none."""
    place = record.resolve(record.launch / CODE)
    return place if place is not None and place.is_dir() else None


def _diff(a: Record, b: Record) -> list[str]:
    """A unified diff of the code of two runs; empty where one has no copy."""
    lines: list[str] = []
    old, new = code_files(a), code_files(b)
    for name in changed_files(old, new) if old and new else ():
        before, after = (_content(files.get(name)).splitlines() for files in (old, new))
        lines += difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", n=2, lineterm="")
    return lines


def changed_files(old: Mapping[str, Path], new: Mapping[str, Path]) -> list[str]:
    """The files, by their paths in it, that one of two copies lacks or has otherwise."""

    def is_equal(name: str) -> bool:
        try:
            return filecmp.cmp(old[name], new[name], shallow=False)
        except (KeyError, OSError):  # one lacks it, or it cannot be read
            return False

    return [name for name in sorted(old.keys() | new.keys()) if not is_equal(name)]


def code_files(record: Record) -> dict[str, Path]:
    """The real path of each file of the run's copied code, by its path in the copy."""
    code = record.launch / CODE
    paths = code.rglob("*") if code_place(record) else ()
    names = (path.relative_to(code) for path in paths if "__pycache__" not in path.parts)
    places = {str(name): record.resolve(code / name) for name in names}
    return {name: place for name, place in places.items() if place and place.is_file()}


def _content(path: Path | None) -> str:
    try:
        small = path is not None and file_size(path) <= MAX_FILE_BYTES
        return path.read_bytes().decode(errors="replace") if path and small else ""
    except OSError:  # it does not exist
        return ""
