"""Locks of other processes, and of another machine, for tests."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ELSEWHERE = "process 5 on node-2, 0b5ef3bc-4026531836 777, 0123456789abcdef\n"

HOLD = """
import sys, time
from pathlib import Path
from lingua.base.lock import claimed
with claimed(Path(sys.argv[1])) as lock:
    print("held" if lock else "not free", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@contextmanager
def hold_lock(path: Path, seconds: float = 100) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock."""
    command = [sys.executable, "-c", HOLD, str(path), str(seconds)]
    repo = Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=repo, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def lose(path: Path) -> None:
    """Let a process of another machine take the lock over."""
    path.unlink()
    path.write_text(ELSEWHERE)
