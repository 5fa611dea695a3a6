"""Which checkpoints are kept: options, marks, and what is removed after a save."""

import logging
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

from lingua.base.dump_dir import CONFIG, MANIFEST, METADATA, STATE, STEP_FOLDER
from lingua.base.errors import UserError
from lingua.checkpoint.args import CheckpointArgs
from lingua.checkpoint.folder import LEFTOVER, Checkpoint, find, read_state, unpublished

BEST = "best"  # the mark of the checkpoint with the lowest held-out loss
MARK = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
SAVED_FILE = re.compile(  # names of the files of a save
    rf"(__\d+_\d+\.distcp|{'|'.join(map(re.escape, (METADATA, STATE, CONFIG, MANIFEST)))})(\.tmp)?"
)

logger = logging.getLogger(__name__)


def prune(
    root: Path,
    args: CheckpointArgs,
    start: int = 0,
    check: Callable[[], None] = lambda: None,
    held: Collection[Path] = (),
) -> list[Path]:
    """Remove what retention does not keep, and mark the best of the rest; on one rank, after a save
    was published by the start of this number. Returns the checkpoints removed. `check` is called
    before anything is removed, and raises where a later start has the run. What is `held` stays.

    Kept are the newest `dump.keep` checkpoints, whatever they were saved for, the newest
    `eval.keep` of those that fall on `eval.every`, all that fall on `keep_every`, the best with
    `keep_best`, and all that have another mark or files that no save has written. Other files and
    folders are not touched, but for the leftovers of saves of this start and earlier ones that did
    not finish: no other save may be under way in the folder.
    """
    gone = []
    try:
        checkpoints = find(root)
        keep = to_keep(checkpoints, args)
        for c in checkpoints:
            if c in keep or c.path in held:
                continue
            if others := {path.name for path in c.path.glob("*")} - {MANIFEST, *c.files}:
                logger.warning(f"{c.path} is kept: it has other files ({', '.join(others)})")
                continue
            check()
            # Under another name first: half a removal must not look like a checkpoint.
            c.path.rename(unpublished(c.path, start))
            gone.append(c.path)
        _mark_best(root, [c for c in checkpoints if c.path not in gone])
        check()
        for path, number in _leftovers(root):
            if number <= start:
                _remove(path)
    except OSError as error:
        logger.warning(f"old checkpoints cannot be removed: {error}")
    return gone


def set_aside(root: Path, start: int) -> None:
    """Rename the folders that earlier starts have not published, which they then cannot. Called
    with the number of a start before it reads checkpoints. Raises OSError."""
    for path, number in _leftovers(root):
        if number < start:
            with suppress(FileNotFoundError):  # published at this moment
                path.rename(unpublished(path.with_name(path.name.partition(".")[0]), start))


def _leftovers(root: Path) -> Iterator[tuple[Path, int]]:
    """Folders of steps that are not published, and the number of the start that each is of."""
    for path in list(root.iterdir()):
        match = LEFTOVER.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            yield path, int(match[2] or 0)


def _remove(folder: Path) -> None:
    """Remove the files that a save writes, and the folder unless it has others."""
    for file in folder.iterdir():
        if SAVED_FILE.fullmatch(file.name) and file.is_file():
            file.unlink()
    with suppress(OSError):
        folder.rmdir()


def to_keep(checkpoints: list[Checkpoint], args: CheckpointArgs) -> list[Checkpoint]:
    """Those of the checkpoints, newest first, that options and marks keep, each once."""
    evals = [c for c in checkpoints if args.eval.every > 0 and c.step % args.eval.every == 0]
    keep = checkpoints[: args.dump.keep] if args.dump.keep > 0 else list(checkpoints)
    keep += [c for c in checkpoints if set(marks(c.path)) - {BEST}]
    keep += evals[: args.eval.keep] if args.eval.keep > 0 else evals
    if args.keep_every > 0:
        keep += [c for c in checkpoints if c.step % args.keep_every == 0]
    keep += best(checkpoints) if args.keep_best else []
    return [c for c in checkpoints if c in keep]


def best(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """The one with the lowest held-out loss, the first published of equals; none where no step was
    measured when it was saved."""

    measured = []
    for checkpoint in checkpoints:
        with suppress(UserError):  # damaged: it is none to keep
            loss = read_state(checkpoint).held_out
            if loss is not None:
                measured.append((loss, checkpoint.serial, checkpoint))
    return [min(measured)[2]] if measured else []


def _mark_best(root: Path, checkpoints: list[Checkpoint]) -> None:
    lowest = [mark_file(c.path, BEST) for c in best(checkpoints)]
    for file in root.glob(f"*.{BEST}"):
        if STEP_FOLDER.fullmatch(file.stem) and file.is_file() and file not in lowest:
            file.unlink()
    for file in lowest:
        file.touch()


def marks(path: Path) -> list[str]:
    """The names that the checkpoint `path` is marked with. One with any is never pruned, but for
    that of the best, which `prune` itself puts where it belongs."""
    return sorted(
        name
        for file in path.parent.glob(f"{path.name}.*")
        if MARK.fullmatch(name := file.suffix[1:]) and file.is_file()
    )


def mark_file(path: Path, name: str) -> Path:
    """The file that marks the checkpoint `path`: while it exists, the checkpoint is kept. Raises
    UserError for a name that no mark has."""
    if not MARK.fullmatch(name):
        raise UserError(f'mark "{name}": must be letters, digits, - and _, a letter first')
    return path.parent / f"{path.name}.{name}"
