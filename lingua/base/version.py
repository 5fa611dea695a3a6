"""The version of this library, and the commit of code that runs."""

import os
import subprocess
from pathlib import Path

from lingua.base.dump_dir import CODE, CODE_COMMIT, CODE_DIFF
from lingua.base.errors import UserError

__version__ = "0.1.0"


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
