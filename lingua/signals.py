"""Signals that ask a run to stop set a flag.

Ranks share the flag at the next step boundary, where the run can be saved. Only work that can be
interrupted anywhere is interrupted by the handler itself (`at_once`), on rank 0 also for a signal
that another rank received.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch.distributed as dist

STOPPING = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
INSIST_S = 2.0  # one Ctrl-C can arrive twice, since torchrun forwards it; a later one exits


class Stopped(BaseException):
    """Raised by a signal inside `at_once`. No handler of an Exception catches it."""


class StopRequest:
    """Catches SIGUSR2, SIGTERM and SIGINT until `close`."""

    def __init__(self) -> None:
        self.signal: str | None = None  # name of the first one received
        self._process = os.getpid()
        self._interrupted_at: float | None = None
        self._raising = False
        self._share: Callable[[str], None] | None = None
        self._former = {number: signal.signal(number, self._receive) for number in STOPPING}
        take_signals()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            os._exit(128 + number)  # a process that a library forked, and now wants to end
        self.signal = self.signal or signal.Signals(number).name
        if self._share is not None:
            self._share(self.signal)
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is None:
                self._interrupted_at = now
            elif now - self._interrupted_at >= INSIST_S:
                os._exit(128 + signal.SIGINT)  # without a clean-up that could wait for a rank
        if self._raising:
            self._raising = False  # a second signal must not interrupt the clean-up
            raise Stopped

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside it a signal raises Stopped in the main thread, also one received before."""
        if self.signal is not None:
            raise Stopped
        self._raising = True
        try:
            yield
        finally:
            self._raising = False

    @contextmanager
    def passed_to_rank_0(self) -> Iterator[None]:
        """Inside it rank 0 also receives the signals of other ranks, former ones included. Entered
        by every rank, while rank 0 works and the others wait without a collective."""
        store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
        key = f"lingua/stop/{store.add(f'lingua/stop/calls_of_{rank}', 1)}"
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.2):
                if store.check([key]):
                    number = signal.Signals[store.get(key).decode()]
                    signal.pthread_kill(threading.main_thread().ident, number)
                    return

        watcher = threading.Thread(target=watch)
        if rank == 0:
            watcher.start()
        else:
            self._share = lambda name: store.set(key, name)
            if self.signal is not None:
                self._share(self.signal)
        try:
            yield
        finally:
            self._share = None
            done.set()
            if rank == 0:
                watcher.join()

    def close(self) -> None:
        """Restore the former handlers."""
        for number, handler in self._former.items():
            signal.signal(number, handler)


def take_signals() -> None:
    """Unblock the stop signals, which `exec_program` blocks."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def exec_program(argv: list[str]) -> None:
    """Replace this process by a program, which then receives Slurm's signals itself.

    Stop signals are blocked until the program calls `take_signals` (StopRequest does): they would
    end it in the seconds that its imports take.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    os.execv(argv[0], argv)
