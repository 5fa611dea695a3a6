"""The code of a run, copied when it is launched, with its commit and its uncommitted changes.

The copy has the tracked files of the checkout. Of the others it has the Python files of the
packages that the job imports, unless they have the name of a secret, and what the user names.
"""

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import reduce
from itertools import count
from operator import and_
from pathlib import Path

from lingua.base.dump_dir import CODE, CODE_COMMIT, CODE_DIFF
from lingua.base.errors import UserError
from lingua.base.files import temporary, write_atomically
from lingua.base.version import run_git

# Names of untracked files and folders that are not copied, where others could read them.
SECRET = re.compile(
    r"\.env(\..*)?|.*\.env|\.(netrc|npmrc|pypirc|pgpass|htpasswd|boto|s3cfg|dockercfg)|_netrc"
    r"|\.(aws|azure|ssh|gnupg|kube|docker)|kube\.?config.*|\.git-credentials|id_(rsa|dsa|ecdsa|ed25519).*"
    r"|(.*[._-])?(credentials?|secrets?|passwords?|passwd|token|api[._-]?keys?|service[._-]?account)"
    r"([._-].*)?|tokens(\.(?!py$).*)?|.*\.(pem|key|p12|pfx|jks|kdbx|ovpn|ppk|keystore)",
    re.IGNORECASE,
)
MAX_NAMED = 20  # file names in a line of the log
IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    print(importlib.import_module(name).__file__)
"""


def freeze_code(
    module_file: Path,
    dump_dir: Path,
    names: Sequence[str],
    copy: Sequence[str],
    config: Sequence[str],
    report: Callable[[str], None],
) -> Path:
    """Copy the checkout that contains `module_file` to `dump_dir/code`; an earlier copy is moved
    away.

    `code.commit` names the commit, `code.diff` has the uncommitted changes of tracked files. What
    is in the dump dir is not copied. For a module inside such a copy, the copy is copied. `report`
    gets a line about the untracked files. Files and folders keep their modes, and nobody can read
    `code.diff` who cannot read every file that it quotes.

    Args:
        names: the modules that the job imports; untracked Python files of their packages, and of
            apps and lingua, are copied.
        copy: other untracked files and folders to copy, by their paths from the current folder.
        config: the files of the configuration, copied where they are in the checkout.

    Raises UserError where there is no checkout, where it does not have what `copy` names, and where
    a module cannot be imported from the copy. Nothing is written then.
    """
    frozen = [
        parent
        for parent in module_file.absolute().parents
        if parent.name == CODE and parent.with_name(CODE_COMMIT).exists()
    ]
    if frozen:
        root = frozen[0]
        commit, diff = (root.with_name(name).read_bytes() for name in (CODE_COMMIT, CODE_DIFF))
        diff_mode = root.with_name(CODE_DIFF).stat().st_mode & 0o666
    else:
        root = Path(os.fsdecode(run_git(module_file.parent, "rev-parse", "--show-toplevel")[:-1]))
        commit = run_git(root, "rev-parse", "--verify", "HEAD")
        diff = run_git(root, "diff", "--binary", "HEAD")
        quoted = _names(run_git(root, "diff", "--name-only", "--no-renames", "-z", "HEAD"))
        diff_mode = reduce(and_, (_readable(root, name) for name in quoted), 0o666)
    for path in copy:
        if not (Path(path).exists() and Path(path).resolve().is_relative_to(root.resolve())):
            raise UserError(
                f"copy: {path}: must be a file or folder in {root}, whose code is copied"
            )
    code = temporary(dump_dir / CODE)
    try:
        code.mkdir(mode=0o700, parents=True)  # files have their modes once they are copied
        if frozen:
            no_caches = shutil.ignore_patterns("__pycache__")
            shutil.copytree(root, code, symlinks=True, ignore=no_caches, dirs_exist_ok=True)
        else:
            packages = {"apps", "lingua", *(name.partition(".")[0] for name in names)}
            copied, left_out = _sort_untracked(root, packages, copy, config)
            _copy_files(root, dump_dir, code, _list(root, "--cached") + copied)
            for what, files in (("copied too", copied), ("not copied", left_out)):
                if files:
                    more = f" and {len(files) - MAX_NAMED:,} more" if files[MAX_NAMED:] else ""
                    report(f"untracked files that are {what}: {', '.join(files[:MAX_NAMED])}{more}")
            _check_imports(root, code, names)
        for name in (CODE, CODE_COMMIT, CODE_DIFF):
            move_away(dump_dir / name)
        write_atomically(dump_dir / CODE_COMMIT, commit)
        write_atomically(dump_dir / CODE_DIFF, diff, diff_mode)
        return code.rename(dump_dir / CODE)
    except BaseException:
        shutil.rmtree(code, ignore_errors=True)
        with suppress(OSError):
            dump_dir.rmdir()  # unless it has something else
        raise


def _readable(root: Path, name: str) -> int:
    """The bits of a mode by which a file of the checkout, or one that was there, can be read and
    written: its own, for those who may enter every folder on its path."""
    mode = 0o666
    for path in (root / name, *(root / parent for parent in Path(name).parents)):
        with suppress(FileNotFoundError):
            found = path.lstat().st_mode
            mode &= (found & 0o111) * 6 if stat.S_ISDIR(found) else found
    return mode | stat.S_IRUSR | stat.S_IWUSR


def _copy_files(root: Path, dump_dir: Path, code: Path, names: Sequence[str]) -> None:
    folders = {Path()}
    for name in names:
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


def _check_imports(root: Path, code: Path, names: Sequence[str]) -> None:
    """Raise UserError where a module cannot be imported from the copy, as the job will."""
    path = os.pathsep.join(filter(None, [str(code), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", IMPORT, *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    files = dict(zip(names, done.stdout.splitlines()[-len(names) :], strict=False))
    outside = [
        f"{name} is imported from {file}"
        for name, file in files.items()
        if Path(file).is_relative_to(root) and not Path(file).is_relative_to(code)
    ]
    if done.returncode or outside:
        why = outside[0] if outside else "".join(done.stderr.splitlines()[-1:])
        raise UserError(
            f"{' and '.join(names)} cannot be imported from the copy of the code: {why}; it has "
            "tracked files, untracked *.py of these packages, and what copy=[FILE, FOLDER] names"
        )


def move_away(path: Path) -> None:
    """Rename what an earlier launch wrote to `path.1`, or to the first number that is free."""
    if os.path.lexists(path):
        free = next(n for n in count(1) if not os.path.lexists(f"{path}.{n}"))
        path.rename(f"{path}.{free}")


def _sort_untracked(
    root: Path, packages: set[str], copy: Sequence[str], config: Sequence[str]
) -> tuple[list[str], list[str]]:
    """(files to copy, what is to be reported of each of the others)."""
    inside = [os.path.relpath(Path(path).resolve(), root.resolve()) for path in (*copy, *config)]
    inside = [path for path in inside if not path.startswith("..")]
    named = _list(root, "--others", "--", *inside) if inside else []  # ignored ones too
    copied, left_out = [], []
    for name in dict.fromkeys([*named, *_list(root, "--others", "--exclude-standard")]):
        path = Path(name)
        if not (root / name).is_file():  # a nested checkout or a broken link
            continue
        is_code = path.suffix == ".py" and path.parts[0].removesuffix(".py") in packages
        if any(SECRET.fullmatch(part) for part in path.parts) and name not in inside[: len(copy)]:
            left_out.append(f"{name} (may be a secret)")
        elif is_code or name in named:
            copied.append(name)
        else:
            left_out.append(name)
    return copied, left_out


def _list(root: Path, *options: str) -> list[str]:
    """Files that git lists, by their path in the checkout."""
    return _names(run_git(root, "ls-files", "-z", *options))


def _names(shown: bytes) -> list[str]:
    """The names that git prints with -z."""
    return [os.fsdecode(name) for name in shown.split(b"\0") if name]
