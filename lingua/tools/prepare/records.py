"""The documents in a file, whatever its form.

JSON lines (.jsonl, .ndjson, .jsonlines, .ldjson) give a document per line, .parquet, .arrow, .csv
and .tsv files one per row; of .parquet it may be tokens, the column input_ids, where there is no
text. A .json file is a list of records, one record, or JSON lines, as C4 and Dolma name them. Every
other file is one document. .gz and .zst are decompressed. A large .jsonl or .parquet file is read
in parts: byte ranges that begin where a line or row group does.

Documents are UTF-8 and taken as they are, carriage returns included; only a byte order mark, at the
start of a file, is left out. One document is in memory at a time, or one list of records.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from lingua.data.args import DataArgs, SourceFiles
from lingua.data.files import FilePart
from lingua.data.token_formats import arrow_batches
from lingua.tokenizer.interface import Tokenizer
from lingua.tools.prepare.pieces import WORD_OR_LINE

NOT_TEXT = "name the file .jsonl, or leave it out by data.source_files.NAME.files"
READ_BYTES = 2**18  # bytes read at once
MAX_ROWS = 1024  # parquet rows read at once
MAX_LIST_BYTES = 2**30  # largest .json file that is one list, largest value in a table
_CODECS = {".gz": "gzip", ".zst": "zstd"}
_FORMS = ("jsonl", "json", "csv", "tsv", "parquet", "arrow")  # a file of another is one text
_SAME_FORMS = {"ndjson": "jsonl", "jsonlines": "jsonl", "ldjson": "jsonl"}
_TABLES = ("parquet", "arrow")  # with columns, read by pyarrow
_TOKENS = "input_ids"  # column of tokens
_LISTS = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)
_BOM = b"\xef\xbb\xbf"
# The first bytes of files that are no UTF-8 text, also where they could be read as such, with what
# is wrong and what helps.
_UTF_16 = "not UTF-8", "it begins as UTF-16; iconv -f UTF-16 -t UTF-8 converts it"
_FOREIGN = {b"\xff\xfe": _UTF_16, b"\xfe\xff": _UTF_16}
_FOREIGN[b"%PDF-"] = "a PDF file", "pdftotext, for one, writes its text"
HELD_OUT = 50  # one document in 50 is held out; of a source of one document, its last 50th
NEVER = 2**64 - 1  # draw of what is not held out
MIN_TAIL, MAX_TAIL = 1000, 2**20  # characters of a held-out tail
# Reads columns, all or these, in batches of at most so many rows.
Batches = Callable[..., Iterator[pa.RecordBatch]]
OnRead = Callable[[int], Any]  # gets the number of bytes of each read


@dataclass
class Wrong(Exception):
    """A record that is wrong, and why."""

    kind: str
    detail: str = ""
    lacks_key: bool = False  # its text may be under a key that is not one of those given


class SourceRecord(NamedTuple):
    """A document, or what is wrong with it."""

    number: int  # line or row, from 1 on where the part begins
    text: str = ""
    n_bytes: int = 0  # size of the text in UTF-8
    hash: int = 0  # 64-bit hash of these bytes
    draw: int = NEVER  # 64-bit hash of what is held out together, such as a prompt's pairs
    wrong: Wrong | None = None
    # int64 [n]: of a conversation, in place of the text; of a record of tokens, which text decodes
    tokens: np.ndarray | None = None
    is_cut: bool = False  # the example was longer than a row


# The examples of a conversation, from the number of its record and its object. Raises Wrong.
Examples = Callable[[int, dict[str, Any]], list[SourceRecord]]


def _form(file: FilePart) -> tuple[str, str | None]:
    """(one of _FORMS, else "text"; codec) of a file by its name."""
    name = Path(file.path.lower())
    codec = _CODECS.get(name.suffix)
    suffix = (name.with_suffix("").suffix if codec else name.suffix).removeprefix(".")
    suffix = _SAME_FORMS.get(suffix, suffix)
    form = suffix if suffix in _FORMS else "text"
    return ("text" if codec and form in _TABLES else form), codec


# ---- parts


def split_file(file: FilePart, max_bytes: int) -> list[FilePart]:
    """The parts of a whole file, each of about `max_bytes` bytes of text where its form allows."""
    form, codec = _form(file)
    cuts = {0, file.size}
    if file.size > max_bytes and form == "jsonl" and not codec:
        with open(file.full, "rb") as handle:
            for at in range(max_bytes, file.size, max_bytes):
                handle.seek(at - 1)
                handle.readline()
                cuts.add(handle.tell())
    elif file.size > max_bytes and form == "parquet":
        size = 0
        with suppress(pa.ArrowException, OSError):  # read_records reports it
            for group in _row_groups(pq.read_metadata(file.full)):
                size += group.size
                if size > max_bytes:
                    cuts.add(group.begin)
                    size = group.size
    return [replace(file, begin=begin, end=end) for begin, end in pairwise(sorted(cuts))] or [file]


class _RowGroup(NamedTuple):
    begin: int  # byte of the file; 0 for the first group
    rows: int
    size: int  # bytes of its data before compression


def _row_groups(metadata: pq.FileMetaData) -> list[_RowGroup]:
    groups = []
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        columns = [group.column(c) for c in range(group.num_columns)]
        begins = [c.dictionary_page_offset or c.data_page_offset for c in columns if i]
        begin = max(0, min(begins, default=0))
        groups.append(_RowGroup(begin, group.num_rows, group.total_byte_size))
    return groups


def records_before(part: FilePart) -> int:
    """The number of lines or rows of the file before the part."""
    if not part.begin:
        return 0
    if _form(part)[0] == "jsonl":
        with _open_part(replace(part, begin=0, end=part.begin)) as file:
            return sum(1 for _ in file)
    groups = _row_groups(pq.read_metadata(part.full))
    return sum(group.rows for group in groups if group.begin < part.begin)


def _open_part(
    part: FilePart, on_read: OnRead | None = None, codec: str | None = None
) -> "io.BufferedReader[Any]":
    """The part's bytes, decompressed if there is a `codec`, to be read once in order."""
    file = io.BufferedReader(_PartFile(part, on_read), READ_BYTES)
    if codec is None:
        return file
    stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)
    return io.BufferedReader(stream, READ_BYTES)


