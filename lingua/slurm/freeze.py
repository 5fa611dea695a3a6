"""The code of a run, copied when it is launched, with its commit and its uncommitted changes.

The copy has the files that git lists: tracked ones, and untracked ones that are not ignored.
"""

import os
import shutil
import subprocess
from itertools import count
from pathlib import Path

from lingua.errors import UserError

CODE = "code"
COMMIT, DIFF = f"{CODE}.commit", f"{CODE}.diff"


def freeze_code(module_file: Path, dump_dir: Path) -> Path:
    """Copy the checkout that contains `module_file` to `dump_dir/code`, which must not exist.

    `code.commit` names the commit, `code.diff` has the uncommitted changes of tracked files. What
    is in the dump dir is not copied. For a module inside such a copy, the copy is copied. Raises
    UserError where there is no checkout.
    """
    code = dump_dir / CODE
    for former in module_file.absolute().parents:
        if former.name == CODE and former.with_name(COMMIT).exists():
            dump_dir.mkdir(parents=True, exist_ok=True)
            for name in (COMMIT, DIFF):
                shutil.copy2(former.with_name(name), dump_dir / name)
            no_caches = shutil.ignore_patterns("__pycache__")
            return Path(shutil.copytree(former, code, symlinks=True, ignore=no_caches))
    root = Path(os.fsdecode(_git(module_file.parent, "rev-parse", "--show-toplevel")[:-1]))
    files = _git(root, "ls-files", "-co", "--exclude-standard", "-z").split(b"\0")
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    diff = _git(root, "diff", "--binary", "HEAD")
    code.mkdir(parents=True)
    for name in filter(None, map(os.fsdecode, files)):
        source, target = root / name, code / name
        if source.is_relative_to(dump_dir):
            continue
        if source.is_symlink() or source.is_file():  # not deleted, nor the folder of a submodule
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    (dump_dir / COMMIT).write_bytes(commit)
    (dump_dir / DIFF).write_bytes(diff)
    return code


def move_away(path: Path) -> None:
    """Rename what an earlier launch wrote to `path.1`, or to the first number that is free."""
    if os.path.lexists(path):
        free = next(n for n in count(1) if not os.path.lexists(f"{path}.{n}"))
        path.rename(f"{path}.{free}")


def _git(folder: Path, *arguments: str) -> bytes:
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", b"").decode(errors="replace").strip() or error
        raise UserError(
            f"{folder}: git {arguments[0]} fails ({why}); the code of a run is copied from a git "
            "checkout with at least one commit"
        ) from None
