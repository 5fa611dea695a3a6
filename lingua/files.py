"""Files that are on the disk when they are closed."""

import io
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

AT_ONCE = 32 << 20  # bytes written before their write-back to the disk is started


class SyncedFile(io.FileIO):
    """A new file, written sequentially. Writing back to the disk starts while the file is written,
    and is complete when `close` returns."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self.size = 0  # bytes written
        self._started = 0  # bytes whose write-back was started

    def write(self, data: Any) -> int:
        n = super().write(memoryview(data)[:AT_ONCE])
        self.size += n
        if self.size - self._started >= AT_ONCE:
            with suppress(AttributeError, OSError):  # not every system supports it
                # For dirty pages, Linux starts the write-back.
                waiting = self.size - self._started
                os.posix_fadvise(self.fileno(), self._started, waiting, os.POSIX_FADV_DONTNEED)
            self._started = self.size
        return n

    def close(self) -> None:
        if self.closed:
            return
        try:
            os.fsync(self.fileno())
        finally:
            super().close()


def open_synced(path: Path) -> io.BufferedWriter:
    """A new file, which is on the disk once it is closed."""
    return io.BufferedWriter(SyncedFile(path))


def sync_folder(folder: Path) -> None:
    """Let what was created and renamed in a folder outlast a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Other processes see the old file or the whole new one."""
    temporary = path.with_name(f"{path.name}{temporary_suffix()}")
    with open_synced(temporary) as file:
        file.write(text.encode())
    os.replace(temporary, path)


def temporary_suffix() -> str:
    """Marks what this process is still writing; no two processes of a file system share it."""
    return f".tmp-{socket.gethostname()}-{os.getpid()}"