class _PartFile(io.FileIO):
    def __init__(self, part: FilePart, on_read: OnRead | None) -> None:
        super().__init__(part.full)
        self.seek(part.begin)
        self._left, self._on_read = part.end - part.begin, on_read

    def readinto(self, buffer: Any) -> int:
        n = super().readinto(memoryview(buffer)[: self._left])
        self._left -= n
        if self._on_read is not None:
            self._on_read(n)
        return n


# ---- records


def text_keys(args: DataArgs, source: str) -> tuple[str, ...]:
    """The keys or columns of a source's text: the first that a record has is read."""
    key = args.source_files.get(source, SourceFiles()).text_key
    usual = ("text", "content") if args.chat is None else ("messages",)
    return (key,) if key else usual


def read_records(
    part: FilePart,
    keys: tuple[str, ...],
    on_read: OnRead | None = None,
    examples: Examples | None = None,
    tokenizer: Tokenizer | None = None,
) -> Iterator[SourceRecord]:
    """Every record of a part. `keys` are those of the text: the first that exists is read. Where
    records are conversations, what `examples` makes of each. `tokenizer` decodes those that are
    tokens, which are wrong without one."""
    form, codec = _form(part)
    number = 0
    try:
        with _open_part(part, on_read, codec) as stream:
            start = b"" if part.begin or form in _TABLES else stream.peek()
            if wrong := next((w for bom, w in _FOREIGN.items() if start.startswith(bom)), None):
                yield SourceRecord(1, wrong=Wrong(*wrong))
                return
            values: Iterable[bytes | Wrong | dict[str, Any] | np.ndarray] = stream
            if form == "text":
                # Not `read()`, which reads all but its buffer without `readinto`.
                values = [b"".join(iter(partial(stream.read, READ_BYTES), b""))]
            elif form == "json":
                values = _json_values(stream)
            elif form in ("csv", "tsv"):
                values = _table_values(stream, "," if form == "csv" else "\t")
            elif form in _TABLES:
                values = _column(part, form, keys) if examples is None else _rows(part, form)
                if on_read is not None:
                    on_read(part.end - part.begin)
            for number, value in enumerate(values, start=1):
                if isinstance(value, np.ndarray):
                    yield _of_tokens(number, value, tokenizer)
                else:
                    yield from _records(number, value, form, keys, examples)
    except (pa.ArrowException, OSError, csv.Error) as error:
        if isinstance(error, OSError) and error.errno is not None:  # not raised by pyarrow
            raise
        yield SourceRecord(number + 1, wrong=Wrong("damaged file", f"as {codec or form}: {error}"))


