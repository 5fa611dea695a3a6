"""Other programs, for measurements that need processes of their own."""

import shlex
import subprocess

from lingua.errors import UserError


def run(command: list[str]) -> None:
    """Run `command` without showing what it says, except as the UserError when it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise UserError(f"{shlex.join(command)}\nleft with exit code {done.returncode}:\n{said}")
