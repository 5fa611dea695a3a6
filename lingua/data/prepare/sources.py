"""Text -> token shards, once: builds what is missing or stale, opens what exists.

The shards of a source lie in `<cache_dir>/<source>-<key>`, the key standing for the tokenizer, how
documents begin and end, and `data.source_files`. A cache that is up to date is only read.
"""

import hashlib
import json
import os
import platform
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np

from lingua.data.args import DataArgs, SourceFiles
from lingua.data.prepare.build import bytes_per_byte
from lingua.data.prepare.files import STDLIB, TextFile, find_files
from lingua.data.prepare.progress import Progress
from lingua.data.prepare.records import TextOptions
from lingua.data.prepare.units import (
    THREADS,
    UNIT_BYTES,
    Job,
    Unit,
    UnitRecord,
    finished,
    is_recorded,
    lock_path,
    plan_units,
    record_path,
    unchanged,
    unit_files,
    with_stat_of,
)
from lingua.data.prepare.workers import build_units
from lingua.data.shards import (
    FORMAT_VERSION,
    MANIFEST,
    InputPart,
    Manifest,
    Source,
    shard_files,
    write_atomically,
)
from lingua.errors import UserError
from lingua.lock import claimed, holder, is_claim, is_free, locked, waits
from lingua.tokenizer import Tokenizer


def prepare_sources(
    args: DataArgs,
    tokenizer: Tokenizer,
    report: Callable[[str], None],
    progress: bool = False,
    processes: int | None = None,
) -> dict[str, Source]:
    """Every source with a weight above 0 at some step, built where needed.

    `report` gets lines for the user, `progress` shows a bar on stderr. Raises UserError.
    """
    check_sources(args, tokenizer)
    return {
        name: prepare_source(name, args, tokenizer, report, progress, processes)
        for name in args.used_sources()
    }


def check_sources(args: DataArgs, tokenizer: Tokenizer) -> None:
    """Raises UserError with all that is wrong: the first may take hours to tokenize."""
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
    for name in args.used_sources():
        try:
            source_files(name, args)
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        raise UserError("\n".join(wrong))


def open_sources(args: DataArgs, tokenizer: Tokenizer) -> dict[str, Source]:
    """The sources that another process has prepared, without looking at the text again."""
    return {name: Source.open(shard_folder(name, args, tokenizer)) for name in args.used_sources()}


def source_files(name: str, args: DataArgs) -> list[TextFile]:
    """The files of a source. Raises UserError."""
    try:
        return find_files(name, Path(args.root_dir), _spec(name, args).files)
    except OSError as error:
        raise _cannot(name, error, args.root_dir) from error


def text_options(name: str, args: DataArgs, scratch: Path) -> TextOptions:
    """How the files of a source are read."""
    key = _spec(name, args).text_key
    is_python = name == STDLIB and not _spec(name, args).files
    return TextOptions((key,) if key else ("text", "content"), is_python, scratch)


def _spec(name: str, args: DataArgs) -> SourceFiles:
    return args.source_files.get(name, SourceFiles())


def _cannot(name: str, error: OSError, place: str | Path) -> UserError:
    reason = f"{error.filename or place}: {error.strerror or error}"
    return UserError(f"data.sources.{name}: cannot be prepared: {reason}")


def shard_folder(name: str, args: DataArgs, tokenizer: Tokenizer) -> Path:
    """Where the shards of source `name` lie."""
    key = [FORMAT_VERSION, tokenizer.fingerprint(), args.add_bos, args.add_eos]
    key.append(asdict(_spec(name, args)))
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
    folder = shard_folder(name, args, tokenizer)
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1).newbyteorder("<").str
    skip = args.on_bad_record == "skip"
    text = text_options(name, args, folder)
    job = Job(name, folder, text, args.tokenizer, args.add_bos, args.add_eos, dtype, skip)
    processes = processes or len(os.sched_getaffinity(0))
    try:
        while True:
            files = source_files(name, args)
            manifest, why = _valid_manifest(folder, files, skip)
            if manifest is not None:
                break
            folder.mkdir(parents=True, exist_ok=True)
            units = plan_units(files, unit_bytes)
            _build(units, job, tokenizer, report, why, progress, processes)
            with locked(folder.with_name(f"{folder.name}.lock"), report):
                # Whoever held the lock before has written it, or the text has changed meanwhile.
                if _valid_manifest(folder, files, skip)[0] is None:
                    _write_manifest(units, job, tokenizer)
    except OSError as error:
        raise _cannot(name, error, folder) from error
    for line in describe(manifest):
        report(line)
    return Source(folder, manifest)


def describe(manifest: Manifest) -> Iterator[str]:
    """What the shards hold and what was left out."""

    def total(what: str) -> tuple[int, int]:
        """(of both splits, held out)"""
        held_out = manifest.total("heldout", what)
        return manifest.total("train", what) + held_out, held_out

    (documents, held_out), (tokens, held_out_tokens) = total("documents"), total("tokens")
    yield (
        f"data.sources.{manifest.source}: {documents:,} documents, {tokens:,} tokens "
        f"({total('bytes')[0] / max(1, tokens):.2f} bytes a token); held out {held_out:,} "
        f"documents ({held_out / max(1, documents):.2%}), {held_out_tokens:,} tokens "
        f"({held_out_tokens / max(1, tokens):.2%})"
    )
    if manifest.skipped:
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in manifest.skipped.items())
        total_skipped = sum(manifest.skipped.values())
        yield f"data.sources.{manifest.source}: {total_skipped:,} bad records left out ({kinds})"
    if manifest.rough_cuts:
        yield (
            f"data.sources.{manifest.source}: long documents were tokenized in pieces, and at "
            f"{manifest.rough_cuts:,} places, where no word begins, their tokens may not be those "
            "of the whole"
        )


