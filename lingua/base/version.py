"""The version of this library, and the commit of code that runs."""

import hashlib
import os
import subprocess
import sys
from contextlib import suppress
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
    """A hash of the names and content of source files: of a package all in its folder, lingua.tools
    left out, of another module the imported ones beside it."""
    imported = [str(getattr(module, "__file__", None)) for module in list(sys.modules.values())]
    hashed = hashlib.blake2b(digest_size=6)
    for module in dict.fromkeys(modules):
        file = Path(str(sys.modules[module].__file__))
        files = {path for path in map(Path, imported) if path.parent == file.parent}
        if file.name == "__init__.py":
            files = {path for path in file.parent.rglob("*") if path.suffix in SOURCES}
        for path in sorted(files):
            name = f"{module}/{path.relative_to(file.parent).as_posix()}"
            if not name.startswith("lingua/tools/"):
                hashed.update(hashlib.blake2b(name.encode()).digest())
                with suppress(FileNotFoundError):  # a checkout may change meanwhile
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
