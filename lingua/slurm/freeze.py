"""The code of a run, copied when it is launched, with its commit and its uncommitted changes.

The copy has the files that git lists: tracked ones, and untracked ones that are not ignored, unless
they may be a secret or are larger than code is.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from itertools import count
from pathlib import Path

from lingua.errors import UserError
from lingua.format import human_bytes

# Untracked files and folders that are not copied, where others could read them.
SECRET = re.compile(
    r"\.env(\..*)?|\.netrc|_netrc|\.aws|\.ssh|\.gnupg|\.kube|\.docker|\.pypirc|\.git-credentials"
    r"|\.?(credentials?|secrets?|tokens?)(\.(?!py$).*)?|id_(rsa|dsa|ecdsa|ed25519).*"
    r"|.*\.(pem|key|p12|pfx|jks|kdbx|ovpn)",
    re.IGNORECASE,
)
MOST_BYTES = 1 << 20  # of an untracked file that is copied
MOST_SHOWN = 20  # files in one line
CODE = "code"
COMMIT, DIFF = f"{CODE}.commit", f"{CODE}.diff"


def freeze_code(module_file: Path, dump_dir: Path, report: Callable[[str], None]) -> Path:
    """Copy the checkout that contains `module_file` to `dump_dir/code`, which must not exist.

    `code.commit` names the commit, `code.diff` has the uncommitted changes of tracked files. What
    is in the dump dir is not copied. For a module inside such a copy, the copy is copied. `report`
    gets a line about the untracked files. Files and folders keep their modes. Raises UserError
    where there is no checkout.
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
    untracked, left_out = _sort_untracked(root)
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    diff = _git(root, "diff", "--binary", "HEAD")
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
            more = f" and {len(names) - MOST_SHOWN:,} more" if len(names) > MOST_SHOWN else ""
            report(f"untracked files that are {what}: {', '.join(names[:MOST_SHOWN])}{more}")
    (dump_dir / COMMIT).write_bytes(commit)
    (dump_dir / DIFF).write_bytes(diff)
    return code


def code_version(file: Path) -> str | None:
    """The commit of the code that `file` belongs to, with `-dirty` where tracked files differ from
    it. It is that of the checkout, or of the copy's launch; None where there is neither."""
    for former in file.absolute().parents:
        if former.name == CODE and (commit := former.with_name(COMMIT)).exists():
            dirty = former.with_name(DIFF).stat().st_size > 0
            return commit.read_text().strip() + ("-dirty" if dirty else "")
    try:
        options = ("--always", "--dirty", "--abbrev=40", "--exclude=*")  # no tags
        shown = _git(file.parent, "--no-optional-locks", "describe", *options)
    except UserError:
        return None
    return os.fsdecode(shown).strip()


def move_away(path: Path) -> None:
    """Rename what an earlier launch wrote to `path.1`, or to the first number that is free."""
    if os.path.lexists(path):
        free = next(n for n in count(1) if not os.path.lexists(f"{path}.{n}"))
        path.rename(f"{path}.{free}")


def _sort_untracked(root: Path) -> tuple[list[str], list[str]]:
    """(files that may be copied, what is to be reported of each of the others)."""
    copied, left_out = [], []
    for name in _list(root, "--others", "--exclude-standard"):
        if not (root / name).is_file():  # a checkout of its own, a link to nothing
            continue
        size = (root / name).stat().st_size
        if any(SECRET.fullmatch(part) for part in Path(name).parts):
            left_out.append(f"{name} (may be a secret)")
        elif size > MOST_BYTES:
            left_out.append(f"{name} ({human_bytes(size)})")
        else:
            copied.append(name)
    return copied, left_out


def _list(root: Path, *options: str) -> list[str]:
    """Files that git lists, by their path in the checkout."""
    return [os.fsdecode(f) for f in _git(root, "ls-files", "-z", *options).split(b"\0") if f]


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
