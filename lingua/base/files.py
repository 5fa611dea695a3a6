"""Files that are on the disk when they are closed, and reading files of any origin."""

import errno
import io
import json
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from lingua.base.errors import UserError

WRITEBACK_BYTES = 32 << 20  # bytes written before their write-back to the disk is started


class SyncedFile(io.FileIO):
    """A new file, written sequentially. Writing back to the disk starts while the file is written,
    and is complete when `close` returns. A link is not followed. The umask restricts `mode`."""

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        super().__init__(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))
        self.size = 0  # bytes written
        self._started = 0  # bytes whose write-back has been started

    def write(self, data: Any) -> int:
        n = super().write(memoryview(data)[:WRITEBACK_BYTES])
        self.size += n
        if self.size - self._started >= WRITEBACK_BYTES:
            with suppress(AttributeError, OSError):  # not every system supports it
                n_dirty = self.size - self._started  # Linux starts their write-back
                os.posix_fadvise(self.fileno(), self._started, n_dirty, os.POSIX_FADV_DONTNEED)
            self._started = self.size
        return n

    def close(self) -> None:
        if self.closed:
            return
        try:
            os.fsync(self.fileno())
        finally:
            super().close()


def open_synced(path: Path, mode: int = 0o666) -> io.BufferedWriter:
    """A new file, which is on the disk once it is closed."""
    return io.BufferedWriter(SyncedFile(path, mode))


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to the disk: new names then outlast a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Other processes see the old file or the whole new one, which keeps the old one's mode; where
    there is none, it has `mode`. Raises OSError; no other file is left then."""
    old_mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    new = temporary(path)
    try:
        with open_synced(new, mode if old_mode is None else old_mode) as file:
            if old_mode is not None:
                with suppress(OSError):  # a file system may have no such modes
                    os.fchmod(file.fileno(), old_mode)  # also what the umask denies
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(new, path)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        new.unlink(missing_ok=True)  # unless it has taken the place


def append_whole(path: Path, data: bytes) -> None:
    """Append to a file, in one write to the operating system. Raises OSError where the disk is
    full; the file is then as before."""
    with open(path, "ab", buffering=0) as file:
        end = file.tell()
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise


def temporary(path: Path) -> Path:
    """A name beside `path`, which nobody can foresee, for what is still being written or is being
    removed."""
    return path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")


def file_size(path: Path) -> int:
    """Bytes of a file. Raises OSError, also for a folder, a pipe or a device: those have no end, or
    wait for another program."""
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise OSError(f"{path.name} is not a file")
    return info.st_size


def read_bytes(path: Path) -> bytes:
    """The content of a file. Raises OSError, also where `file_size` does."""
    file_size(path)
    return path.read_bytes()


def read_into(descriptor: int, memory: memoryview, at: int) -> int:
    """Fill `memory` with the bytes of an open file from `at` on, of which there may be fewer.
    Returns how many. Raises OSError."""
    done = 0
    while done < len(memory) and (n := os.preadv(descriptor, [memory[done:]], at + done)):
        done += n
    return done


def load_json(path: Path, text: bytes | None = None) -> dict[str, Any]:
    """The JSON object in a file, whose `text` may be known; numbers that are not finite are None.
    Raises OSError or ValueError."""
    try:
        text = read_bytes(path) if text is None else text
        content = json.loads(text, parse_constant=lambda name: None)
        json.dumps(content, ensure_ascii=False).encode()  # a lone surrogate is no character
        level: list[Any] = [[content]]
        for _ in range(100):
            values = (v.values() if isinstance(v, dict) else v for v in level)
            level = [v for inner in values for v in inner if isinstance(v, dict | list)]
        if level:
            raise RecursionError
    except RecursionError:
        raise ValueError("it has too many levels") from None
    if not isinstance(content, dict):
        raise ValueError("it must be a JSON object")
    return content


def read_json(path: Path, text: bytes | None = None) -> dict[str, Any]:
    """Read a JSON object, as `load_json` does. Raises UserError, which names the file."""
    try:
        return load_json(path, text)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None
