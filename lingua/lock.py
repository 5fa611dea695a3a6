"""Locks between processes, also of several machines that share a file system.

A lock is a file (of the flufl.lock library) whose date is in the future: when it expires. Its
holder renews it. The lock of a holder that died is taken over: at once where it ran on this
machine, else when it has expired. To lose a lock while alive (a suspended machine) costs double
work, never wrong data.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flufl.lock import Lock, LockError, LockState, NotLockedError, TimeOutError

from lingua.errors import UserError

LIFETIME_S = 60
CLOCK_SLOP_S = 10  # that clocks of machines may differ, flufl.lock's own
POLL_S = 0.1

# It logs every attempt that times out as an error.
logging.getLogger("flufl.lock").setLevel(logging.CRITICAL)


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Hold the lock file `path` if it is free; yields whether it is held."""
    lock = _acquire(path)
    if lock is None:
        yield False
        return
    done = threading.Event()

    def renew() -> None:
        while not done.wait(LIFETIME_S / 4):
            with suppress(LockError, OSError):
                lock.refresh()

    thread = threading.Thread(target=renew, name="lock", daemon=True)
    thread.start()
    try:
        yield True
    finally:
        done.set()
        thread.join()
        with suppress(LockError, OSError):
            lock.unlock()


@contextmanager
def exclusive(path: Path, report: Callable[[str], None], patient: bool = False) -> Iterator[None]:
    """Hold the lock file `path`, or raise UserError where a living process does: one that renews
    it. With `patient`, wait until it is free. `report` gets one line if the lock is held."""
    first = None  # when the lock expires, at first sight
    while True:
        with claimed(path) as is_held:
            if is_held:
                yield
                return
        with suppress(FileNotFoundError):  # released meanwhile
            expires, owner = path.stat().st_mtime, holder(path)
            if first is None:
                what = "" if patient else " to see whether that is still running"
                report(f"{path} is held by {owner}: waiting{what}")
                first = expires
            if expires != first and not patient:
                raise UserError(f"{path} is held by {owner}, which is running")
        time.sleep(POLL_S)


def is_free(path: Path) -> bool:
    """Whether no process holds the lock, or its holder died."""
    with suppress(FileNotFoundError):  # released meanwhile
        is_expired = path.stat().st_mtime + CLOCK_SLOP_S < time.time()
        return is_expired or Lock(str(path)).state in (LockState.unlocked, LockState.stale)
    return True


def holder(path: Path) -> str | None:
    """The process that holds the lock: `process 17 on node-3`."""
    with suppress(NotLockedError):
        host, pid, _ = Lock(str(path)).details
        return f"process {pid} on {host}"
    return None


def _acquire(path: Path) -> Lock | None:
    """The lock, if it is free."""
    if not is_free(path):
        return None
    lock, exists = Lock(str(path), LIFETIME_S), path.exists()
    with suppress(OSError):
        if lock.state is LockState.stale:  # its holder, a process of this machine, has died
            os.utime(path, (0, 0))  # expired: flufl.lock may break it
    try:
        # To break a dead holder's lock takes a second round, which begins after up to 2 s.
        lock.lock(timeout=5 if exists else 0)
    except TimeOutError:
        return None
    return lock
