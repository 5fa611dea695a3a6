"""Signals that ask a run to stop set a flag, and are acknowledged at once.

Ranks share the flag at the next step boundary, where the run can be saved. Only work that can be
interrupted anywhere is interrupted by the handler itself (`at_once`).
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lingua.base.errors import UserError
from lingua.parallel.environment import detect_launch, restarts_in_torchrun

STOPPING = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
INSIST_S = 2.0  # one Ctrl-C can arrive twice, since torchrun forwards it; a later one exits

logger = logging.getLogger(__name__)
# A forked process must not write its signals into the pipe of this one.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


class Stopped(BaseException):
    """Raised by a signal inside `at_once`. No handler of an Exception catches it."""


class StopRequest:
    """A context that catches SIGUSR2, SIGTERM, SIGINT and SIGHUP. SIGHUP stays ignored where nohup
    made it so.

    Python runs a handler between two operations of the main thread, and one collective may take
    minutes. So the system also writes each signal into a pipe, which a thread reads: it logs each
    kind once with `note`, and exits by an interrupt that comes INSIST_S after another or later.
    """

    def __init__(self, note: str = "") -> None:
        self.signal: str | None = None  # name of the first signal received
        self.received: set[str] = set()  # names of all
        self.note = self._first_note = note  # what the run does about a signal
        self._process = os.getpid()
        self._raising = False
        hangup = signal.getsignal(signal.SIGHUP)
        caught = [n for n in STOPPING if n != signal.SIGHUP or hangup != signal.SIG_IGN]
        self._previous_handlers = {n: signal.signal(n, self._receive) for n in caught}
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._previous_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._watcher = threading.Thread(target=self._watch, args=(reader,), daemon=True)
        self._watcher.start()
        take_signals()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            os._exit(128 + number)  # in a process that a library forked, and now ends
        self.signal = self.signal or signal.Signals(number).name
        self.received.add(signal.Signals(number).name)
        if self._raising:
            self._raising = False  # a second signal must not interrupt the clean-up
            raise Stopped

    def _watch(self, reader: int) -> None:
        noted: set[int] = set()
        interrupted_at: float | None = None
        while number := os.read(reader, 1)[0]:  # `__exit__` writes 0
            if number not in self._previous_handlers:
                continue
            name = signal.Signals(number).name
            self.signal = self.signal or name
            self.received.add(name)
            starting = self.note == self._first_note  # there is nothing to save
            if starting and number == signal.SIGTERM and restarts_in_torchrun():
                os._exit(128 + number)  # torchrun waits for it, to start it with other ranks
            if number == signal.SIGINT:
                now = time.monotonic()
                interrupted_at = interrupted_at or now
                if now - interrupted_at >= INSIST_S:
                    os._exit(128 + signal.SIGINT)  # without a clean-up that could wait for a rank
            if self.note and number not in noted:
                noted.add(number)
                again = f"; press Ctrl-C again after {INSIST_S:.0f} s to leave now"
                text = f"{name}: {self.note}{again if number == signal.SIGINT else ''}"
                # In a thread of its own: a console that does not take it must not hold up this one.
                threading.Thread(target=logger.info, args=(text,), daemon=True).start()
        os.close(reader)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside it a signal raises Stopped in the main thread, also one received before."""
        self._raising = True
        try:
            if self.signal is not None:
                raise Stopped
            yield
        finally:
            self._raising = False

    def __enter__(self) -> "StopRequest":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A launcher ends all ranks when one fails: those that fail with it must still say why.
        failed = isinstance(error, Exception) and not isinstance(error, UserError)
        if failed and detect_launch().world_size > 1:
            return
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        os.write(self._writer, b"\0")
        self._watcher.join()
        os.close(self._writer)


def take_signals() -> None:
    """Unblock the stop signals, which a batch script of `lingua stool` blocks: they would end the
    program in the seconds that its imports take."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