def _valid_manifest(folder: Path, files: list[TextFile], skip: bool) -> tuple[Manifest | None, str]:
    """(the manifest, "") if the shards stand for `files` as they are, else (None, why not)."""
    manifest = Manifest.load(folder)
    if manifest is None:
        return None, "no shards yet"
    if manifest.skipped and not skip:
        return None, "shards were made with data.on_bad_record: skip"
    if why := _missing_shard(folder, manifest):
        return None, why
    found = {file.path: file for file in files}
    known = {part.path for part in manifest.parts}
    for changed, what in ((found.keys() - known, "was added"), (known - found.keys(), "is gone")):
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            return None, f"{min(changed)}{more} {what}"

    def is_same(part: InputPart) -> bool:
        return unchanged(found[part.path], part)

    with ThreadPoolExecutor(THREADS) as threads:
        same = list(threads.map(is_same, manifest.parts))
    if not all(same):
        return None, f"{manifest.parts[same.index(False)].path} has changed"
    fresh = [with_stat_of(found[part.path], part) for part in manifest.parts]
    if fresh != manifest.parts:
        manifest.parts = fresh
        with suppress(OSError):  # only saves reading the files again; the cache may be read-only
            write_atomically(folder / MANIFEST, manifest.to_json())
    return manifest, ""


def _missing_shard(folder: Path, manifest: Manifest) -> str:
    sizes = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # a lock that another process gives back
                sizes[entry.name] = entry.stat().st_size
    for shard in manifest.shards:
        for name, size in shard_files(shard, manifest.dtype).items():
            if name not in sizes:
                return f"{name} is gone"
            if sizes[name] != size:
                return f"{name} has {sizes[name]} bytes instead of {size}"
    return ""


def _build(
    units: list[Unit],
    job: Job,
    tokenizer: Tokenizer,
    report: Callable[[str], None],
    why: str,
    progress: bool,
    processes: int,
) -> None:
    """Build the units together with all other processes that do. All are finished in the end."""
    todo = _unfinished(units, job)
    report(
        f"data.sources.{job.source}: tokenizing {sum(unit.size for unit in todo) / 1e6:,.1f} MB "
        f"into {job.folder} ({why}; {len(units) - len(todo)} of {len(units)} parts are there "
        "already)"
    )
    if todo:
        _check_space(todo, job, tokenizer)
    n_built, told = 0, False
    pauses = waits()
    with Progress(units, job, progress) as bar:
        while todo:
            free = [unit for unit in todo if is_free(lock_path(unit, job))]
            if free:
                n_built += build_units(free, job, tokenizer, processes, bar.show)
                pauses = waits()
            else:
                if not told and (owner := holder(lock_path(todo[0], job))):
                    report(f"waiting for {len(todo)} parts of other processes, such as {owner}")
                    told = True
                time.sleep(next(pauses))
            bar.show(0)
            todo = _unfinished(todo, job)
    report(f"data.sources.{job.source}: all {len(units)} parts are there, {n_built} made here")


def _unfinished(units: list[Unit], job: Job) -> list[Unit]:
    """Those without a record; records that hold no longer are removed."""
    with ThreadPoolExecutor(THREADS) as threads:
        done = list(threads.map(lambda unit: finished(unit, job), units))
    todo = [unit for unit, record in zip(units, done, strict=True) if record is None]
    for unit in todo:
        if is_recorded(unit, job):
            with claimed(lock_path(unit, job)) as mine:
                if mine and finished(unit, job) is None:
                    record_path(unit, job).unlink(missing_ok=True)
    return todo


def _check_space(units: list[Unit], job: Job, tokenizer: Tokenizer) -> None:
    """Refuse to begin what the disk clearly cannot hold, judging by the first text."""
    size = sum(unit.size for unit in units)
    needed = size * bytes_per_byte(units[0], job, tokenizer)
    free = shutil.disk_usage(job.folder).free
    if free < 0.9 * needed:
        raise UserError(
            f"data.sources.{job.source}: the token shards of {size / 1e9:,.1f} GB of files take "
            f"about {needed / 1e9:,.1f} GB, but {job.folder} has {free / 1e9:,.1f} GB left; "
            "data.cache_dir may name another place"
        )


def _write_manifest(units: list[Unit], job: Job, tokenizer: Tokenizer) -> None:
    """Write the manifest of finished units; nothing where one is no longer finished."""
    records = [record for unit in units if (record := finished(unit, job)) is not None]
    if len(records) == len(units):
        write_atomically(job.folder / MANIFEST, _manifest(records, job, tokenizer).to_json())
        _remove_others(units, records, job)


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
        parts=[part for record in records for part in record.parts],
        shards=shards,
        skipped=dict(sorted(skipped.items())),
        rough_cuts=sum(record.rough_cuts for record in records),
        fingerprint=hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest(),
    )


def _remove_others(units: list[Unit], records: list[UnitRecord], job: Job) -> None:
    """Remove what killed or earlier builds left in the folder, but nothing that one is writing."""
    keep = {MANIFEST}
    for unit, record in zip(units, records, strict=True):
        keep |= unit_files(unit, record, job)
    for path in job.folder.iterdir():
        lock = job.folder / f"{path.name[:16]}.lock"
        if path.name in keep or not path.is_file() or not is_free(lock):
            continue
        if not is_claim(path):  # of one that looks whether there is something left to do
            path.unlink(missing_ok=True)
