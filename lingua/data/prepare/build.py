"""Builds one unit: its files' text -> tokens -> a shard and the record that it is finished."""

import json
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import chain

import numpy as np
import xxhash

from lingua.data.prepare.long_text import LongText
from lingua.data.prepare.pieces import PIECE, Pieces
from lingua.data.prepare.records import Record, read_records, records_before
from lingua.data.prepare.units import Job, Unit, UnitRecord, record_path
from lingua.data.shards import SPLITS, InputPart, Shard, Split, shard_files
from lingua.errors import UserError
from lingua.files import open_synced, temporary_suffix, write_atomically
from lingua.tokenizer import Tokenizer

BATCH_BYTES = 2**18  # text tokenized at once
SAMPLE_BYTES = 2**17  # text tokenized to see how much space shards take
HELD_OUT_BELOW = 2**64 // 50  # of the documents' 64-bit hashes: one document in fifty
_DOCUMENT = struct.Struct("<qqQ")  # tokens, bytes, hash; the hash is read as int64: the same bits


def build_unit(unit: Unit, job: Job, tokenizer: Tokenizer, show: Callable[[int], None]) -> None:
    """Tokenize the unit's text into its shard. `show` gets the bytes read so far.

    Raises UserError at a bad record unless they are skipped, and for a file that changes meanwhile.
    """
    temporary = f"{unit.id}{temporary_suffix()}"
    writers = {split: _SplitWriter(job, tokenizer, temporary, split) for split in SPLITS}
    parts: list[InputPart] = []
    skipped: Counter[str] = Counter()
    pieces = Pieces(tokenizer)
    try:
        for batch in _batches(_records(unit, job, parts, show), skipped):
            if isinstance(batch, Record):
                writers[_split_of(batch)].add_long(batch, pieces)
            else:
                _write_batch(batch, tokenizer, writers)
        splits = {split: writer.finish() for split, writer in writers.items()}
        content = xxhash.xxh3_64_hexdigest("".join(part.hash for part in parts).encode())
        shard = Shard(f"{unit.id}-{content[:8]}", len(parts), **splits)
        for final in shard_files(shard, job.dtype):
            os.replace(job.folder / final.replace(shard.name, temporary, 1), job.folder / final)
    finally:
        for writer in writers.values():
            writer.discard()
    record = UnitRecord(parts, shard, dict(sorted(skipped.items())), pieces.rough_cuts)
    write_atomically(record_path(unit, job), json.dumps(asdict(record), indent=1))


def bytes_per_byte(unit: Unit, job: Job, tokenizer: Tokenizer) -> float:
    """About how many bytes of shards a byte of the unit's files becomes, from its first records."""
    n_read = n_written = n_text = 0
    for part in unit.parts:
        sizes: list[int] = []
        with open(part.file.full, "rb") as handle:
            for record in read_records(handle, part, job.text, lambda b, s=sizes: s.append(len(b))):
                if record.wrong or not isinstance(record.text, str):
                    continue
                ids = tokenizer.encode(record.text[:PIECE])
                n_written += len(ids) * np.dtype(job.dtype).itemsize
                n_text += record.n_bytes
                if n_text >= SAMPLE_BYTES:
                    break
        n_read += sum(sizes)
        if n_text >= SAMPLE_BYTES:
            break
    return n_written / max(1, n_read)


def _records(
    unit: Unit, job: Job, parts: list[InputPart], show: Callable[[int], None]
) -> Iterator[Record]:
    """Every record of the unit; each part that was read through is added to `parts`."""
    n_read = 0
    for part in unit.parts:
        content = xxhash.xxh3_128()

        def see(block: bytes, content: xxhash.xxh3_128 = content) -> None:
            nonlocal n_read
            n_read += len(block)
            content.update(block)
            show(n_read)

        with open(part.file.full, "rb") as handle:
            for record in read_records(handle, part, job.text, see):
                if record.wrong and not job.skip_bad_records:
                    detail = f" ({record.detail})" if record.detail else ""
                    raise UserError(
                        f"{part.file.full}:{records_before(part) + record.number}: {record.wrong}"
                        f"{detail}; data.on_bad_record: skip leaves such records out and counts "
                        "them"
                    )
                yield record
            now = os.fstat(handle.fileno())
        if (now.st_size, now.st_mtime_ns) != (part.file.size, part.file.mtime_ns):
            raise UserError(f"{part.file.full}: changed while it was read; start again")
        parts.append(
            InputPart(
                part.file.path,
                part.begin,
                part.end,
                part.file.size,
                part.file.mtime_ns,
                content.hexdigest(),
            )
        )


