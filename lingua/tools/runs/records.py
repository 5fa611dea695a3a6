"""Which runs there are: `open_runs(["runs"])` gives a Record of every run below a folder."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from lingua.base import dump_dir
from lingua.base.dump_dir import AUDIT, BASE_CONFIG, CODE, CODE_COMMIT, CONFIG, METRICS, TRAIN_LOG
from lingua.base.errors import UserError
from lingua.base.files import load_json
from lingua.run.files import CONFIGS
from lingua.run.records import Record

DUMP_DIR_FILES = (METRICS, TRAIN_LOG, BASE_CONFIG)  # a dump dir has one of them and a config


class NoRunError(UserError):
    """A path has no run, or not yet."""


def find_runs(paths: Iterable[Path | str]) -> list[Path]:
    """The dump dirs at or below `paths`, sorted, each once, also those in a dump dir, as of a sweep
    in whose folder another run was started. What a run writes is not searched, nor are hidden
    folders and copies of the code; a link is followed only where it is one of `paths`. Raises
    NoRunError where a path has none, UserError where it is no folder."""
    run_of_path: dict[Path, Path] = {}  # by resolved path: a run may be below several of `paths`
    for path in map(Path, paths):
        if not path.exists():
            raise NoRunError(f"{path}: does not exist")
        if not path.is_dir():
            raise UserError(f"{path}: must be a folder")
        runs = list(_dump_dirs(path))
        if not runs:
            os.listdir(path)  # raises PermissionError where it cannot be read
            need = f"a dump dir has {CONFIG}, or {BASE_CONFIG} if it was only launched"
            raise NoRunError(f"{path}: no run there or below; {need}")
        for run in runs:
            run_of_path.setdefault(run.resolve(), run)
    return sorted(run_of_path.values())


def open_runs(paths: Iterable[Path | str], tail: int | None = None) -> list[Record]:
    """A Record of each run at or below `paths`, named by its shortest unique path suffix. Raises
    errors as find_runs. For `tail` see Record."""
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
        is_run = any(n in entries for n in CONFIGS) and any(n in entries for n in DUMP_DIR_FILES)
        if is_run:
            yield folder
        is_launch = is_run or CODE_COMMIT in entries
        folders += [folder / name for name in inner[::-1] if not _is_left(name, is_run, is_launch)]


def _is_left(name: str, is_run: bool, is_launch: bool) -> bool:
    """Whether a folder is not searched: a hidden one, what a run writes, or a copy of the code of a
    launch, of which an earlier one is `code.1` (lingua.tools.slurm.freeze.move_away)."""
    is_code = is_launch and re.fullmatch(rf"{CODE}(\.\d+)?", name)
    written = (*dump_dir.FOLDERS, dump_dir.LOGS) if is_run else ()
    return name[0] == "." or bool(is_code) or name in written


def audited(record: Record) -> str:
    """Date and verdict of the audit that is recorded in a run's folder; empty where none is."""
    try:
        if (place := record.resolve(record.folder / AUDIT)) is None:
            return ""
        entry = load_json(place)
        return f"{str(entry['date'])[:10]}, {entry['kind']}: {entry['verdict']}"
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError) as error:
        record.problems.append(f"{record.folder / AUDIT}: cannot be read: {error}")
        return ""
