"""The documents in a file, whatever its form.

JSON lines (.jsonl) give a document per line, .parquet files one per row, every other file is one
document. .gz and .zst are decompressed; a compressed .json is JSON lines, as C4 and Dolma name
them. A large file is read in parts: byte ranges that begin where a line or row group does.

Documents are UTF-8 and taken as they are, carriage returns included; only a byte order mark at the
start of a file is left out. A line or row is held in memory, a long file that is one document is
not.
"""

import codecs
import io
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from lingua.data.prepare.files import FilePart
from lingua.data.prepare.pieces import PIECE

BLOCK = 2**18  # bytes read at once
ROWS = 1024  # most parquet rows read at once
_CODECS = {".gz": "gzip", ".zst": "zstd"}
_BOM = b"\xef\xbb\xbf"
OnBytes = Callable[[memoryview], Any]


class Record(NamedTuple):
    """A document, or what is wrong with it."""

    number: int  # line or row, from 1 on where the part begins
    # of a document longer than PIECE a function that gives it in blocks
    text: str | Callable[[], Iterator[str]] = ""
    n_bytes: int = 0  # of the text in UTF-8
    hash: int = 0  # of these bytes: 64 bits
    wrong: str = ""  # the kind of fault
    detail: str = ""


def _form(file: FilePart) -> tuple[str, str | None]:
    """("json", "parquet" or "text", codec) of a file by its name."""
    name = Path(file.path.lower())
    codec = _CODECS.get(name.suffix)
    suffix = name.with_suffix("").suffix if codec else name.suffix
    if suffix == ".jsonl" or (suffix == ".json" and codec):
        return "json", codec
    return ("parquet" if suffix == ".parquet" and not codec else "text"), codec


# ---- parts


def split_file(file: FilePart, most: int) -> list[FilePart]:
    """The parts of a whole file, each of about `most` bytes of text where its form allows."""
    form, codec = _form(file)
    cuts = [0]
    if file.size > most and form == "json" and not codec:
        with open(file.full, "rb") as handle:
            for at in range(most, file.size, most):
                handle.seek(at - 1)
                handle.readline()
                cuts.append(handle.tell())
    elif file.size > most and form == "parquet":
        with suppress(pa.ArrowException, OSError):  # read_records reports it
            cuts += _row_group_cuts(pq.read_metadata(file.full), most)
    ends = sorted({*cuts, file.size})
    return [replace(file, begin=begin, end=end) for begin, end in pairwise(ends)] or [file]


def _row_group_cuts(metadata: pq.FileMetaData, most: int) -> list[int]:
    cuts, size = [], 0
    for i in range(metadata.num_row_groups):
        group_size = metadata.row_group(i).total_byte_size
        size += group_size
        if size > most and i:
            cuts.append(_group_start(metadata, i))
            size = group_size
    return cuts


def _group_start(metadata: pq.FileMetaData, i: int) -> int:
    group = metadata.row_group(i)
    columns = [group.column(c) for c in range(group.num_columns)]
    offsets = [(c.dictionary_page_offset, c.data_page_offset) for c in columns]
    return min(offset for pair in offsets for offset in pair if offset) if i else 0


def _row_groups(metadata: pq.FileMetaData, begin: int, end: int) -> list[int]:
    groups = range(metadata.num_row_groups)
    return [i for i in groups if begin <= _group_start(metadata, i) < end]


def records_before(part: FilePart) -> int:
    """The number of lines or rows of the file before the part."""
    if not part.begin:
        return 0
    if _form(part)[0] == "json":
        with open_part(replace(part, begin=0, end=part.begin)) as file:
            return sum(1 for _ in file)
    metadata = pq.read_metadata(part.full)
    return sum(metadata.row_group(i).num_rows for i in _row_groups(metadata, 0, part.begin))


def open_part(
    part: FilePart, on_bytes: OnBytes | None = None, codec: str | None = None
) -> io.BufferedReader:
    """The part's bytes, decompressed if there is a `codec`, to be read once in order. `on_bytes`
    gets them as they are in the file."""
    file = io.BufferedReader(_PartFile(part, on_bytes), BLOCK)
    if codec is None:
        return file
    stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)
    return io.BufferedReader(stream, BLOCK)


def read_through(part: FilePart, on_bytes: OnBytes | None) -> None:
    with open_part(part, on_bytes) as file:
        while file.read(BLOCK):
            pass


class _PartFile(io.FileIO):
    def __init__(self, part: FilePart, on_bytes: OnBytes | None) -> None:
        super().__init__(part.full)
        self.seek(part.begin)
        self._left, self._on_bytes = part.end - part.begin, on_bytes

    def readinto(self, buffer: Any) -> int:
        block = memoryview(buffer)[: self._left]
        n = super().readinto(block)
        self._left -= n
        if self._on_bytes is not None:
            self._on_bytes(block[:n])
        return n


# ---- records


class _Wrong(Exception):
    """(kind of fault, detail) of a record."""


def read_records(
    part: FilePart, keys: tuple[str, ...], on_bytes: OnBytes | None = None
) -> Iterator[Record]:
    """Every record of a part. `keys` are those of the text: the first that exists is read.
    `on_bytes` gets the part's bytes as they are read."""
    form, codec = _form(part)
    number = 0
    try:
        if form == "json":
            records = _json_lines(part, keys, on_bytes)
        elif form == "parquet":
            records = _parquet_rows(part, keys, on_bytes)
        else:
            records = _one_document(part, on_bytes)
        for record in records:
            number = record.number
            yield record
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the operating system
            raise
        yield Record(number + 1, wrong="damaged file", detail=f"as {codec or form}: {error}")


