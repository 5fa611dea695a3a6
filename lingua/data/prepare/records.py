"""The documents in a file, whatever its form.

JSON lines (.jsonl) give a document per line, .parquet files one per row, every other file is one
document. .gz and .zst are read as what they hold; a compressed .json is JSON lines, as C4 and Dolma
name them. A large file is read in parts: byte ranges that begin where a line or row group does.

Documents are UTF-8 and taken as they are, carriage returns included; only a byte order mark at the
start of a file is left out. Memory is bounded: see `lingua.data.long_text`.
"""

import io
import json
import tokenize
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from lingua.data.prepare.files import TextFile
from lingua.data.prepare.long_text import (
    LONG,
    LongText,
    elided_json,
    file_of,
    gathered,
    split_lines,
)

BLOCK = 2**18  # bytes read at once
ROWS = 1024  # most parquet rows read at once
_CODECS = {".gz": "gzip", ".zst": "zstd"}
_BOM = b"\xef\xbb\xbf"
DAMAGED = "damaged file"  # the kind of fault that ends a file


@dataclass(frozen=True)
class Part:
    """The bytes of a file that are read together: from a line's or row group's start to another."""

    file: TextFile
    begin: int
    end: int

    @property
    def is_whole(self) -> bool:
        return self.end - self.begin == self.file.size


class Record(NamedTuple):
    """A document, or what is wrong with it."""

    number: int  # line or row, from 1 on where the part begins
    text: str | LongText = ""
    n_bytes: int = 0  # of the text in UTF-8
    hash: int = 0  # of these bytes: 64 bits
    wrong: str = ""  # the kind of fault
    detail: str = ""


def _form(path: str) -> tuple[str, str | None]:
    """("json", "parquet" or "text", codec) of a file by its name."""
    name = Path(path.lower())
    codec = _CODECS.get(name.suffix)
    suffix = name.with_suffix("").suffix if codec else name.suffix
    if suffix == ".jsonl" or (suffix == ".json" and codec):
        return "json", codec
    return ("parquet" if suffix == ".parquet" and not codec else "text"), codec


# ---- parts


def split(file: TextFile, most: int) -> list[Part]:
    """The parts of a file, each of about `most` bytes of text where its form allows."""
    form, codec = _form(file.path)
    cuts = [0]
    if file.size > most and form == "json" and not codec:
        with open(file.full, "rb") as handle:
            cuts = [0, *(_line_start(handle, at) for at in range(most, file.size, most))]
    elif file.size > most and form == "parquet":
        with suppress(pa.ArrowException, OSError):  # reading it will tell
            cuts = _row_group_cuts(pq.read_metadata(file.full), most)
    ends = sorted({*cuts, file.size})
    return [Part(file, begin, end) for begin, end in zip(ends, ends[1:] or [0], strict=False)]


def _line_start(handle: BinaryIO, at: int) -> int:
    """Where the first line starts at `at` or later; the file's end if none does."""
    at -= 1
    handle.seek(at)
    while block := handle.read(2**16):
        if (newline := block.find(b"\n")) >= 0:
            return at + newline + 1
        at += len(block)
    return at


def _row_group_cuts(metadata: pq.FileMetaData, most: int) -> list[int]:
    cuts, size = [0], 0
    for i in range(metadata.num_row_groups):
        size += metadata.row_group(i).total_byte_size
        if size > most and i:
            cuts.append(_group_start(metadata, i))
            size = metadata.row_group(i).total_byte_size
    return cuts


def _group_start(metadata: pq.FileMetaData, i: int) -> int:
    group = metadata.row_group(i)
    columns = [group.column(c) for c in range(group.num_columns)]
    offsets = [(c.dictionary_page_offset, c.data_page_offset) for c in columns]
    return min(offset for pair in offsets for offset in pair if offset) if i else 0


def records_before(part: Part) -> int:
    """How many lines or rows of the file come before the part."""
    if not part.begin:
        return 0
    with open(part.file.full, "rb") as handle:
        if _form(part.file.path)[0] == "json":
            return sum(block.count(b"\n") for block in _blocks(handle, 0, part.begin))
        metadata = pq.read_metadata(handle)
        groups = range(metadata.num_row_groups)
        before = [i for i in groups if _group_start(metadata, i) < part.begin]
        return sum(metadata.row_group(i).num_rows for i in before)


