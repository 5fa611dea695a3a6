"""The unit of preparation: neighbouring files, or a part of a large one, that becomes one shard.

Units do not know each other: any number of processes may build them in any order. A finished unit
leaves a record beside its shard, by which a build that was killed goes on. A shard's name carries
the content of its files, so that one that changed never takes the place of one in use.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import xxhash

from lingua.data.prepare.files import TextFile
from lingua.data.prepare.records import Part, TextOptions, read_part, split
from lingua.data.shards import InputPart, Shard, shard_files, shard_from_json
from lingua.tokenizer import TokenizerArgs

UNIT_BYTES = 128 * 2**20  # small files are grouped and large ones cut by this size
THREADS = 8  # that wait for the file system at once


@dataclass(frozen=True)
class Unit:
    id: str  # of the parts' paths and places
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        return sum(part.end - part.begin for part in self.parts)


@dataclass(frozen=True)
class Job:
    """What all units of a source have in common. Goes to the worker processes."""

    source: str
    folder: Path  # of the shards
    text: TextOptions
    tokenizer: TokenizerArgs
    add_bos: bool
    add_eos: bool
    dtype: str
    skip_bad_records: bool


@dataclass
class UnitRecord:
    """A finished unit."""

    parts: list[InputPart]
    shard: Shard
    skipped: dict[str, int]  # bad records by kind
    rough_cuts: int  # see lingua.data.pieces


def plan_units(files: list[TextFile], unit_bytes: int) -> list[Unit]:
    """Neighbouring files together while they are at most `unit_bytes`; what a file was cut into is
    a unit each, since its size on disk need not be that of its text."""
    with ThreadPoolExecutor(THREADS) as threads:
        parts = chain.from_iterable(threads.map(partial(split, most=unit_bytes), files))
    groups: list[list[Part]] = []
    size = 0
    for part in parts:
        size += part.end - part.begin
        alone = not (part.is_whole and groups and groups[-1][-1].is_whole)
        if alone or size > unit_bytes:
            groups.append([])
            size = part.end - part.begin
        groups[-1].append(part)
    return [Unit(_unit_id(group), tuple(group)) for group in groups]


def _unit_id(parts: list[Part]) -> str:
    places = json.dumps([(part.file.path, part.begin, part.end) for part in parts])
    return hashlib.blake2b(places.encode(), digest_size=8).hexdigest()


def unchanged(file: TextFile, known: InputPart) -> bool:
    """Whether the part still has the content it had; read only where the file's stat differs."""
    if file.size != known.size:
        return False
    return file.mtime_ns == known.mtime_ns or _hash(file, known) == known.hash


def _hash(file: TextFile, known: InputPart) -> str:
    content = xxhash.xxh3_128()
    with open(file.full, "rb") as handle:
        for block in read_part(handle, Part(file, known.begin, known.end)):
            content.update(block)
    return content.hexdigest()


def with_stat_of(file: TextFile, known: InputPart) -> InputPart:
    return replace(known, size=file.size, mtime_ns=file.mtime_ns)


def is_recorded(unit: Unit, job: Job) -> bool:
    return record_path(unit, job).exists()


def finished(unit: Unit, job: Job) -> UnitRecord | None:
    """The record of the unit if it is built and its files are as they were."""
    try:
        fields = json.loads(record_path(unit, job).read_text(encoding="utf-8"))
        fields["parts"] = [InputPart(**part) for part in fields["parts"]]
        fields["shard"] = shard_from_json(fields["shard"])
        record = UnitRecord(**fields)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    if record.skipped and not job.skip_bad_records:
        return None
    if [(p.path, p.begin, p.end) for p in record.parts] != [
        (p.file.path, p.begin, p.end) for p in unit.parts
    ]:
        return None
    for name, size in shard_files(record.shard, job.dtype).items():
        path = job.folder / name
        if not path.is_file() or path.stat().st_size != size:
            return None
    if not all(unchanged(p.file, known) for p, known in zip(unit.parts, record.parts, strict=True)):
        return None
    record.parts = [
        with_stat_of(p.file, known) for p, known in zip(unit.parts, record.parts, strict=True)
    ]
    return record


def record_path(unit: Unit, job: Job) -> Path:
    return job.folder / f"{unit.id}.json"


def lock_path(unit: Unit, job: Job) -> Path:
    """Of the lock that its builder holds."""
    return job.folder / f"{unit.id}.lock"


def unit_files(unit: Unit, record: UnitRecord, job: Job) -> set[str]:
    """The names of all files that belong to a finished unit."""
    return {record_path(unit, job).name, *shard_files(record.shard, job.dtype)}
