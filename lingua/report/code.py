"""How the code of runs differs, from what a launch copies: `code`, `code.commit`, `code.diff`.

A run of a sweep has them in the folder above its own.
"""

import difflib
import filecmp
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from lingua.files import read_bytes
from lingua.records import Record

MOST_FILES = 10_000  # of a copy that are looked at
MOST_BYTES = 1 << 18  # of a file that is compared line by line
MOST_LINES = 1000  # of the differences between two copies
COPY, COMMIT, DIFF = "code", "code.commit", "code.diff"


def code_differences(records: Sequence[Record]) -> list[dict[str, Any]]:
    """[{commit, changes, runs, difference}, ...]: a version of the code each, its runs, and how the
    copy differs from that of the first version."""
    versions: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        versions.setdefault(_version(record), []).append(record)
    if not any(commit for commit, _ in versions):
        return []
    first = code_place(next(iter(versions.values()))[0], COPY)
    found = []
    for (commit, changes), runs in versions.items():
        copy = code_place(runs[0], COPY)
        lines = _diff(first, copy) if first is not None and copy is not None else []
        if len(lines) > MOST_LINES:
            lines = [*lines[:MOST_LINES], f"... {len(lines) - MOST_LINES:,} more lines"]
        names = [run.name for run in runs]
        found.append({"commit": commit or "not recorded", "changes": changes.count("\n"),
                      "runs": names, "difference": "\n".join(lines)})  # fmt: skip
    return found


def _version(record: Record) -> tuple[str, str]:
    """The commit and the uncommitted changes; where there is no copy, the commit of a start."""
    place = code_place(record, COMMIT)
    if place is None:
        starts = [e.get("commit") for e in record.events if e["event"] == "start"]
        return str(starts[-1] or "") if starts else "", ""
    return _content(place).strip(), _content(place.with_name(DIFF))


def code_place(record: Record, name: str = COPY) -> Path | None:
    """Where the run has its copied code, or another file of it."""
    places = (record.folder / name, record.folder.absolute().parent / name)
    return next((place for place in places if place.exists()), None)


def _diff(old: Path, new: Path) -> list[str]:
    """A unified diff of two folders."""
    lines: list[str] = []
    for name in changed_files(old, new):
        before, after = (_content(folder / name).splitlines() for folder in (old, new))
        lines += difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", n=2, lineterm="")
    return lines


def changed_files(old: Path, new: Path) -> list[str]:
    """The files, by their paths in it, that one of two folders lacks or has otherwise."""
    names = sorted({*_names(old), *_names(new)})
    return [name for name in names if not _is_same(old / name, new / name)]


def _is_same(one: Path, other: Path) -> bool:
    try:
        return filecmp.cmp(one, other, shallow=False)
    except OSError:  # one does not exist
        return False


def _names(folder: Path) -> Iterator[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    inside = (str(path.relative_to(folder)) for path in files if "__pycache__" not in path.parts)
    return islice(inside, MOST_FILES)


def _content(path: Path) -> str:
    try:
        return read_bytes(path, MOST_BYTES).decode(errors="replace")
    except OSError:  # it does not exist, or is too large
        return ""
