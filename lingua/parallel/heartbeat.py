"""Where this rank is, which it writes to the store, on any device, where there are several. By it
lingua.parallel.failure names the ranks that others wait for: one that is stopped writes nothing."""

import time
from collections.abc import Callable

import torch.distributed as dist

BEAT_S = 2.0  # seconds between two writes
# Seconds after which a thread looks which ranks are late, beyond those that a collective waits:
# gloo has raised an error by then. NCCL's watchdog aborts the process, later, by ABORT_S.
LOOK_S, ABORT_S = 10.0, 45.0
FIRST = "lingua/first_failure"


class Heartbeat:
    """Of this process in one process group. `lingua.parallel.rendezvous.watch` starts it."""

    def __init__(self) -> None:
        self.patience_s = float("inf")  # seconds that a collective waits
        # calls of `at`, which all ranks make in the same order; the last one, and when it was
        self.place = 0, 0, "start", time.monotonic()
        self.failed = ""  # the rank that failed first, once this one knows it
        self.group: Callable[[], object] = object  # that in which it beats, kept by torch alone
        self.store: dist.Store
        self.keys: list[str] = []  # of each rank, in the store
        self.rank, self.main = 0, 0  # this rank, and the number of its main thread
        # with replicas: saves this rank's part of a copy of the run, and returns a line about it
        self.save_part: Callable[[], str] | None = None

    def at(self, step: int, phase: str) -> None:
        """State where this rank is. Called by every rank, in the same order."""
        self.place = self.place[0] + 1, step, phase, time.monotonic()

    def is_beating(self) -> bool:
        """Whether this rank is one of several, which it has not left."""
        return dist.is_initialized() and self.group() is dist.group.WORLD

    def wait(self) -> bool:
        """Wait for the next write. Returns `is_beating`; ends early where this rank leaves."""
        end = time.monotonic() + BEAT_S
        while (beating := self.is_beating()) and time.monotonic() < end:
            time.sleep(0.1)
        return beating

    def first_failure(self) -> str:
        """The rank that failed first; an empty string where none has. It may have the store, which
        ends with its process: so ranks ask in advance, and once."""
        if not self.failed and self.store.check([FIRST]):
            self.failed = self.store.get(FIRST).decode(errors="replace")
        return self.failed