def _document(number: int, text: str) -> SourceRecord:
    data = text.encode()
    hashed = xxhash.xxh3_64_intdigest(data)
    return SourceRecord(number, text, len(data), hashed, hashed)


def _of_tokens(number: int, tokens: np.ndarray, tokenizer: Tokenizer | None) -> SourceRecord:
    """A document of tokens, without a bos and eos of its own: data.add_bos and data.add_eos give
    them, as those of text."""
    if tokenizer is None:
        wrong = Wrong("no text", f"column {_TOKENS} has tokens", lacks_key=True)
        return SourceRecord(number, wrong=wrong)
    if len(tokens) and tokens[0] == tokenizer.bos_id:
        tokens = tokens[1:]
    if len(tokens) and tokens[-1] == tokenizer.eos_id:
        tokens = tokens[:-1]
    try:
        text = tokenizer.decode(tokens)
    except IndexError as error:
        return SourceRecord(number, wrong=Wrong("token outside the vocabulary", str(error)))
    if not len(tokens):
        return SourceRecord(number, wrong=Wrong("empty document"))
    return _document(number, text)._replace(tokens=tokens)


def encode_batch(records: list[SourceRecord], tokenizer: Tokenizer) -> list[np.ndarray]:
    """The ids of each record's text, or its tokens as they are."""
    texts = [record.text for record in records if record.tokens is None]
    encoded = iter(tokenizer.encode_batch(texts) if texts else [])
    return [next(encoded) if record.tokens is None else record.tokens for record in records]


