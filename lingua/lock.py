"""Locks between processes, also of several machines that share a file system."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path

from flufl.lock import Lock, LockError, LockState, NotLockedError, TimeOutError

from lingua.errors import UserError

# A holder renews its claim four times in this time; one that died on another machine is waited for
# this long. Losing a lock while alive (a suspended machine) costs double work, never wrong data.
LIFETIME = timedelta(seconds=60)
CLOCK_SLOP = timedelta(seconds=10)  # that clocks of machines may differ, flufl.lock's own

# It logs every wait that times out as an error; waiting is reported here.
logging.getLogger("flufl.lock").setLevel(logging.CRITICAL)


@contextmanager
def locked(path: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock file `path`; `report` gets one line if it has to be waited for."""
    told = False
    for wait_s in waits():
        with claimed(path) as mine:
            if mine:
                yield
                return
        if not told and (owner := holder(path)):
            report(f"waiting for {owner}, which holds {path}")
            told = True
        time.sleep(wait_s)


def waits() -> Iterator[float]:
    """Seconds to wait before each further look at what others do: short at first, then 2."""
    wait_s = 0.02
    while True:
        yield wait_s
        wait_s = min(2.0, 1.5 * wait_s)


@contextmanager
def exclusive(path: Path, report: Callable[[str], None], patient: bool = False) -> Iterator[None]:
    """Hold the lock file `path`, or raise UserError where a living process does; `patient` waits
    until that is done.

    A lock whose owner has died is taken over: at once where this machine knows of its death, else
    (it ran elsewhere, or another process has its number now) after it was silent for a lifetime.
    """
    lock, first = _lock(path), None
    for wait_s in waits():
        if _try(lock, timedelta(seconds=5 if path.exists() else 0)):  # as in `claimed`
            break
        with suppress(FileNotFoundError):  # given back meanwhile
            claim = lock.expiration
            if first is None:
                report(f"{path} is held by {holder(path)}: waiting to see whether that still runs")
                first = claim
            if claim != first and not patient:
                raise UserError(f"{holder(path)} is at work there: it holds {path}")
        time.sleep(wait_s)
    with _held(lock):
        yield


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether the lock file `path` was free, and is held now."""
    lock = _lock(path)
    if not is_free(path):
        yield False
        return
    # To break a dead owner's lock takes another round, which begins after up to 2 s.
    if not _try(lock, timedelta(seconds=5 if path.exists() else 0)):
        yield False
        return
    with _held(lock):
        yield True


def is_free(path: Path) -> bool:
    """Whether nobody holds the lock; of an owner on another machine it is known by its silence."""
    lock = _lock(path)
    with suppress(FileNotFoundError):  # given back meanwhile
        if lock.state is LockState.unknown:
            return lock.expiration + CLOCK_SLOP < datetime.now()
        return lock.state in (LockState.unlocked, LockState.stale)
    return True


def is_claim(path: Path) -> bool:
    """Whether a file is that of a process which tries to get a lock just now: it is dated ahead,
    and the process is not one of this machine that has died."""
    if ".lock|" not in path.name:
        return False
    with suppress(FileNotFoundError):
        ahead = path.stat().st_mtime + CLOCK_SLOP.seconds > time.time()
        return ahead and _lock(path).state is not LockState.stale  # it names its process as a lock
    return False


def holder(path: Path) -> str | None:
    """Whose lock it is: `process 17 on node-3`."""
    with suppress(NotLockedError):
        host, pid, _ = _lock(path).details
        return f"process {pid} on {host}"
    return None


def _lock(path: Path) -> Lock:
    return Lock(str(path), lifetime=LIFETIME)


def _try(lock: Lock, patience: timedelta) -> bool:
    with suppress(OSError):
        if lock.state is LockState.stale:  # its owner, a process of this machine, has died
            os.utime(lock.lockfile, (0, 0))  # expired long ago: lock() may break it
    try:
        lock.lock(timeout=patience)
        return True
    except TimeOutError:
        return False


@contextmanager
def _held(lock: Lock) -> Iterator[None]:
    """Renew the lock in the background, and give it back in the end."""
    done = threading.Event()

    def renew() -> None:
        while not done.wait(LIFETIME.total_seconds() / 4):
            with suppress(LockError, OSError):
                lock.refresh()

    thread = threading.Thread(target=renew, name="lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with suppress(LockError, OSError):
            lock.unlock()
