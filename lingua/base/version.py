"""The version of this library, and the commit of code that runs."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from lingua.base.dump_dir import CODE, CODE_COMMIT, CODE_DIFF
from lingua.base.errors import UserError

__version__ = "0.1.0"

SOURCES = (".py", ".c", ".cpp", ".cu", ".cuh", ".h")  # files that are code


def code_version(file: Path) -> str | None:
    """The commit of the code that `file` belongs to, with `-dirty` where tracked files differ from
    it. It is that of the checkout, or of the copy's launch; None where there is neither."""
    for parent in file.absolute().parents:
        if parent.name == CODE and (commit := parent.with_name(CODE_COMMIT)).exists():
            dirty = parent.with_name(CODE_DIFF).stat().st_size > 0
            return commit.read_text().strip() + ("-dirty" if dirty else "")
    try:
        options = ("--always", "--dirty", "--abbrev=40", "--exclude=*")  # no tags
        shown = run_git(file.parent, "--no-optional-locks", "describe", *options)
    except UserError:
        return None
    return os.fsdecode(shown).strip()


def code_hash(*modules: str) -> str:
    """A hash of the source files of imported modules, of their names and content. A package counts
    with all files in its folder, lingua without its tools; another module counts with the modules
    beside it that are imported."""
    hashed = hashlib.blake2b(digest_size=6)
    for module in dict.fromkeys(modules):
        file = Path(str(sys.modules[module].__file__))
        if file.name == "__init__.py":
            files = {path for path in file.parent.rglob("*") if path.suffix in SOURCES}
            files -= set((file.parent / "tools").rglob("*")) if module == "lingua" else set()
        else:
            paths = (getattr(other, "__file__", None) for other in list(sys.modules.values()))
            files = {Path(path) for path in paths if path and Path(path).parent == file.parent}
        for path in sorted(files):
            name = f"{module}/{path.relative_to(file.parent).as_posix()}"
            hashed.update(hashlib.blake2b(name.encode()).digest())
            hashed.update(hashlib.blake2b(path.read_bytes()).digest())
    return hashed.hexdigest()


def run_git(folder: Path, *arguments: str) -> bytes:
    """The output of a git command. Raises UserError."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", b"").decode(errors="replace").strip() or error
        raise UserError(
            f"{folder}: git {arguments[0]} fails ({why}); the code of a run is copied from a git "
            "checkout with at least one commit"
        ) from None
