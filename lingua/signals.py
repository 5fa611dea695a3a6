"""Asking a run to stop: the signals of people, schedulers and operating systems set a flag.

The loop shares the flag among all ranks at the next step boundary, where the run can be saved
whole. Only work that may be left anywhere is left `at_once`, by the handler itself, and on rank 0
also for what another rank received.
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
IMPATIENCE_S = 2.0  # torchrun passes a terminal's Ctrl-C on, so one press may arrive twice


class Stopped(BaseException):
    """Raised by a signal inside `at_once`; no handler of ordinary errors should swallow it."""


class StopRequest:
    """Catches SIGUSR2, SIGTERM and SIGINT from now until `close`."""

    def __init__(self) -> None:
        self.signal: str | None = None  # name of the first one received
        self._process = os.getpid()
        self._interrupted_at: float | None = None
        self._raising = False
        self._share: Callable[[str], None] | None = None
        self._before = {number: signal.signal(number, self._receive) for number in STOPPING}
        take_signals()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            os._exit(128 + number)  # forked off by some library, which wants it to end
        self.signal = self.signal or signal.Signals(number).name
        if self._share is not None:
            self._share(self.signal)
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is None:
                self._interrupted_at = now
            elif now - self._interrupted_at >= IMPATIENCE_S:
                os._exit(128 + signal.SIGINT)  # a person insists: no clean-up that waits on a rank
        if self._raising:
            self._raising = False  # a second signal must not break off the clean-up
            raise Stopped

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within it a signal, also one received before, raises Stopped where the main thread is."""
        if self.signal is not None:
            raise Stopped
        self._raising = True
        try:
            yield
        finally:
            self._raising = False

    @contextmanager
    def passed_to_rank_0(self) -> Iterator[None]:
        """Within it rank 0 also receives what any other rank does, or did. Entered by every rank;
        for the time that rank 0 works alone and the others wait without a collective."""
        store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
        key = f"lingua/stop/{store.add(f'lingua/stop/calls_of_{rank}', 1)}"
        left = threading.Event()

        def watch() -> None:
            while not left.wait(0.2):
                if store.check([key]):
                    number = signal.Signals[store.get(key).decode()]
                    signal.pthread_kill(threading.main_thread().ident, number)
                    return

        watching = threading.Thread(target=watch)
        if rank == 0:
            watching.start()
        else:
            self._share = lambda name: store.set(key, name)
            if self.signal is not None:
                self._share(self.signal)
        try:
            yield
        finally:
            self._share = None
            left.set()
            if rank == 0:
                watching.join()

    def close(self) -> None:
        """Give the signals back to who handled them before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def take_signals() -> None:
    """Unblock the stop signals; `exec_program` may have blocked them until this program starts."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def exec_program(argv: list[str]) -> None:
    """Make this process the given program: what Slurm signals is then the program itself.

    Stop signals wait until it takes them (StopRequest does), since importing takes seconds in which
    they would end it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    os.execv(argv[0], argv)
