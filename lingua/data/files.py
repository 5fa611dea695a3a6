"""The text of a source: which files it consists of, and the documents in them.

A source `name` is `<root_dir>/<name>`, a folder or a file, or `<name>.jsonl` or `<name>.txt` there.
Of a folder every file counts, at any depth, in the byte order of the relative paths; names that
begin with a dot and __pycache__ do not. A .jsonl file gives a document per line (key `text`, or
else `content`), every other file is one document. `stdlib` is the running Python's standard
library: every .py file that is not empty, except tests and installed packages.

Documents are UTF-8 and taken as they are, carriage returns included; only a byte order mark at the
start of a file is left out. Lines of .jsonl may end with carriage return and newline.
"""

import io
import json
import os
import stat
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lingua.errors import UserError, nearest

STDLIB = "stdlib"
_NOT_MODULES = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_NOT_TEXT = {".gz", ".zst", ".bz2", ".xz", ".zip", ".parquet", ".arrow"}
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class TextFile:
    """A file of a source as it was found."""

    path: str  # relative to the source's folder, with "/"
    full: str
    size: int
    mtime_ns: int


class Record(NamedTuple):
    """A document of a file, or what is wrong with it."""

    line: int
    n_read: int  # bytes of the file
    data: bytes  # the text in UTF-8, empty where something is wrong
    text: str
    wrong: str = ""  # the kind of fault
    detail: str = ""


def find_files(name: str, root_dir: Path) -> list[TextFile]:
    """The files of source `name`, in the same order on every machine. Raises UserError."""
    if name == STDLIB:
        folder = Path(sysconfig.get_path("stdlib"))
        if (root_dir / STDLIB).exists():
            raise UserError(
                f"data.sources.{STDLIB}: means the standard library of Python; rename "
                f"{root_dir / STDLIB} to use it"
            )
        files = _walk(folder, _NOT_MODULES)
        files = [file for file in files if file.path.endswith(".py") and file.size]
    else:
        folder = _find_source(name, root_dir)
        files = _walk(folder, set()) if folder.is_dir() else [_text_file(folder, folder.name)]
    if not files:
        raise UserError(f"data.sources.{name}: {folder} holds no files")
    for file in files:
        if Path(file.path).suffix.lower() in _NOT_TEXT:
            raise UserError(
                f"data.sources.{name}: {file.full} cannot be read; must be .jsonl, or text"
            )
    return sorted(files, key=lambda file: os.fsencode(file.path))


def _find_source(name: str, root_dir: Path) -> Path:
    tried = [root_dir / f"{name}{suffix}" for suffix in ("", ".jsonl", ".txt")]
    found = [path for path in tried if path.exists()]
    if len(found) == 1:
        return found[0]
    if found:
        both = " and ".join(map(str, found))
        raise UserError(f"data.sources.{name}: {both} both exist; must be one of them")
    known = [STDLIB]
    if root_dir.is_dir():
        entries = [path.name for path in root_dir.iterdir() if not path.name.startswith(".")]
        known += [entry.removesuffix(".jsonl").removesuffix(".txt") for entry in entries]
    raise UserError(
        f"data.sources.{name}: there is no {tried[0]}, nor with .jsonl or .txt"
        f"{nearest(name, known)}"
    )


def _walk(folder: Path, without: set[str]) -> list[TextFile]:
    files = []
    visited = set()  # links may lead in a circle
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=_raise):
        here = os.stat(parent)
        if (here.st_dev, here.st_ino) in visited:
            folders.clear()
            continue
        visited.add((here.st_dev, here.st_ino))
        folders[:] = sorted(
            f for f in folders if f[0] != "." and f != "__pycache__" and f not in without
        )
        for name in names:
            full = Path(parent, name)
            if not name.startswith(".") and stat.S_ISREG(full.stat().st_mode):
                files.append(_text_file(full, full.relative_to(folder).as_posix()))
    return files


def _raise(error: OSError) -> None:
    raise error


def _text_file(full: Path, path: str) -> TextFile:
    found = full.stat()
    return TextFile(path, str(full), found.st_size, found.st_mtime_ns)


def read_records(
    file: BinaryIO, path: str, source: str, on_bytes: Callable[[bytes], Any]
) -> Iterator[Record]:
    """Every record of the open `file` whose name is `path`. `on_bytes` sees all bytes in order."""
    if path.lower().endswith(".jsonl"):
        return _json_lines(file, on_bytes)
    return _whole_file(file, source == STDLIB, on_bytes)


def _whole_file(
    file: BinaryIO, is_python: bool, on_bytes: Callable[[bytes], Any]
) -> Iterator[Record]:
    read = file.read()
    on_bytes(read)
    data = read.removeprefix(_BOM)
    try:
        if is_python:  # a module may declare another encoding
            encoding, _ = tokenize.detect_encoding(io.BytesIO(read).readline)
            text = read.decode(encoding)
            data = text.encode()
        else:
            text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        detail = f"{error.reason} 0x{error.object[error.start]:02x}"
        yield Record(line, len(read), b"", "", "not UTF-8", detail)
        return
    yield Record(1, len(read), data, text, "" if data else "empty document")


def _json_lines(file: BinaryIO, on_bytes: Callable[[bytes], Any]) -> Iterator[Record]:
    for number, line in enumerate(file, start=1):
        on_bytes(line)
        record = line.removeprefix(_BOM) if number == 1 else line
        text, wrong, detail = _text_of(record)
        data = b""
        if not wrong:
            try:
                data = text.encode()
            except UnicodeEncodeError as error:  # "\ud800" is JSON, but no text
                lone = f"\\u{ord(text[error.start]):04x} alone"
                text, wrong, detail = "", "not UTF-8", lone
        yield Record(number, len(line), data, text, wrong, detail)


def _text_of(line: bytes) -> tuple[str, str, str]:
    """(text, what is wrong, details) of one line of JSON."""
    try:
        decoded = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return "", "not UTF-8", f"byte {error.start + 1} is 0x{line[error.start]:02x}"
    if not decoded.strip():
        return "", "blank line", ""
    try:
        record = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        return "", "not JSON", str(error)
    if not isinstance(record, dict):
        return (
            "",
            "no text",
            f"a {type(record).__name__}, not an object with a text",
        )
    key = next((key for key in ("text", "content") if key in record), None)
    if key is None:
        return "", "no text", f"neither key text nor content, but {', '.join(record) or 'none'}"
    text = record[key]
    if text is None:
        return "", "null text", f"key {key}"
    if not isinstance(text, str):
        return "", "text is not a string", f"key {key} is {json.dumps(text)[:40]}"
    return text, "" if text else "empty document", ""
