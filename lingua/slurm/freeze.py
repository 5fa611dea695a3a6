"""The code of a run as it is when the run is launched: a copy, its commit and what differs from it.

The copy holds what git lists: tracked files, and untracked ones that are not ignored.
"""

import os
import shutil
import subprocess
from pathlib import Path

from lingua.errors import UserError

CODE = "code"


def freeze_code(module_file: Path, dump_dir: Path) -> Path:
    """Copy the checkout that `module_file` is in to `dump_dir/code`, which must not exist yet.

    `code.commit` names the commit, `code.diff` holds what differs from it in tracked files. What
    lies in the dump dir itself is left out. Of a module that runs from such a copy already, the
    copy is copied. Raises UserError where there is no checkout.
    """
    for copy in module_file.absolute().parents:
        if copy.name == CODE and copy.with_name(f"{CODE}.commit").exists():
            return _copy_again(copy, dump_dir)
    root = Path(os.fsdecode(_git(module_file.parent, "rev-parse", "--show-toplevel")[:-1]))
    listed = _git(root, "ls-files", "-co", "--exclude-standard", "-z").split(b"\0")
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    changed = _git(root, "diff", "--binary", "HEAD")
    code = dump_dir / CODE
    code.mkdir(parents=True)
    for name in filter(None, map(os.fsdecode, listed)):
        source = root / name
        # Deleted but still tracked; or the folder of a submodule, another repository's.
        if not (source.is_symlink() or source.is_file()) or source.is_relative_to(dump_dir):
            continue
        target = code / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
    (dump_dir / f"{CODE}.commit").write_bytes(commit)
    (dump_dir / f"{CODE}.diff").write_bytes(changed)
    return code


def _copy_again(copy: Path, dump_dir: Path) -> Path:
    dump_dir.mkdir(parents=True, exist_ok=True)
    for name in (f"{CODE}.commit", f"{CODE}.diff"):
        shutil.copy2(copy.with_name(name), dump_dir / name)
    no_caches = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(copy, dump_dir / CODE, symlinks=True, ignore=no_caches))


def move_away(path: Path) -> None:
    """Keep what a former launch wrote under `path` as `path.1`, or the next number that is free."""
    if os.path.lexists(path):
        number = 1
        while os.path.lexists(f"{path}.{number}"):
            number += 1
        path.rename(f"{path}.{number}")


def _git(folder: Path, *words: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=False)
    except FileNotFoundError:
        raise UserError("git is not installed: it lists the files of the code to copy") from None
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(
            f"{folder}: git {words[0]} fails ({why[0] if why else done.returncode}); the code of a "
            "run is copied from a git checkout with at least one commit"
        )
    return done.stdout
