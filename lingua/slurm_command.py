"""Slurm's commands, as ranks in a job and `lingua.stool` call them."""

import subprocess

from lingua.errors import UserError


def run_slurm(*command: str, stdin: str | None = None) -> str:
    """The output of one of Slurm's commands. Raises UserError with its message."""
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(
            f"{command[0]}: no such command here; Slurm must be installed and on the PATH "
            "(launcher=local runs a job without it)"
        ) from None
    if done.returncode:
        message = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise UserError(f"{command[0]}: {'; '.join(message.splitlines())}")
    return done.stdout
