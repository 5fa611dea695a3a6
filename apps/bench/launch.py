"""Other programs, for measurements that need processes of their own."""

import shlex
import subprocess

from lingua.errors import UserError


def run(command: list[str]) -> None:
    """Run `command` without showing its output. UserError with the end of it where it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        output = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise UserError(f"{shlex.join(command)}\nhas exit code {done.returncode}:\n{output}")
