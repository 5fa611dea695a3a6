"""Forms of token files that other tools write: where the tokens lie, and where documents end.

form        files                                        ends of documents
uint16, uint32  nanoGPT's .bin: tokens alone             not stored
llmc        llm.c's .bin: a header of 256 int32          not stored
megatron    Megatron-LM's .bin with its .idx             in the .idx
datatrove   .ds with its .ds.index, and .ds.metadata     in the .ds.index
datasets    .arrow of Dataset.save_to_disk, a column input_ids    its rows
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lingua.base.errors import UserError, import_optional
from lingua.base.files import file_size
from lingua.data.args import DataArgs, SourceFiles
from lingua.data.files import FilePart

LLMC_BYTES = 1024  # header
LLMC_TYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # by magic number and version
MEGATRON_HEAD = np.dtype(
    [("magic", "S9"), ("version", "<u8"), ("code", "u1"), ("sequences", "<u8"), ("ends", "<u8")]
)
# Signed types too: as unsigned ones, what is negative is outside every vocabulary.
MEGATRON_TYPES = {1: "u1", 2: "u1", 3: "<u2", 4: "<u4", 5: "<u8", 8: "<u2"}


@dataclass(frozen=True)
class TokenFile:
    part: FilePart
    dtype: np.dtype  # unsigned type of the stored tokens
    pieces: np.ndarray  # int64 [pieces, 2]: items of the file before a piece, tokens in it
    # int64 [documents], ascending: tokens up to the end of each document; None: not stored
    ends: np.ndarray | None

    @property
    def n_tokens(self) -> int:
        return int(self.pieces[:, 1].sum())


def find_form(name: str, args: DataArgs, files: list[FilePart]) -> str | None:
    """The form of a source's files; None where they are text. Raises UserError where they are of
    several."""
    given = args.source_files.get(name, SourceFiles()).format
    forms = {given or _form_of(file): file for file in files}
    if len(forms) > 1:
        shown = (f"{file.full} ({form or 'text'})" for form, file in forms.items())
        raise UserError(
            f"{args.source_key(name)}: {' and '.join(shown)} are of several forms; must be one; "
            f"data.source_files.{name}.files may name its files, and .format their form"
        )
    (form,) = forms
    return None if form == "text" else form


def _form_of(file: FilePart) -> str | None:
    path = Path(file.full)
    if path.suffix == ".ds":
        return "datatrove"
    if path.suffix == ".bin":
        if os.path.lexists(path.with_suffix(".idx")):
            return "megatron"
        return "llmc" if tuple(_read(path, "<i4", 2).tolist()) in LLMC_TYPES else "uint16"
    if path.suffix == ".arrow" and "input_ids" in arrow_batches(file)[0].names:
        return "datasets"
    return None


def open_file(form: str, part: FilePart, vocab_size: int, by_name: bool) -> TokenFile:
    """One file of a source. by_name: its form is not given. Raises UserError."""
    if form in ("uint16", "uint32"):
        if by_name and vocab_size > 2**16:
            raise UserError(
                f"{part.full}: has no header that tells the size of a token, and the vocabulary "
                f"of {vocab_size:,} does not fit uint16; data.source_files may give its format, "
                "uint16 or uint32"
            )
        return _plain(part, np.dtype(f"<u{int(form[4:]) // 8}"))
    opened = {"llmc": _llmc, "megatron": _megatron, "datatrove": _datatrove, "datasets": _arrow}
    return opened[form](part)


def _plain(part: FilePart, dtype: np.dtype, head: int = 0, ends: Any = None) -> TokenFile:
    n, rest = divmod(part.size - head, dtype.itemsize)
    if rest or n < 1:
        what = "no tokens" if n < 1 else f"{part.size:,} bytes, no multiple of {dtype.itemsize}"
        raise UserError(f"{part.full}: has {what}; it is cut, or of another form")
    return TokenFile(part, dtype, np.array([[head // dtype.itemsize, n]]), ends)


def _llmc(part: FilePart) -> TokenFile:
    head = _read(Path(part.full), "<i4", 3).tolist()
    if (kind := tuple(head[:2])) not in LLMC_TYPES:
        raise UserError(
            f"{part.full}: does not begin with one of {', '.join(map(str, LLMC_TYPES))}"
        )
    dtype, n = np.dtype(LLMC_TYPES[kind]), head[-1]
    need = LLMC_BYTES + n * dtype.itemsize
    if part.size != need:
        raise UserError(
            f"{part.full}: has {part.size:,} bytes; the {n:,} tokens of its header need {need:,}"
        )
    return _plain(part, dtype, LLMC_BYTES)


def _wrong_index(path: Path, reason: str) -> UserError:
    return UserError(f"{path}: is not the index of the tokens beside it: {reason}")


def _megatron(part: FilePart) -> TokenFile:
    path = Path(part.full).with_suffix(".idx")
    index = _read(path)
    if len(index) < MEGATRON_HEAD.itemsize or index[:9].tobytes() != b"MMIDIDX\0\0":
        raise _wrong_index(path, "it does not begin with MMIDIDX")
    head = index[: MEGATRON_HEAD.itemsize].view(MEGATRON_HEAD)[0]
    version, code, n, n_ends = (int(head[k]) for k in ("version", "code", "sequences", "ends"))
    if version != 1 or code not in MEGATRON_TYPES:
        raise _wrong_index(path, f"version {version}, type {code}; must be 1 and of whole numbers")
    dtype = np.dtype(MEGATRON_TYPES[code])
    at, need = MEGATRON_HEAD.itemsize, MEGATRON_HEAD.itemsize + 12 * n + 8 * n_ends
    if len(index) not in (need, need + n):  # n: a mode of each sequence
        raise _wrong_index(path, f"{len(index):,} bytes; its {n:,} sequences need {need:,}")
    lengths = index[at : at + 4 * n].view("<i4").astype(np.int64)
    begins = index[at + 4 * n : at + 12 * n].view("<i8")
    bounds = index[at + 12 * n : need].view("<i8")
    totals = np.concatenate([[0], lengths.cumsum()])
    if (lengths < 0).any() or not np.array_equal(begins, totals[:-1] * dtype.itemsize):
        raise _wrong_index(path, "its sequences do not follow one another")
    if not n_ends or bounds[0] != 0 or bounds[-1] != n or (bounds[1:] < bounds[:-1]).any():
        raise _wrong_index(path, f"its documents do not cover its {n:,} sequences")
    return _with_ends(part, path, dtype, totals[bounds[1:]])


def _datatrove(part: FilePart) -> TokenFile:
    path, metadata = (Path(".".join((part.full, name))) for name in ("index", "metadata"))
    content = _read(path)
    if len(content) % 8 or not len(content):
        raise _wrong_index(path, f"{len(content):,} bytes, no multiple of 8")
    ends = content.view("<i8")
    size = part.size // max(1, int(ends[-1]))
    if os.path.lexists(metadata):
        try:  # "tokenizer|bytes of a token", then the number of tokens
            first, count, *_ = _read(metadata).tobytes().decode().splitlines()
            size, n = int(first.rpartition("|")[2]), int(count)
        except ValueError:
            need = "must have a line TOKENIZER|BYTES, and one with the number of tokens"
            raise UserError(f"{metadata}: {need}") from None
        if n != int(ends[-1]):
            raise _wrong_index(path, f"{ends[-1]:,} tokens; {metadata} has {n:,}")
    if size not in (2, 4):
        raise _wrong_index(path, f"{ends[-1]:,} tokens in {part.size:,} bytes; must be of 2 or 4")
    return _with_ends(part, path, np.dtype(f"<u{size}"), ends)


def _read(path: Path, kind: str = "u1", n: int = -1) -> np.ndarray:
    """The first n items of a file, or all, in memory: what is done to the file later does not reach
    the run. Raises UserError, also for a folder, a pipe or a device."""
    try:
        file_size(path)
        return np.fromfile(path, kind, n)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{path}: cannot be read ({reason}); must be a readable file") from None


def _with_ends(part: FilePart, path: Path, dtype: np.dtype, ends: np.ndarray) -> TokenFile:
    file = _plain(part, dtype, ends=ends)
    falls = (ends[1:] < ends[:-1]).any()  # no difference, which may be above 2^63
    if not len(ends) or ends[-1] != file.n_tokens or ends[0] < 0 or falls:
        n = int(ends[-1]) if len(ends) else 0
        raise _wrong_index(
            path,
            f"documents of {n:,} tokens; {part.full} has {part.size:,} bytes, "
            f"{file.n_tokens:,} tokens",
        )
    return file


def arrow_batches(part: FilePart) -> tuple[Any, Iterable[Any], int]:
    """(schema, record batches, address) of an .arrow file, mapped into memory there. pyarrow reads
    wherever the sizes and offsets in a batch point to, so `validate` comes first. Raises UserError;
    the batches raise ArrowException and OSError."""
    pa = import_optional("pyarrow", f"{part.full}:")
    try:
        memory = pa.memory_map(part.full).read_buffer()
        if memory[:6] == b"ARROW1":
            opened = pa.ipc.open_file(memory)
            batches = map(opened.get_batch, range(opened.num_record_batches))
        else:
            batches = opened = pa.ipc.open_stream(memory)
        _ = opened.schema.names  # which may not be UTF-8
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{part.full}: cannot be read as Arrow: {error}") from None
    return opened.schema, batches, memory.address


def _arrow(part: FilePart) -> TokenFile:
    pa = import_optional("pyarrow", f"{part.full}:")
    schema, batches, address = arrow_batches(part)
    index = schema.get_field_index("input_ids")  # -1: none or several
    kind: Any = pa.null() if index < 0 else schema.field(index).type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list or not pa.types.is_integer(kind.value_type):
        raise UserError(f"{part.full}: its input_ids are {kind}; must be lists of whole numbers")
    dtype = np.dtype(f"<u{kind.value_type.bit_width // 8}")
    pieces, ends, total = [np.empty((0, 2), np.int64)], [np.empty(0, np.int64)], 0
    try:
        for number, batch in enumerate(batches):
            batch.validate()
            if not len(batch):  # which may have no offsets
                continue
            column = batch.column(index)
            column.validate(full=True)
            offsets, values = column.offsets.to_numpy().astype(np.int64), column.values
            if column.null_count or values.null_count:
                raise UserError(f"{part.full}: record batch {number}: input_ids without tokens")
            at = values.buffers()[1].address - address if len(values) else 0
            if not 0 <= at <= part.size or at % dtype.itemsize:
                raise UserError(f"{part.full}: is compressed; datasets of such files are not read")
            first = at // dtype.itemsize + values.offset + offsets[0]
            pieces.append(np.array([[first, offsets[-1] - offsets[0]]]))
            ends.append(offsets[1:] - offsets[0] + total)
            total += int(offsets[-1] - offsets[0])
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{part.full}: is cut or damaged: {error}") from None
    if not total:
        raise UserError(f"{part.full}: has no tokens")
    return TokenFile(part, dtype, np.concatenate(pieces), np.concatenate(ends))
