"""The unit of preparation: a group of input files that becomes one shard.

Units do not know each other: any number of processes may build them in any order. A finished unit
leaves a record beside its shard, by which a build that was killed goes on. A shard's name carries
the content of its files, so that one that changed never takes the place of one in use.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import xxhash

from lingua.data.files import Record, TextFile, read_records
from lingua.data.shards import (
    SPLITS,
    InputFile,
    Shard,
    Split,
    shard_files,
    shard_from_json,
    temporary_suffix,
    write_atomically,
)
from lingua.errors import UserError
from lingua.tokenizer import Tokenizer, TokenizerArgs

UNIT_BYTES = 32 * 2**20  # small files are grouped up to this size
BATCH_BYTES = 2**20  # text tokenized at once
HELD_OUT_BELOW = 2**64 // 50  # of the documents' 64-bit hashes: one document in fifty


@dataclass(frozen=True)
class Unit:
    id: str  # of the files' paths
    files: tuple[TextFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Job:
    """What all units of a source have in common. Goes to the worker processes."""

    source: str
    folder: Path  # of the shards
    tokenizer: TokenizerArgs
    add_bos: bool
    add_eos: bool
    dtype: str
    skip_bad_records: bool


@dataclass
class UnitRecord:
    files: list[InputFile]
    shard: Shard
    skipped: dict[str, int]  # bad records by kind


def plan_units(files: list[TextFile], unit_bytes: int) -> list[Unit]:
    """Neighbouring files together while they are at most `unit_bytes`; one file is never cut."""
    groups: list[list[TextFile]] = []
    size = 0
    for file in files:
        if not groups or size + file.size > unit_bytes:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return [Unit(_unit_id(group), tuple(group)) for group in groups]


def _unit_id(files: list[TextFile]) -> str:
    paths = json.dumps([file.path for file in files])
    return hashlib.blake2b(paths.encode(), digest_size=8).hexdigest()


def unchanged(file: TextFile, known: InputFile) -> bool:
    """Whether the file still has the content it had; read only where its stat differs."""
    if file.size != known.size:
        return False
    return file.mtime_ns == known.mtime_ns or _hash_file(file.full) == known.hash


def _hash_file(path: str) -> str:
    content = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            content.update(chunk)
    return content.hexdigest()


def with_stat_of(known: InputFile, file: TextFile) -> InputFile:
    return InputFile(known.path, file.size, file.mtime_ns, known.hash)


def finished(unit: Unit, job: Job) -> UnitRecord | None:
    """The record of the unit if it is built and its files are as they were."""
    try:
        fields = json.loads(_record_path(unit, job).read_text(encoding="utf-8"))
        files = [InputFile(**file) for file in fields["files"]]
        record = UnitRecord(files, shard_from_json(fields["shard"]), fields["skipped"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    if record.skipped and not job.skip_bad_records:
        return None
    if [file.path for file in files] != [file.path for file in unit.files]:
        return None
    for name, size in shard_files(record.shard, job.dtype).items():
        path = job.folder / name
        if not path.is_file() or path.stat().st_size != size:
            return None
    if not all(map(unchanged, unit.files, files)):
        return None
    record.files = list(map(with_stat_of, files, unit.files))
    return record


def _record_path(unit: Unit, job: Job) -> Path:
    return job.folder / f"{unit.id}.json"


def record_files(unit: Unit, record: UnitRecord, job: Job) -> set[str]:
    """The names of all files that belong to a finished unit."""
    return {_record_path(unit, job).name, *shard_files(record.shard, job.dtype)}


def build_unit(unit: Unit, job: Job, tokenizer: Tokenizer, advance: Callable[[int], None]) -> None:
    """Tokenize the unit's files into its shard. `advance` gets the bytes read since the last call.

    Raises UserError at a bad record unless they are skipped, and for a file that changes meanwhile.
    """
    temporary = f"{unit.id}{temporary_suffix()}"
    writers = {split: _SplitWriter(job, tokenizer, temporary, split) for split in SPLITS}
    files: list[InputFile] = []
    skipped: Counter[str] = Counter()
    try:
        for batch in _batches(_records(unit, job, files), skipped):
            _write_batch(batch, tokenizer, writers)
            advance(sum(record.n_read for record in batch))
        splits = {split: writer.finish() for split, writer in writers.items()}
        content = xxhash.xxh3_64_hexdigest("".join(file.hash for file in files).encode())
        shard = Shard(f"{unit.id}-{content[:8]}", len(files), **splits)
        for final in shard_files(shard, job.dtype):
            os.replace(job.folder / final.replace(shard.name, temporary, 1), job.folder / final)
    finally:
        for writer in writers.values():
            writer.discard()
    record = UnitRecord(files, shard, dict(sorted(skipped.items())))
    write_atomically(_record_path(unit, job), json.dumps(asdict(record), indent=1))


def _records(unit: Unit, job: Job, files: list[InputFile]) -> Iterator[Record]:
    """Every record of the unit's files; each file that was read through is added to `files`."""
    for text_file in unit.files:
        content = xxhash.xxh3_128()
        with open(text_file.full, "rb") as file:
            for record in read_records(file, text_file.path, job.source, content.update):
                if record.wrong and not job.skip_bad_records:
                    detail = f" ({record.detail})" if record.detail else ""
                    raise UserError(
                        f"{text_file.full}:{record.line}: {record.wrong}{detail}; "
                        "data.on_bad_record: skip leaves such records out and counts them"
                    )
                yield record
            now = os.fstat(file.fileno())
        if (now.st_size, now.st_mtime_ns) != (text_file.size, text_file.mtime_ns):
            raise UserError(f"{text_file.full}: changed while it was read; start again")
        known = InputFile(text_file.path, now.st_size, now.st_mtime_ns, content.hexdigest())
        files.append(known)