def split_tail(record: SourceRecord) -> list[SourceRecord]:
    """A document that is a whole source, as one to train on and one that is held out: its end, from
    the beginning of a word or line. A short one is trained on as it is."""
    text, n_held_out = record.text, min(len(record.text) // HELD_OUT, MAX_TAIL)
    if n_held_out < MIN_TAIL or record.tokens is not None:
        return [record._replace(draw=NEVER)]
    start = WORD_OR_LINE.search(text, len(text) - n_held_out, len(text) - n_held_out // 2)
    cut = start.start() if start else len(text) - n_held_out
    head, tail = (_document(record.number, part) for part in (text[:cut], text[cut:]))
    return [head._replace(draw=NEVER), tail._replace(draw=0)]


def _records(
    number: int,
    value: bytes | Wrong | dict[str, Any],
    form: str,
    keys: tuple[str, ...],
    examples: Examples | None,
) -> list[SourceRecord]:
    if isinstance(value, Wrong):
        return [SourceRecord(number, wrong=value)]
    text = ""
    try:
        if isinstance(value, bytes) and form in ("json", "jsonl"):
            value = _parse_json(value.removeprefix(_BOM).removesuffix(b"\n"))
        if not isinstance(value, bytes | dict):
            raise Wrong("no text", f"a {type(value).__name__}, not an object with a text")
        if examples is not None:
            if isinstance(value, bytes):
                raise Wrong("not a conversation", "must be in a .jsonl, .json or .parquet file")
            return examples(number, value)
        if isinstance(value, bytes):
            text = value.decode("utf-8-sig" if form == "text" else "utf-8")
            if form == "text" and "\0" in text:
                nul = f"byte {value.index(0) + 1} is NUL, which UTF-8 text has not, but UTF-16"
                raise Wrong("binary file", nul)
            if form == "text" and (key := _key_of_json_line(text, keys)) is not None:
                raise Wrong("JSON lines in a file of text", f"line 1 has the key {key}; {NOT_TEXT}")
        else:
            text = _text_of(value, keys)
        if text:
            return [_document(number, text)]
        wrong = Wrong("empty document")
    except Wrong as fault:
        wrong = fault
    except UnicodeDecodeError as error:
        byte = f"0x{error.object[error.start]:02x}"
        wrong = Wrong("not UTF-8", f"{error.reason} {byte} at byte {error.start + 1}")
        if form == "text":
            number += error.object.count(b"\n", 0, error.start)
    except UnicodeEncodeError as error:  # "\ud800" is JSON, but no text
        wrong = Wrong("not UTF-8", f"\\u{ord(text[error.start]):04x} alone")
    except (ValueError, RecursionError) as error:
        wrong = Wrong("not JSON", str(error))
    return [SourceRecord(number, wrong=wrong)]


def _key_of_json_line(text: str, keys: tuple[str, ...]) -> str | None:
    """Which key of a record's text the first line of a text has, if it is a record."""
    if not text.startswith("{"):
        return None
    with suppress(ValueError):
        record = orjson.loads(text.partition("\n")[0])
        return next((key for key in keys if key in record), None)
    return None


def _parse_json(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        decoded = line.decode()
        if not decoded.strip():
            raise Wrong("blank line") from None
        # May be valid for Python: NaN, a lone surrogate in another key. Its errors name the place.
        return json.loads(decoded)


def _json_values(stream: BinaryIO) -> Iterable[Any]:
    """The records of a .json file: what its list has, its only record, or its lines."""
    first = stream.readline()
    with suppress(ValueError, RecursionError, Wrong):
        if isinstance(_parse_json(first.removeprefix(_BOM)), dict):
            return chain([first], stream)
    data = first + stream.read(MAX_LIST_BYTES)
    if stream.read(1):
        limit = f"a list of more than {MAX_LIST_BYTES:,} bytes is not read"
        return [Wrong("too long", f"{limit}; write it as .jsonl, a record on each line")]
    try:
        whole = _parse_json(data.removeprefix(_BOM))
    except (ValueError, RecursionError, Wrong) as error:
        is_list = data.removeprefix(_BOM).lstrip().startswith(b"[")
        return [Wrong("not JSON", str(error))] if is_list else io.BytesIO(data)
    return whole if isinstance(whole, list) else [whole]


def _table_values(stream: BinaryIO, delimiter: str) -> Iterator[dict[str, Any] | Wrong]:
    """Each row as an object, by the names in the first one. A value in double quotes may have the
    delimiter, line ends, and quotes that are doubled (RFC 4180)."""
    csv.field_size_limit(MAX_LIST_BYTES)
    # What is not UTF-8 becomes a lone surrogate, which is refused with its record.
    lines = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    names = next(rows, [])
    if len(set(names)) < len(names):
        raise csv.Error("two columns have one name")
    for row in filter(None, rows):  # without blank lines
        if len(row) == len(names):
            yield dict(zip(names, row, strict=True))
        else:
            yield Wrong("wrong number of columns", f"{len(row)}, and {len(names)} names")


def _text_of(record: dict[str, Any], keys: tuple[str, ...]) -> str:
    key = next((key for key in keys if key in record), None)
    if key is None:
        raise _no_text("key", keys, record)
    text = record[key]
    if text is None:
        raise Wrong("null text", f"key {key}")
    if not isinstance(text, str):
        raise Wrong("text is not a string", f"key {key} is {json.dumps(text)[:40]}")
    return text


@contextmanager
def _open_table(
    part: FilePart, form: str, **options: Any
) -> Iterator[tuple[pa.Schema, int, int, Batches]]:
    """(schema, rows, bytes, a function that reads columns in batches of at most so many rows)."""
    if form == "arrow":
        schema, batches, _ = arrow_batches(part)
        whole = pa.Table.from_batches(batches, schema)  # mapped into memory
        whole.validate()

        def read(rows: int, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
            chosen = whole if columns is None else whole.select(columns)
            return iter(chosen.to_batches(max_chunksize=rows))

        yield schema, whole.num_rows, part.size, read
        return
    with pq.ParquetFile(part.full, page_checksum_verification=True, **options) as file:
        groups = _row_groups(file.metadata)
        chosen = [i for i, group in enumerate(groups) if part.begin <= group.begin < part.end]
        n_rows, size = (sum(groups[i][k] for i in chosen) for k in (1, 2))
        read_groups = partial(file.iter_batches, row_groups=chosen, use_threads=False)
        yield file.schema_arrow, n_rows, size, lambda n, names=None: read_groups(n, columns=names)


def _rows(part: FilePart, form: str) -> Iterator[Wrong | dict[str, Any]]:
    """Yields each row as an object, or what is wrong with it."""
    with _open_table(part, form) as (_, _, _, read):
        for batch in read(MAX_ROWS):
            for i in range(batch.num_rows):
                try:
                    yield _without_nulls(batch.slice(i, 1).to_pylist()[0])
                except UnicodeDecodeError as error:
                    yield Wrong("not UTF-8", str(error))


def _without_nulls(value: Any) -> Any:
    """A value without the keys that Arrow gives a record because others have them, with null. A
    message keeps its content."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if v is not None or k == "content"}
        return {key: _without_nulls(v) for key, v in kept.items()}
    return value


def _column(
    part: FilePart, form: str, keys: tuple[str, ...]
) -> Iterator[bytes | Wrong | np.ndarray]:
    """The text of each row, its tokens, or what is wrong with it."""
    # Without a buffer, a whole column of a row group would be in memory.
    options = {"pre_buffer": False, "buffer_size": READ_BYTES} if form == "parquet" else {}
    with _open_table(part, form, **options) as (schema, n_rows, size, read):
        names = schema.names
        key = next((key for key in (*keys, _TOKENS) if key in names), None)
        if key is None:
            yield from repeat(_no_text("column", keys, names), n_rows)
            return
        if names.count(key) > 1:
            several = Wrong("no text", f"{names.count(key)} columns are {key}", lacks_key=True)
            yield from repeat(several, n_rows)
            return
        kind = schema.field(key).type
        stored = kind.value_type if pa.types.is_dictionary(kind) else kind
        is_list = any(is_kind(kind) for is_kind in _LISTS)
        is_tokens = key == _TOKENS and is_list and pa.types.is_integer(kind.value_type)
        if key == _TOKENS and is_list and not is_tokens:
            fault = Wrong("tokens are not whole numbers", f"column {key} is {kind}")
            yield from repeat(fault, n_rows)
            return
        if not is_tokens and stored not in (pa.string(), pa.large_string(), pa.string_view()):
            fault = Wrong("text is not a string", f"column {key} is {kind}", lacks_key=True)
            yield from repeat(fault, n_rows)
            return
        rows = max(1, min(MAX_ROWS, READ_BYTES * n_rows // max(1, size)))
        for batch in read(rows, [key]):
            column = batch.column(0)
            if kind in (pa.string(), pa.large_string()):  # as bytes: records need not be UTF-8
                column = column.cast(pa.large_binary())
            column.validate(full=True)  # pyarrow reads wherever offsets point to
            for value in column if is_tokens else column.cast(pa.large_binary()).to_pylist():
                if value is None or (is_tokens and not value.is_valid):
                    yield Wrong("null text", f"column {key}")
                elif is_tokens:
                    yield value.values.to_numpy(zero_copy_only=False).astype(np.int64)
                else:
                    yield value


def _no_text(what: str, keys: tuple[str, ...], names: Iterable[str]) -> Wrong:
    wanted = f"neither {what} {' nor '.join(keys)}" if len(keys) > 1 else f"no {what} {keys[0]}"
    return Wrong("no text", f"{wanted}, but {', '.join(names) or 'none'}", lacks_key=True)