def _batches(records: Iterator[Record], skipped: Counter[str]) -> Iterator[list[Record] | Record]:
    """The documents in order: long ones alone, others about BATCH_BYTES together. Bad records are
    counted on the way."""
    batch: list[Record] = []
    size = 0
    for record in records:
        if record.wrong:
            skipped[record.wrong] += 1
            continue
        is_long = isinstance(record.text, LongText) or len(record.text) > PIECE
        if batch and (is_long or size >= BATCH_BYTES):
            yield batch
            batch, size = [], 0
        if is_long:
            yield record
        else:
            batch.append(record)
            size += record.n_bytes
    if batch:
        yield batch


def _split_of(record: Record) -> str:
    return "heldout" if record.hash < HELD_OUT_BELOW else "train"


def _write_batch(
    batch: list[Record], tokenizer: Tokenizer, writers: dict[str, "_SplitWriter"]
) -> None:
    encoded = tokenizer.encode_batch([record.text for record in batch])
    for record, ids in zip(batch, encoded, strict=True):
        writers[_split_of(record)].add(record, ids)
    for writer in writers.values():
        writer.flush()


class _SplitWriter:
    """The two files of one split of a shard, under a temporary name."""

    def __init__(self, job: Job, tokenizer: Tokenizer, name: str, split: str):
        self._dtype, self._vocab_size = np.dtype(job.dtype), tokenizer.vocab_size
        self._bos = np.array([tokenizer.bos_id] if job.add_bos else [], tokenizer.dtype)
        self._eos = np.array([tokenizer.eos_id] if job.add_eos else [], tokenizer.dtype)
        self._paths = [job.folder / f"{name}.{split}.{what}" for what in ("tokens", "documents")]
        self._tokens, self._documents = map(open_synced, self._paths)
        self._counts = Split(tokens=0, documents=0, bytes=0, hash="")
        self._content = xxhash.xxh3_128()
        self._added: list[np.ndarray] = []

    def add(self, record: Record, ids: np.ndarray) -> None:
        """A document, written by the next `flush`."""
        self._added += (self._bos, ids, self._eos)
        self._describe(record, len(self._bos) + len(ids) + len(self._eos))

    def flush(self) -> None:
        if self._added:
            self._write(np.concatenate(self._added))
            self._added.clear()

    def add_long(self, record: Record, pieces: Pieces) -> None:
        text = record.text
        if isinstance(text, str):
            blocks = (text[i : i + PIECE] for i in range(0, len(text), PIECE))
        else:
            blocks = iter(text)
        n_tokens = 0
        for part in chain([self._bos], pieces.encode(blocks), [self._eos]):
            self._write(part)
            n_tokens += len(part)
        self._describe(record, n_tokens)

    def _write(self, tokens: np.ndarray) -> None:
        largest = int(tokens.max(initial=0))
        if largest >= self._vocab_size:
            raise UserError(
                f"data.tokenizer: gave token {largest}, but its vocabulary is {self._vocab_size}"
            )
        data = tokens.astype(self._dtype, copy=False).data
        self._tokens.write(data)
        self._content.update(data)
        self._counts.tokens += len(tokens)

    def _describe(self, record: Record, n_tokens: int) -> None:
        self._documents.write(_DOCUMENT.pack(n_tokens, record.n_bytes, record.hash))
        self._counts.documents += 1
        self._counts.bytes += record.n_bytes

    def finish(self) -> Split:
        self._tokens.close()
        self._documents.close()
        self._counts.hash = self._content.hexdigest()
        return self._counts

    def discard(self) -> None:
        """Remove what still has its temporary name."""
        for file, path in zip((self._tokens, self._documents), self._paths, strict=True):
            with suppress(OSError):  # on a full disk what is still in its buffer cannot be written
                file.close()
            path.unlink(missing_ok=True)
