"""A lock on a folder for one builder at a time, also between machines on a shared file system."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from flufl.lock import Lock, LockError, LockState, NotLockedError, TimeOutError

# A holder renews its claim four times in this time; one that died on another machine is waited for
# this long. Losing a lock while alive (a suspended machine) costs double work, never wrong data.
LIFETIME = timedelta(seconds=60)

# It logs every wait that times out as an error; waiting is reported here.
logging.getLogger("flufl.lock").setLevel(logging.CRITICAL)


@contextmanager
def locked(path: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock file `path`; `report` gets one line if it has to be waited for."""
    lock = Lock(str(path), lifetime=LIFETIME)
    _acquire(lock, report)
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


def _acquire(lock: Lock, report: Callable[[str], None]) -> None:
    told = False
    while True:
        if lock.state is LockState.stale:  # its owner, a process of this machine, has died
            with suppress(OSError):
                os.utime(lock.lockfile, (0, 0))  # expired long ago: lock() may break it
        try:
            lock.lock(timeout=timedelta(seconds=1))
            return
        except TimeOutError:
            with suppress(NotLockedError):
                host, pid, _ = lock.details
                if not told:
                    report(f"waiting for process {pid} on {host}, which holds {lock.lockfile}")
                    told = True