def _blocks(handle: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    handle.seek(begin)
    while begin < end and (block := handle.read(min(BLOCK, end - begin))):
        begin += len(block)
        yield block


def read_part(handle: BinaryIO, part: Part) -> Iterator[bytes]:
    """The part's bytes as they are in the file."""
    return _blocks(handle, part.begin, part.end)


# ---- records


@dataclass(frozen=True)
class TextOptions:
    """What all files of a source have in common."""

    keys: tuple[str, ...]  # of the text, the first that is there
    is_python: bool  # a file may declare its encoding
    scratch: Path  # folder for what is too long to be held in memory


def read_records(
    handle: BinaryIO, part: Part, options: TextOptions, on_bytes: Callable[[bytes], Any]
) -> Iterator[Record]:
    """Every record of a part of the open file. `on_bytes` sees the part's bytes in order."""
    form, codec = _form(part.file.path)
    if form == "parquet":
        return _parquet(handle, part, options, on_bytes)
    blocks = _tapped(read_part(handle, part), on_bytes)
    if codec:
        blocks = _decompressed(blocks, codec)
    if form == "json":
        return _json_lines(blocks, part, options)
    return _whole(blocks, options)


def _tapped(blocks: Iterator[bytes], on_bytes: Callable[[bytes], Any]) -> Iterator[bytes]:
    for block in blocks:
        on_bytes(block)
        yield block


class _Damaged(Exception):
    """The file's bytes are not what its form requires."""


class _Reader:
    """What pyarrow needs of a file to read these blocks from it."""

    closed = False

    def __init__(self, blocks: Iterator[bytes]):
        self._blocks, self._rest = blocks, memoryview(b"")

    def read(self, size: int) -> memoryview:
        block = self._rest or memoryview(next(self._blocks, b""))
        self._rest = block[size:]
        return block[:size]

    def close(self) -> None:
        pass


def _decompressed(blocks: Iterator[bytes], codec: str) -> Iterator[bytes]:
    stream = pa.CompressedInputStream(pa.PythonFile(_Reader(blocks), mode="r"), codec)
    while True:
        try:
            block = stream.read(BLOCK)
        except OSError as error:
            if error.errno is not None:  # of the operating system
                raise
            raise _Damaged(f"as {codec}: {error}") from None
        if not block:
            return
        yield block


def _record(number: int, text: str | LongText) -> Record:
    """The record of a text that was found."""
    if isinstance(text, LongText):
        try:
            n_bytes, text_hash = text.measure()
        except UnicodeDecodeError as error:
            return Record(number, wrong="not UTF-8", detail=_bad_byte(error))
        except UnicodeEncodeError as error:
            return Record(number, wrong="not UTF-8", detail=_lone_surrogate(error))
        except ValueError as error:
            return Record(number, wrong="not JSON", detail=str(error))
        return Record(number, text, n_bytes, text_hash)
    if not text:
        return Record(number, wrong="empty document")
    try:
        data = text.encode()
    except UnicodeEncodeError as error:  # "\ud800" is JSON, but no text
        return Record(number, wrong="not UTF-8", detail=_lone_surrogate(error))
    return Record(number, text, len(data), xxhash.xxh3_64_intdigest(data))


def _bad_byte(error: UnicodeDecodeError) -> str:
    return f"{error.reason} 0x{error.object[error.start]:02x}"


def _lone_surrogate(error: UnicodeEncodeError) -> str:
    return f"\\u{ord(error.object[error.start]):04x} alone"


# ---- text


def _whole(blocks: Iterator[bytes], options: TextOptions) -> Iterator[Record]:
    try:
        data = gathered(blocks, options.scratch)
    except _Damaged as error:
        yield Record(1, wrong=DAMAGED, detail=str(error))
        return
    if not isinstance(data, bytes):
        bom = data.read(len(_BOM)) == _BOM
        text = LongText(data, len(_BOM) if bom else 0)
        record = _record(1, text)
        yield record._replace(number=text.line_of_fault()) if record.wrong else record
        return
    try:
        if options.is_python:  # a module may declare another encoding
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            text = data.decode(encoding)
        else:
            text = data.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        yield Record(line, wrong="not UTF-8", detail=_bad_byte(error))
        return
    yield _record(1, text)


# ---- JSON lines


def _json_lines(blocks: Iterator[bytes], part: Part, options: TextOptions) -> Iterator[Record]:
    number = 0
    try:
        for number, line in enumerate(split_lines(blocks, options.scratch), start=1):
            long: dict[str, LongText] = {}
            if not isinstance(line, bytes):
                line, long = elided_json(line)
            if number == 1 and not part.begin:
                line = line.removeprefix(_BOM)
            yield _json_record(number, line, long, options.keys)
    except _Damaged as error:
        yield Record(number + 1, wrong=DAMAGED, detail=str(error))


def _json_record(
    number: int, line: bytes, long: dict[str, LongText], keys: tuple[str, ...]
) -> Record:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        record, wrong, detail = _lenient_json(line)
        if wrong:
            return Record(number, wrong=wrong, detail=detail)
    if not isinstance(record, dict):
        what = f"a {type(record).__name__}, not an object with a text"
        return Record(number, wrong="no text", detail=what)
    for key in keys:
        if key in record:
            break
    else:
        return Record(number, wrong="no text", detail=_without(keys, "key", record))
    text = record[key]
    if text is None:
        return Record(number, wrong="null text", detail=f"key {key}")
    if not isinstance(text, str):
        detail = f"key {key} is {json.dumps(text)[:40]}"
        return Record(number, wrong="text is not a string", detail=detail)
    return _record(number, long.get(text, text) if long else text)


def _lenient_json(line: bytes) -> tuple[Any, str, str]:
    """(value, what is wrong, details) of what the fast parser refuses: it may be right all the same
    (NaN, a lone surrogate in another key), and this parser tells where it is wrong."""
    try:
        decoded = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return None, "not UTF-8", f"byte {error.start + 1} is 0x{line[error.start]:02x}"
    if not decoded.strip():
        return None, "blank line", ""
    try:
        return json.loads(decoded), "", ""
    except (ValueError, RecursionError) as error:
        return None, "not JSON", str(error)


def _without(keys: tuple[str, ...], what: str, names: Iterable[str]) -> str:
    wanted = f"neither {what} {' nor '.join(keys)}" if len(keys) > 1 else f"no {what} {keys[0]}"
    return f"{wanted}, but {', '.join(names) or 'none'}"


# ---- parquet


def _parquet(
    handle: BinaryIO, part: Part, options: TextOptions, on_bytes: Callable[[bytes], Any]
) -> Iterator[Record]:
    number = 0
    try:
        for block in read_part(handle, part):
            on_bytes(block)
        handle.seek(0)
        # Not more of a column in memory than its pages being read.
        file = pq.ParquetFile(
            handle, pre_buffer=False, buffer_size=BLOCK, page_checksum_verification=True
        )
        for record in _rows(file, part, options):
            number = record.number
            yield record
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the operating system
            raise
        yield Record(number + 1, wrong=DAMAGED, detail=f"as parquet: {error}")


def _rows(file: pq.ParquetFile, part: Part, options: TextOptions) -> Iterator[Record]:
    metadata, schema, keys = file.metadata, file.schema_arrow, options.keys
    starts = [_group_start(metadata, i) for i in range(metadata.num_row_groups)]
    groups = [i for i, start in enumerate(starts) if part.begin <= start < part.end]
    n_rows = sum(metadata.row_group(i).num_rows for i in groups)
    key = next((key for key in keys if key in schema.names), None)
    fault = ()
    if key is None:
        fault = ("no text", _without(keys, "column", schema.names))
    elif not _is_text(kind := schema.field(key).type):
        fault = ("text is not a string", f"column {key} is {kind}")
    if fault:
        for number in range(1, n_rows + 1):
            yield Record(number, wrong=fault[0], detail=fault[1])
        return
    size = sum(metadata.row_group(i).total_byte_size for i in groups)
    rows = max(1, min(ROWS, BLOCK * n_rows // max(1, size)))
    batches = file.iter_batches(rows, row_groups=groups, columns=[key], use_threads=False)
    number = 0
    for batch in batches:
        column = batch.column(0)
        for text in _texts(column, options.scratch):
            number += 1
            yield _parquet_record(number, text, key)


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return any(
        is_kind(kind)
        for is_kind in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    )


def _texts(column: pa.Array, scratch: Path) -> Iterable[str | bytes | LongText | None]:
    """The values; bytes where they may not be UTF-8, which pyarrow does not check."""
    if column.nbytes <= LONG:
        with suppress(UnicodeDecodeError):
            return column.to_pylist()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    values = column.cast(pa.large_binary())
    return (_long_value(value.as_buffer(), scratch) if value.is_valid else None for value in values)


def _long_value(buffer: pa.Buffer, scratch: Path) -> bytes | LongText:
    return LongText(file_of(buffer, scratch)) if buffer.size > LONG else buffer.to_pybytes()


def _parquet_record(number: int, text: str | bytes | LongText | None, key: str) -> Record:
    if text is None:
        return Record(number, wrong="null text", detail=f"column {key}")
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            return Record(number, wrong="not UTF-8", detail=_bad_byte(error))
    return _record(number, text)
