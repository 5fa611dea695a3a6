"""How the code of runs differs, from what a launch copies: `code`, `code.commit`, `code.diff`.

A run of a sweep has them in the folder above its own.
"""

import difflib
import filecmp
from collections.abc import Iterator, Sequence
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
    first = code_place(next(iter(versions.values()))[0], CODE)
    differences = []
    for (commit, changes), runs in versions.items():
        copy = code_place(runs[0], CODE)
        lines = _diff(first, copy) if first is not None and copy is not None else []
        if len(lines) > MAX_LINES:
            lines = [*lines[:MAX_LINES], f"... {len(lines) - MAX_LINES:,} more lines"]
        names = [run.name for run in runs]
        differences.append({"commit": commit or "not recorded", "changes": changes.count("\n"),
                      "runs": names, "difference": "\n".join(lines)})  # fmt: skip
    return differences


def _version(record: Record) -> tuple[str, str]:
    """The commit and the uncommitted changes; where there is no copy, the commit of a start."""
    place = code_place(record, CODE_COMMIT)
    if place is None:
        starts = [e.get("commit") for e in record.events if e["event"] == "start"]
        return str(starts[-1] or "") if starts else "", ""
    return _content(place).strip(), _content(place.with_name(CODE_DIFF))


def code_place(record: Record, name: str = CODE) -> Path | None:
    """Returns the path of the run's copied code, or of another file of it."""
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
    names = {*_names(old), *_names(new)}
    _, different, missing = filecmp.cmpfiles(old, new, names, shallow=False)
    return sorted([*different, *missing])


def _names(folder: Path) -> Iterator[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return (str(path.relative_to(folder)) for path in files if "__pycache__" not in path.parts)


def _content(path: Path) -> str:
    try:
        small = file_size(path) <= MAX_FILE_BYTES
        return path.read_bytes().decode(errors="replace") if small else ""
    except OSError:  # it does not exist
        return ""
