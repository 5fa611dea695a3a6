"""Text -> token shards, once: builds what is missing or stale, opens what is there.

    sources = prepare_sources(args.data, tokenizer, report=print)

The shards of a source lie in `<cache_dir>/<source>-<key>`, the key standing for the tokenizer and
how documents begin and end. Any number of processes may call this at the same time: one builds,
the others wait. A cache that is up to date is only read.
"""

import hashlib
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lingua.data.args import DataArgs
from lingua.data.files import STDLIB, TextFile, find_files
from lingua.data.lock import locked
from lingua.data.shards import (
    FORMAT_VERSION,
    MANIFEST,
    Manifest,
    Source,
    shard_files,
    write_atomically,
)
from lingua.data.units import (
    UNIT_BYTES,
    Job,
    Unit,
    UnitRecord,
    finished,
    plan_units,
    record_files,
    unchanged,
    with_stat_of,
)
from lingua.data.workers import build_units
from lingua.errors import UserError
from lingua.tokenizer import Tokenizer

HASH_THREADS = 8


def prepare_sources(
    args: DataArgs, tokenizer: Tokenizer, report: Callable[[str], None], progress: bool = False
) -> dict[str, Source]:
    """Every source with a weight above 0, built where needed.

    `report` gets lines for the user, `progress` shows a bar on stderr. Raises UserError.
    """
    names = used_sources(args)
    wrong: list[str] = []
    for what, wanted, token in (
        ("bos", args.add_bos, tokenizer.bos_id),
        ("eos", args.add_eos, tokenizer.eos_id),
    ):
        if wanted and token is None:
            wrong.append(
                f"data.add_{what} = true: the {tokenizer.name} tokenizer has no {what} token; "
                f"set data.add_{what}=false"
            )
    for name in names:
        try:
            find_files(name, Path(args.root_dir))
        except UserError as error:
            wrong.append(str(error))
    if wrong:  # all of them before the first is tokenized, which may take hours
        raise UserError("\n".join(wrong))
    return {name: prepare_source(name, args, tokenizer, report, progress) for name in names}


def open_sources(args: DataArgs, tokenizer: Tokenizer) -> dict[str, Source]:
    """The sources that another process has prepared, without looking at the text again."""
    return {name: Source.open(shard_folder(name, args, tokenizer)) for name in used_sources(args)}


def used_sources(args: DataArgs) -> list[str]:
    return sorted(name for name, weight in args.sources.items() if weight > 0)


def shard_folder(name: str, args: DataArgs, tokenizer: Tokenizer) -> Path:
    """Where the shards of source `name` lie."""
    key = [FORMAT_VERSION, tokenizer.fingerprint(), args.add_bos, args.add_eos]
    if name == STDLIB:  # machines that share the folder may have different ones
        key.append(platform.python_version())
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=6).hexdigest()
    return args.cache_path() / f"{name}-{digest}"


def prepare_source(
    name: str,
    args: DataArgs,
    tokenizer: Tokenizer,
    report: Callable[[str], None],
    progress: bool = False,
    processes: int | None = None,
    unit_bytes: int = UNIT_BYTES,
) -> Source:
    """One source, built if it is missing or its text changed. Raises UserError.

    `processes` (default: one per core) does not change the result; `unit_bytes` does, and is the
    same for all who share the folder.
    """
    files = find_files(name, Path(args.root_dir))
    folder = shard_folder(name, args, tokenizer)
    skip = args.on_bad_record == "skip"
    manifest, _ = _valid_manifest(folder, files, skip)
    if manifest is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder.with_name(f"{folder.name}.lock"), report):
                # Whoever held the lock may have built it, and the text may have changed since.
                files = find_files(name, Path(args.root_dir))
                manifest, why = _valid_manifest(folder, files, skip)
                if manifest is None:
                    dtype = np.min_scalar_type(tokenizer.vocab_size - 1).newbyteorder("<").str
                    job = Job(name, folder, args.tokenizer, args.add_bos, args.add_eos, dtype, skip)
                    units = plan_units(files, unit_bytes)
                    manifest = _build(units, job, tokenizer, report, why, progress, processes)
        except OSError as error:
            reason = f"{error.filename or folder}: {error.strerror or error}"
            raise UserError(f"data.sources.{name}: cannot be prepared: {reason}") from error
    if manifest.skipped:
        kinds = ", ".join(f"{n} {kind}" for kind, n in manifest.skipped.items())
        total = sum(manifest.skipped.values())
        report(f"data.sources.{name}: {total} bad records left out ({kinds})")
    return Source(folder, manifest)


