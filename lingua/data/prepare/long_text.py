"""Lines and files too long to be held in memory, and the text in them.

What is longer than LONG bytes goes to a nameless temporary file. Its text is then read in blocks,
twice: once to check and hash it, once to tokenize it. Of a long line of JSON everything but its
long strings is parsed as usual; they stay in the file until one of them turns out to be the text.
"""

import codecs
import json
import re
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import orjson
import xxhash

LONG = 2**24  # bytes of a line or file that are still held in memory
BLOCK = 2**20
ELIDED = 2**12  # JSON strings of a long line that are longer stay in the file


def split_lines(blocks: Iterator[bytes], scratch: Path) -> Iterator[bytes | BinaryIO]:
    """The lines of the blocks without their newline; a long one as a file that holds it, which
    takes its space in the folder `scratch`."""
    rest, long = b"", None
    for block in blocks:
        begin = 0
        while (end := block.find(b"\n", begin)) >= 0:
            if long is None:
                yield rest + block[begin:end]
            else:
                long.write(block[begin:end])
                yield long
            rest, long = b"", None
            begin = end + 1
        if long is None:
            rest += block[begin:]
        else:
            long.write(block[begin:])
        if len(rest) > LONG:
            long, rest = file_of(rest, scratch), b""
    if long is not None:
        yield long
    elif rest:
        yield rest


def gathered(blocks: Iterator[bytes], scratch: Path) -> bytes | BinaryIO:
    """All of the blocks together; a file, at its start, if they are long."""
    data: list[bytes] = []
    size = 0
    for block in blocks:
        data.append(block)
        size += len(block)
        if size > LONG:
            file = file_of(b"".join(data), scratch)
            for more in blocks:
                file.write(more)
            file.seek(0)
            return file
    return b"".join(data)


def file_of(data: bytes, scratch: Path) -> BinaryIO:
    file = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 - closed with its last text
    file.write(data)
    return file


class LongText:
    """Text that lies in a file. Iterating gives it in blocks, in order."""

    def __init__(self, file: BinaryIO, begin: int = 0, end: int | None = None, json: bool = False):
        """UTF-8 in bytes `begin` to `end` of the file; the inside of a JSON string if `json`."""
        self._file, self._begin, self._json = file, begin, json
        self._end = file.seek(0, 2) if end is None else end

    def __iter__(self) -> Iterator[str]:
        return self._json_blocks() if self._json else self._plain_blocks()

    def measure(self) -> tuple[int, int]:
        """(bytes in UTF-8, their hash). UnicodeError, ValueError where it is no text, no JSON."""
        n_bytes, content = 0, xxhash.xxh3_64()
        for block in self:
            data = block.encode()
            n_bytes += len(data)
            content.update(data)
        return n_bytes, content.intdigest()

    def line_of_fault(self) -> int:
        """The line of a plain text that is not UTF-8."""
        line = 1
        try:
            for block in self:
                line += block.count("\n")
        except UnicodeDecodeError as error:
            line += error.object.count(b"\n", 0, error.start)
        return line

    def _plain_blocks(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        for block in _blocks(self._file, self._begin, self._end):
            yield decoder.decode(block)
        yield decoder.decode(b"", final=True)

    def _json_blocks(self) -> Iterator[str]:
        rest = b""
        for block in _blocks(self._file, self._begin, self._end):
            whole = rest + block
            cut = _whole_characters(whole)
            yield _unescaped(whole[:cut])
            rest = whole[cut:]
        yield _unescaped(rest)


def _blocks(file: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    while begin < end:
        file.seek(begin)  # others may read the file meanwhile
        block = file.read(min(BLOCK, end - begin))
        begin += len(block)
        yield block


# ---- JSON

_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
# Characters and whole escapes. A high surrogate is whole with what follows it, if that is one.
_WHOLE_ESCAPES = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89abAB]).{4}|\\u[dD][89abAB].{2}(?:\\u.{4}|(?!\\).|\\[^u]))*+",
    re.DOTALL,
)


def elided_json(file: BinaryIO) -> tuple[bytes, dict[str, LongText]]:
    """(the line with its long strings replaced by short marks, the text that each mark is for)."""
    mark, texts = secrets.token_hex(8), {}
    kept, kept_to = [], 0
    size = file.seek(0, 2)
    for begin, end in _strings(file, size):
        if end - begin > ELIDED:
            name = f"{mark}-{len(texts)}"
            texts[name] = LongText(file, begin, end, json=True)
            kept += [*_blocks(file, kept_to, begin), name.encode()]
            kept_to = end
    kept += _blocks(file, kept_to, size)
    return b"".join(kept), texts


def _strings(file: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of what stands between the quotes of every string."""
    opened: int | None = None
    at, here = 0, 0  # where the block begins, and what of it comes next
    for block in _blocks(file, 0, size):
        while here < len(block):
            if opened is None:
                quote = block.find(b'"', here)
                if quote < 0:
                    here = len(block)
                else:
                    here = quote + 1
                    opened = at + here
                continue
            end = _IN_STRING.match(block, here).end()
            if end == len(block):
                here = end
            elif block[end : end + 1] == b'"':
                yield opened, at + end
                opened, here = None, end + 1
            else:  # a backslash ends the block: past it and what it escapes
                here = end + 2
        here -= len(block)
        at += len(block)


def _whole_characters(data: bytes) -> int:
    """Up to where the inside of a JSON string can be cut without parting a character or escape."""
    cut = _WHOLE_ESCAPES.match(data).end()
    if len(data) - cut > 12:  # no escape is that long: it is wrong, and will be refused
        return len(data)
    for back in range(1, min(4, cut + 1)):
        byte = data[cut - back]
        if byte >= 0xC0:  # begins a character of 2 to 4 bytes
            length = 2 + (byte >= 0xE0) + (byte >= 0xF0)
            return cut - back if length > back else cut
        if byte < 0x80:
            return cut
    return cut


def _unescaped(data: bytes) -> str:
    string = b'"' + data + b'"'
    try:
        return orjson.loads(string)
    except orjson.JSONDecodeError:
        text = json.loads(string.decode())  # which tells what is wrong
        text.encode()
        return text