def _record(number: int, read: Callable[..., str], *source: Any) -> Record:
    """The record of the text that `read` returns, or of the fault that it raises."""
    try:
        text = read(*source)
        data = text.encode()
        if not text:
            raise _Wrong("empty document", "")
        blocks = partial(_slices, text) if len(text) > PIECE else text
        return Record(number, blocks, len(data), xxhash.xxh3_64_intdigest(data))
    except _Wrong as fault:
        kind, detail = fault.args
    except UnicodeDecodeError as error:
        kind, detail = "not UTF-8", f"{_bad_byte(error)} at byte {error.start + 1}"
    except UnicodeEncodeError as error:  # "\ud800" is JSON, but no text
        kind, detail = "not UTF-8", f"\\u{ord(text[error.start]):04x} alone"
    except (ValueError, RecursionError) as error:
        kind, detail = "not JSON", str(error)
    return Record(number, wrong=kind, detail=detail)


def _slices(text: str) -> Iterator[str]:
    return (text[i : i + PIECE] for i in range(0, len(text), PIECE))


def _bad_byte(error: UnicodeDecodeError) -> str:
    return f"{error.reason} 0x{error.object[error.start]:02x}"


# ---- a file that is one document


def _one_document(part: FilePart, on_bytes: OnBytes | None) -> Iterator[Record]:
    head, content, n_bytes, line = "", xxhash.xxh3_64(), 0, 1
    try:
        for block in _read_text(part, on_bytes):
            data = block.encode()
            content.update(data)
            n_bytes += len(data)
            line += block.count("\n")
            if len(head) <= PIECE:
                head += block
    except UnicodeDecodeError as error:
        line += error.object.count(b"\n", 0, error.start)
        yield Record(line, wrong="not UTF-8", detail=_bad_byte(error))
    else:
        text = head if len(head) <= PIECE else partial(_read_text, part)
        wrong = "" if text else "empty document"
        yield Record(1, text, n_bytes, content.intdigest(), wrong)


def _read_text(part: FilePart, on_bytes: OnBytes | None = None) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()  # leaves out a byte order mark
    with open_part(part, on_bytes, _form(part)[1]) as stream:
        while block := stream.read(BLOCK):
            yield decoder.decode(block)
    yield decoder.decode(b"", final=True)


# ---- JSON lines


def _json_lines(
    part: FilePart, keys: tuple[str, ...], on_bytes: OnBytes | None
) -> Iterator[Record]:
    with open_part(part, on_bytes, _form(part)[1]) as stream:
        for number, line in enumerate(stream, start=1):
            if number == 1 and not part.begin:
                line = line.removeprefix(_BOM)
            yield _record(number, _json_text, line.removesuffix(b"\n"), keys)


def _json_text(line: bytes, keys: tuple[str, ...]) -> str:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        decoded = line.decode()
        if not decoded.strip():
            raise _Wrong("blank line", "") from None
        # May be valid for Python: NaN, a lone surrogate in another key. Its errors name the place.
        record = json.loads(decoded)
    if not isinstance(record, dict):
        raise _Wrong("no text", f"a {type(record).__name__}, not an object with a text")
    key = next((key for key in keys if key in record), None)
    if key is None:
        raise _Wrong("no text", _without("key", keys, record))
    text = record[key]
    if text is None:
        raise _Wrong("null text", f"key {key}")
    if not isinstance(text, str):
        raise _Wrong("text is not a string", f"key {key} is {json.dumps(text)[:40]}")
    return text


def _without(what: str, keys: tuple[str, ...], names: Iterable[str]) -> str:
    wanted = f"neither {what} {' nor '.join(keys)}" if len(keys) > 1 else f"no {what} {keys[0]}"
    return f"{wanted}, but {', '.join(names) or 'none'}"


# ---- parquet


def _parquet_rows(
    part: FilePart, keys: tuple[str, ...], on_bytes: OnBytes | None
) -> Iterator[Record]:
    read_through(part, on_bytes)  # pyarrow reads only the columns, in an order of its own
    # Without a buffer, a whole column of a row group would be in memory.
    with pq.ParquetFile(
        part.full, pre_buffer=False, buffer_size=BLOCK, page_checksum_verification=True
    ) as file:
        names, groups = file.schema_arrow.names, _row_groups(file.metadata, part.begin, part.end)
        n_rows = sum(file.metadata.row_group(i).num_rows for i in groups)
        key = next((key for key in keys if key in names), None)
        fault = {}
        if key is None:
            fault = {"wrong": "no text", "detail": _without("column", keys, names)}
        elif not _is_text(kind := file.schema_arrow.field(key).type):
            fault = {"wrong": "text is not a string", "detail": f"column {key} is {kind}"}
        if fault:
            yield from (Record(number, **fault) for number in range(1, n_rows + 1))
            return
        size = sum(file.metadata.row_group(i).total_byte_size for i in groups)
        rows = max(1, min(ROWS, BLOCK * n_rows // max(1, size)))
        batches = file.iter_batches(rows, row_groups=groups, columns=[key], use_threads=False)
        values = chain.from_iterable(_values(batch.column(0)) for batch in batches)
        for number, value in enumerate(values, start=1):
            yield _record(number, _parquet_text, value, key)


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def _values(column: pa.Array) -> list[str | bytes | None]:
    """The values; bytes where one is not UTF-8, which pyarrow does not check."""
    with suppress(UnicodeDecodeError):
        return column.to_pylist()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pa.large_binary()).to_pylist()


def _parquet_text(value: str | bytes | None, key: str) -> str:
    if value is None:
        raise _Wrong("null text", f"column {key}")
    return value.decode() if isinstance(value, bytes) else value