def _batches(records: Iterator[Record], skipped: Counter[str]) -> Iterator[list[Record]]:
    """The records in order, about BATCH_BYTES together; bad ones are counted on the way."""
    batch: list[Record] = []
    size = 0
    for record in records:
        if record.wrong:
            skipped[record.wrong] += 1
        batch.append(record)
        size += record.n_read
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_batch(
    batch: list[Record], tokenizer: Tokenizer, writers: dict[str, "_SplitWriter"]
) -> None:
    documents = [record for record in batch if not record.wrong]
    if not documents:
        return
    ids = tokenizer.encode_batch([record.text for record in documents])
    hashes = [xxhash.xxh3_64_intdigest(record.data) for record in documents]
    held_out = [text_hash < HELD_OUT_BELOW for text_hash in hashes]
    for split, writer in writers.items():
        chosen = [i for i, held in enumerate(held_out) if held == (split == "heldout")]
        if chosen:
            writer.add(
                [ids[i] for i in chosen],
                [len(documents[i].data) for i in chosen],
                [hashes[i] for i in chosen],
            )


class _SplitWriter:
    """The two files of one split of a shard, under a temporary name."""

    def __init__(self, job: Job, tokenizer: Tokenizer, name: str, split: str):
        self._dtype, self._vocab_size = np.dtype(job.dtype), tokenizer.vocab_size
        self._bos = np.array([tokenizer.bos_id] if job.add_bos else [], tokenizer.dtype)
        self._eos = np.array([tokenizer.eos_id] if job.add_eos else [], tokenizer.dtype)
        self._paths = [job.folder / f"{name}.{split}.{what}" for what in ("tokens", "documents")]
        self._tokens, self._documents = (path.open("wb") for path in self._paths)
        self._counts = Split(tokens=0, documents=0, bytes=0, hash="")
        self._content = xxhash.xxh3_128()

    def add(self, ids: list[np.ndarray], n_bytes: list[int], hashes: list[int]) -> None:
        lengths = [len(self._bos) + len(part) + len(self._eos) for part in ids]
        tokens = np.concatenate([piece for part in ids for piece in (self._bos, part, self._eos)])
        largest = int(tokens.max(initial=0))
        if largest >= self._vocab_size:
            raise UserError(
                f"data.tokenizer: gave token {largest}, but its vocabulary is {self._vocab_size}"
            )
        data = tokens.astype(self._dtype, copy=False).data
        self._tokens.write(data)
        self._content.update(data)
        hash_column = np.array(hashes, np.uint64).view(np.int64)
        table = np.column_stack([lengths, n_bytes, hash_column]).astype("<i8")
        self._documents.write(table.tobytes())
        self._counts.tokens += len(tokens)
        self._counts.documents += len(ids)
        self._counts.bytes += sum(n_bytes)

    def finish(self) -> Split:
        for file in (self._tokens, self._documents):
            file.flush()
            os.fsync(file.fileno())
        self._counts.hash = self._content.hexdigest()
        return self._counts

    def discard(self) -> None:
        """Remove what still has its temporary name."""
        for file, path in zip((self._tokens, self._documents), self._paths, strict=True):
            file.close()
            path.unlink(missing_ok=True)
