"""Another implementation of the training program: one file of Python, by which an audit computes
steps in a process that cannot import lingua."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lingua.base.errors import UserError
from lingua.base.files import read_bytes
from lingua.parallel.signals import StopRequest

POLL_S = 0.05
TAIL_BYTES = 1 << 16  # of what the file prints, whose last line is shown
REFUSED = 2  # exit code for a config that the file does not implement
# Isolated (-I), Python has neither the folder that it runs in nor PYTHONPATH among its paths. An
# installed lingua is found even so, unless its name is taken.
PROGRAM = """
import runpy, sys
sys.modules["lingua"] = sys.modules["apps"] = None
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Implementation:
    """A file that is called as `FILE CONFIG.yaml`, resumes from the newest checkpoint in the
    `dump_dir` of that config, trains up to its `stop_at`, and writes what the training program
    does."""

    file: str  # as it was given
    sha256: str

    @classmethod
    def read(cls, file: str) -> "Implementation":
        """Raises UserError where there is no such file."""
        try:
            return cls(file, hashlib.sha256(read_bytes(Path(file))).hexdigest())
        except OSError as error:
            why = error.strerror or "must be a file"
            raise UserError(f"by = {file}: cannot be read: {why}") from None

    def __str__(self) -> str:
        return f"{self.file} (sha256 {self.sha256[:12]})"

    def train(self, config: Path, output: IO[str]) -> str | None:
        """Run the file, which prints to `output`. Returns the name of the signal that ended this,
        if one did. Raises UserError where the file fails or refuses."""
        command = [sys.executable, "-I", "-c", PROGRAM, self.file, str(config)]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        with (
            StopRequest() as stop,
            subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that it ends with all that it has started
            ) as process,
        ):
            try:
                while process.poll() is None and stop.signal is None:
                    time.sleep(POLL_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if stop.signal is None and process.returncode:
            raise UserError(f"{self.file}: {_failure(process.returncode, Path(output.name))}")
        return stop.signal


def _failure(code: int, output: Path) -> str:
    """How a process ended that has this exit code, and the last line that it has printed."""
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
    if code == REFUSED:
        return last.removeprefix("error: ")
    ended = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    return f"ended with {ended}: {last}"
