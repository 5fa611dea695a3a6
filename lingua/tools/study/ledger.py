"""The ledger of a study, `ledger.jsonl`: what was decided before runs started, and what came of it.
It only grows. Each line has the hash of the one before, and `ledger.head` the number of lines and
the last hash, so that a line that was changed, removed or added by hand is found."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from lingua.base.errors import UserError
from lingua.base.files import append_whole, load_json, read_bytes, write_atomically
from lingua.base.lock import Lock, exclusive

LEDGER, HEAD, LOCK = "ledger.jsonl", "ledger.head", "study.lock"

Line = dict[str, Any]


def hash_of(values: Line) -> str:
    """A hash of values of JSON, 32 hexadecimal digits."""
    text = orjson.dumps(values, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(text, digest_size=16).hexdigest()


class Ledger:
    """The lines so far; `append` adds one, inside of `writing` alone."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError where the folder has none."""
        self.folder, self.path = folder, folder / LEDGER
        self._lock: Lock | None = None
        self._read()

    def _read(self) -> None:
        try:
            whole, _, self._torn = read_bytes(self.path).rpartition(b"\n")  # by a kill
        except OSError as error:
            why = f"is no study ({error.strerror or error}); `lingua study new` makes one"
            raise UserError(f"{self.folder}: {why}") from None
        self.lines: list[Line] = []
        self.problems: list[str] = []  # what does not fit together
        hashes = [""]
        for number, text in enumerate(whole.splitlines(), 1):
            line: Line = {}
            with suppress(ValueError):
                line = load_json(self.path, text)
            kept = {key: value for key, value in line.items() if key != "hash"}
            if line.get("previous") != hashes[-1] or hash_of(kept) != line.get("hash"):
                self.problems.append(f"{self.path}:{number}: was changed, or lines before it were")
                return
            hashes.append(line["hash"])
            self.lines.append(line)
        head: Line = {}
        with suppress(OSError, ValueError):
            head = load_json(self.folder / HEAD)
        n, found = head.get("lines", 0), len(self.lines)
        # A process may have been killed before it wrote the head of its last line.
        if found not in (n, n + 1) or hashes[n] != head.get("hash", ""):
            self.problems.append(f"{self.path}: has {found} lines, and {HEAD} is of {n}")

    @contextmanager
    def writing(self, report: Callable[[str], None]) -> Iterator[None]:
        """Wait until no other process writes, read what it has written, and allow `append`. Raises
        UserError where the ledger was changed."""
        with exclusive(self.folder / LOCK, report, patient=True) as self._lock:
            self._read()
            if self.problems:
                raise UserError("; ".join(self.problems))
            if self._torn:
                with open(self.path, "r+b") as file:
                    file.truncate(file.seek(0, 2) - len(self._torn))
            if self.lines:
                self._write_head()  # an earlier process may have been killed before it did
            yield

    def append(self, kind: str, **values: Any) -> Line:
        """Add a line. Raises UserError where that fails, or the lock is lost."""
        if self._lock is not None:
            self._lock.check()
        now = datetime.now(UTC).isoformat(timespec="seconds")
        previous = self.lines[-1]["hash"] if self.lines else ""
        values = {"kind": kind, **values, "at": now, "previous": previous}
        line: Line = orjson.loads(orjson.dumps(values))  # as it is read: infinity is null
        line["hash"] = hash_of(line)
        try:
            append_whole(self.path, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written: {error}") from None
        self.lines.append(line)
        self._write_head()
        return line

    def _write_head(self) -> None:
        head = {"lines": len(self.lines), "hash": self.lines[-1]["hash"]}
        try:
            write_atomically(self.folder / HEAD, json.dumps(head))
        except OSError as error:
            raise UserError(f"{self.folder / HEAD}: cannot be written: {error}") from None

    def of(self, kind: str, **values: Any) -> list[Line]:
        """The lines of a kind that have these values."""
        return [x for x in self.lines if {"kind": kind, **values}.items() <= x.items()]

    def verdict(self, number: int) -> Line | None:
        """That of a try; None: it is not decided."""
        return next(iter(self.of("verdict", **{"try": number})), None)
