"""The code of a run, copied when it is launched, with its commit and its uncommitted changes.

The copy has the files that git lists: tracked ones, and untracked ones that are not ignored, unless
they may be a secret or are larger than code is.
"""

import os
import re
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

from lingua.base.dump_dir import CODE, CODE_COMMIT, CODE_DIFF
from lingua.base.format import human_bytes
from lingua.base.version import run_git

# Untracked files and folders that are not copied, where others could read them.
SECRET = re.compile(
    r"\.env(\..*)?|\.netrc|_netrc|\.aws|\.ssh|\.gnupg|\.kube|\.docker|\.pypirc|\.git-credentials"
    r"|\.?(credentials?|secrets?|tokens?)(\.(?!py$).*)?|id_(rsa|dsa|ecdsa|ed25519).*"
    r"|.*\.(pem|key|p12|pfx|jks|kdbx|ovpn)",
    re.IGNORECASE,
)
MAX_FILE_BYTES = 1 << 20  # a larger untracked file is not copied
MAX_NAMED = 20  # file names in a line of the log


def freeze_code(module_file: Path, dump_dir: Path, report: Callable[[str], None]) -> Path:
    """Copy the checkout that contains `module_file` to `dump_dir/code`, which must not exist.

    `code.commit` names the commit, `code.diff` has the uncommitted changes of tracked files. What
    is in the dump dir is not copied. For a module inside such a copy, the copy is copied. `report`
    gets a line about the untracked files. Files and folders keep their modes. Raises UserError
    where there is no checkout.
    """
    code = dump_dir / CODE
    for copied in module_file.absolute().parents:
        if copied.name == CODE and copied.with_name(CODE_COMMIT).exists():
            dump_dir.mkdir(parents=True, exist_ok=True)
            for name in (CODE_COMMIT, CODE_DIFF):
                shutil.copy2(copied.with_name(name), dump_dir / name)
            no_caches = shutil.ignore_patterns("__pycache__")
            return Path(shutil.copytree(copied, code, symlinks=True, ignore=no_caches))
    root = Path(os.fsdecode(run_git(module_file.parent, "rev-parse", "--show-toplevel")[:-1]))
    untracked, left_out = _sort_untracked(root)
    commit = run_git(root, "rev-parse", "--verify", "HEAD")
    diff = run_git(root, "diff", "--binary", "HEAD")
    code.mkdir(mode=0o700, parents=True)
    folders = {Path()}
    for name in _list(root, "--cached") + untracked:
        source, target = root / name, code / name
        if source.is_relative_to(dump_dir):
            continue
        if source.is_symlink() or source.is_file():  # not deleted, nor the folder of a submodule
            for folder in reversed(Path(name).parents):
                (code / folder).mkdir(mode=0o700, exist_ok=True)
                folders.add(folder)
            shutil.copy2(source, target, follow_symlinks=False)
    for folder in sorted(folders, reverse=True):  # last: a folder may be read-only
        shutil.copymode(root / folder, code / folder)
    for what, names in (("copied too", untracked), ("not copied", left_out)):
        if names:
            more = f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else ""
            report(f"untracked files that are {what}: {', '.join(names[:MAX_NAMED])}{more}")
    (dump_dir / CODE_COMMIT).write_bytes(commit)
    (dump_dir / CODE_DIFF).write_bytes(diff)
    return code


def move_away(path: Path) -> None:
    """Rename what an earlier launch wrote to `path.1`, or to the first number that is free."""
    if os.path.lexists(path):
        free = next(n for n in count(1) if not os.path.lexists(f"{path}.{n}"))
        path.rename(f"{path}.{free}")


def _sort_untracked(root: Path) -> tuple[list[str], list[str]]:
    """(files that may be copied, what is to be reported of each of the others)."""
    copied, left_out = [], []
    for name in _list(root, "--others", "--exclude-standard"):
        if not (root / name).is_file():  # a nested checkout or a broken link
            continue
        size = (root / name).stat().st_size
        if any(SECRET.fullmatch(part) for part in Path(name).parts):
            left_out.append(f"{name} (may be a secret)")
        elif size > MAX_FILE_BYTES:
            left_out.append(f"{name} ({human_bytes(size)})")
        else:
            copied.append(name)
    return copied, left_out


def _list(root: Path, *options: str) -> list[str]:
    """Files that git lists, by their path in the checkout."""
    return [os.fsdecode(f) for f in run_git(root, "ls-files", "-z", *options).split(b"\0") if f]
