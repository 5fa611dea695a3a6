"""Locks between processes, also of several machines that share a file system.

A lock is a file that names its holder, which renews the file's date. The lock of a holder that died
is taken over: at once where it ran on this machine, else after LIFETIME_S in which this process has
not seen the date change, so that clocks may differ. A holder that is stopped for longer than that
loses its lock to another machine, and `Lock.check` raises; on its own machine it keeps it.
"""

import logging
import math
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lingua.base.errors import UserError

LIFETIME_S = 60.0
POLL_S = 0.1
logger = logging.getLogger(__name__)
# A lock's file: its holder, where and when that process started, and a random part.
_CONTENT = re.compile(r"(process (\d{1,9}) on [\w.-]+), (\S+ \d+), [0-9a-f]{16}\n", re.ASCII)


class Lock:
    """A lock that this process has, unless it lost it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = False
        self._created_at = time.monotonic()
        self._seen = -math.inf, -math.inf  # when its file was last there, once that lasts
        self._mutex = threading.Lock()  # of threads that create it again
        host = re.sub(r"[^\w.-]", "-", socket.gethostname(), flags=re.ASCII)
        place = _place(os.getpid()) or f"unknown {os.getpid()}"  # without Linux's /proc
        self.content = f"process {os.getpid()} on {host}, {place}, {secrets.token_hex(8)}\n"

    def create(self) -> bool:
        """Whether there was no such file, so that this process has the lock now."""
        try:
            file = open(self.path, "xb")  # noqa: SIM115, closed below
        except FileExistsError:
            return False
        try:
            with file:
                file.write(self.content.encode())
        except OSError:  # a full disk: an empty file would be a lock too
            self.path.unlink()
            raise
        return True

    def is_held(self) -> bool:
        """Whether this process still has the lock. Reads its file, or creates it again where it was
        removed and no other process can have had the lock since."""
        with suppress(OSError), self._mutex:  # out of reach for a while
            try:
                self.lost = self.lost or read_lock(self.path)[0] != self.content
            except FileNotFoundError:
                passed_s = max(b - a for a, b in zip(self._seen, _clocks(), strict=True))
                late = passed_s > LIFETIME_S / 2
                self.lost = late or not self.path.parent.is_dir() or not self.create()
                if not self.lost:
                    logger.warning(f"{self.path} was removed: its process, {os.getpid()}, goes on")
            # Of many that take over a dead lock at once, one more may have created its file.
            if time.monotonic() - self._created_at > LIFETIME_S / 60:
                self._seen = _clocks()
        return not self.lost

    def check(self) -> None:
        """Raise UserError if this process has lost the lock."""
        if not self.is_held():
            now = f"is held by {owner} now" if (owner := holder(self.path)) else "is gone"
            why = f"it was removed or not renewed for {LIFETIME_S:.0f} s (was its process stopped?)"
            then = "nothing more is written here; the same command continues once it is free"
            raise UserError(f"{self.path} {now}: {why}; {then}")


def _clocks() -> tuple[float, float]:
    """Seconds. One stands still while the machine is suspended, the other may be set."""
    return time.monotonic(), time.time()


@contextmanager
def claimed(path: Path, may_take: Callable[[str], bool] = lambda _: False) -> Iterator[Lock | None]:
    """Hold the lock file `path` if it is free, or if `may_take` its content; yields None if not."""
    lock = Lock(path)
    if not ((is_free(path) or _taken(path, may_take)) and lock.create()):
        yield None
        return
    done = threading.Event()

    def renew() -> None:
        while not done.wait(LIFETIME_S / 4):
            with suppress(OSError):
                if lock.is_held():
                    os.utime(path)

    thread = threading.Thread(target=renew, name="lock", daemon=True)
    thread.start()
    try:
        yield lock
    finally:
        done.set()
        thread.join()
        with suppress(OSError):
            if lock.is_held():
                path.unlink()


@contextmanager
def exclusive(
    path: Path,
    report: Callable[[str], None],
    patient: bool = False,
    may_take: Callable[[str], bool] = lambda _: False,
) -> Iterator[Lock]:
    """Hold the lock file `path`, or raise UserError where a living process does. With `patient`,
    wait until it is free. `report` gets one line if this has to wait. Where `may_take` the content
    of the file, its holder loses the lock."""
    first = None  # what the file was at first sight
    while True:
        with claimed(path, may_take) as lock:
            if lock is not None:
                yield lock
                return
        with suppress(FileNotFoundError):  # released meanwhile
            seen, owner = read_lock(path), holder(path)
            if not patient and (first not in (None, seen) or runs_here(seen[0])):
                raise UserError(f"{path} is held by {owner}, which is running")
            if first is None:
                limit = "" if patient else f" up to {LIFETIME_S:.0f} s to see whether that runs"
                report(f"{path} is held by {owner}: waiting{limit}")
                first = seen
        time.sleep(POLL_S)


def is_free(path: Path) -> bool:
    """Whether no process holds the lock. The file of a holder that died is removed."""
    try:
        seen = read_lock(path)
    except FileNotFoundError:
        _sightings.pop(path, None)
        return True
    runs = runs_here(seen[0])
    if runs is None:
        now = time.monotonic()
        if _sightings.get(path, (None, now))[0] != seen:
            _sightings[path] = seen, now
        runs = now - _sightings[path][1] <= LIFETIME_S
    if not runs:
        _remove(path, seen[0])
    return not runs


def _taken(path: Path, may_take: Callable[[str], bool]) -> bool:
    """Whether the lock's file is removed, since `may_take` its content."""
    with suppress(FileNotFoundError):
        if may_take(content := read_lock(path)[0]):
            _remove(path, content)
            return True
    return False


def holder(path: Path) -> str | None:
    """The process that holds the lock: `process 17 on node-3`; None if there is no lock."""
    with suppress(FileNotFoundError):
        match = _CONTENT.fullmatch(read_lock(path)[0])
        return match[1] if match else "an unknown process"
    return None


# ---- the file

Sighting = tuple[str, int]  # content and date (ns) of a lock's file
# Locks of other machines: what their files were last, and since when (time.monotonic).
_sightings: dict[Path, tuple[Sighting, float]] = {}


def read_lock(path: Path) -> Sighting:
    """Opening the file, unlike stat, asks a file server for what it is now. A FIFO is empty."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        content = os.read(descriptor, 1000).decode(errors="replace")
        return content, os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def runs_here(content: str) -> bool | None:
    """Whether the holder runs; None if this process cannot know: another machine, another user."""
    match, this_place = _CONTENT.fullmatch(content), _place(os.getpid())
    if match is None or this_place is None or match[3].split()[0] != this_place.split()[0]:
        return None
    pid, place = int(match[2]), match[3]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process, whose place may be hidden
        return None
    return _place(pid) == place


def _place(pid: int) -> str | None:
    """This machine since it started, its processes as this one numbers them, and when the process
    started, since numbers are used again. None if it does not run, or that cannot be known."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbering = os.stat("/proc/self/ns/pid").st_ino
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return None if state in "ZX" else f"{boot}-{numbering} {fields[18]}"
    return None


def _remove(path: Path, content: str) -> None:
    """Remove the file of a holder that died; not that of a process which took the lock since."""
    moved = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with suppress(FileNotFoundError):
        path.rename(moved)
        if read_lock(moved)[0] != content:
            with suppress(OSError):  # a third one has it
                os.link(moved, path)
        moved.unlink()