# ---- is it up to date?


def _valid_manifest(folder: Path, files: list[TextFile], skip: bool) -> tuple[Manifest | None, str]:
    """(the manifest, "") if the shards stand for `files` as they are, else (None, why not)."""
    manifest = Manifest.load(folder)
    if manifest is None:
        return None, "no shards yet"
    if manifest.skipped and not skip:
        return None, "shards were made with data.on_bad_record: skip"
    if why := _missing_shard(folder, manifest):
        return None, why
    known = {file.path: file for file in manifest.files}
    found = {file.path: file for file in files}
    for changed, what in ((found.keys() - known, "was added"), (known.keys() - found, "is gone")):
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            return None, f"{min(changed)}{more} {what}"
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        same = list(threads.map(lambda file: unchanged(file, known[file.path]), files))
    if not all(same):
        return None, f"{files[same.index(False)].path} has changed"
    fresh = [with_stat_of(known[file.path], file) for file in files]
    if fresh != manifest.files:
        manifest.files = fresh
        with suppress(OSError):  # only saves reading the files again; the cache may be read-only
            write_atomically(folder / MANIFEST, manifest.to_json())
    return manifest, ""


def _missing_shard(folder: Path, manifest: Manifest) -> str:
    with os.scandir(folder) as entries:
        sizes = {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
    for shard in manifest.shards:
        for name, size in shard_files(shard, manifest.dtype).items():
            if name not in sizes:
                return f"{name} is gone"
            if sizes[name] != size:
                return f"{name} has {sizes[name]} bytes instead of {size}"
    return ""


# ---- building


def _build(
    units: list[Unit],
    job: Job,
    tokenizer: Tokenizer,
    report: Callable[[str], None],
    why: str,
    progress: bool,
    processes: int | None,
) -> Manifest:
    todo = [unit for unit in units if finished(unit, job) is None]
    size = sum(unit.size for unit in todo)
    report(
        f"data.sources.{job.source}: tokenizing {size / 1e6:,.1f} MB into {job.folder} ({why}; "
        f"{len(units) - len(todo)} of {len(units)} parts are there already)"
    )
    processes = processes or len(os.sched_getaffinity(0))
    with tqdm(
        total=size,
        desc=f"tokenizing {job.source}",
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        disable=not progress,
    ) as bar:
        build_units(todo, job, tokenizer, processes, bar.update)
    records = [finished(unit, job) for unit in units]
    if any(record is None for record in records):
        raise UserError(f"data.sources.{job.source}: its files changed meanwhile; start again")
    manifest = _manifest(records, job, tokenizer)
    write_atomically(job.folder / MANIFEST, manifest.to_json())
    _remove_others(units, records, job)
    tokens, n_bytes = manifest.total("train", "tokens"), manifest.total("train", "bytes")
    report(
        f"data.sources.{job.source}: {manifest.total('train', 'documents'):,} documents, "
        f"{tokens:,} tokens to train on ({n_bytes / max(tokens, 1):.2f} bytes a token), "
        f"{manifest.total('heldout', 'documents'):,} documents held out"
    )
    return manifest


def _manifest(records: list[UnitRecord], job: Job, tokenizer: Tokenizer) -> Manifest:
    shards = [record.shard for record in records]
    content = [job.dtype, [[s.train.hash, s.heldout.hash] for s in shards]]
    skipped: Counter[str] = Counter()
    for record in records:
        skipped.update(record.skipped)
    return Manifest(
        version=FORMAT_VERSION,
        source=job.source,
        tokenizer={
            "name": tokenizer.name,
            "fingerprint": tokenizer.fingerprint(),
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
        },
        add_bos=job.add_bos,
        add_eos=job.add_eos,
        dtype=job.dtype,
        files=[file for record in records for file in record.files],
        shards=shards,
        skipped=dict(sorted(skipped.items())),
        fingerprint=hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest(),
    )


def _remove_others(units: list[Unit], records: list[UnitRecord], job: Job) -> None:
    """Remove what killed or earlier builds left in the folder."""
    keep = {MANIFEST}
    for unit, record in zip(units, records, strict=True):
        keep |= record_files(unit, record, job)
    for path in job.folder.iterdir():
        if path.name not in keep and path.is_file():
            path.unlink(missing_ok=True)
