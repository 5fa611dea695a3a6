"""Text -> token shards, once: builds what is missing or stale, opens what exists.

The shards of a source are in `<cache_dir>/<source>-<key>`; the key is a hash of the tokenizer, how
documents begin and end, and `data.source_files`. A cache that is up to date is only read.
"""

import hashlib
import json
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from lingua.chat import find_template, open_chat, special_names
from lingua.data.args import DataArgs, SourceFiles
from lingua.data.prepare.files import STDLIB, FilePart, find_files
from lingua.data.prepare.units import (
    UNIT_BYTES,
    Job,
    build_units,
    check_sample,
    finished,
    plan_units,
    why_stale,
)
from lingua.data.prepare.verify import remove_damaged
from lingua.data.shards import FORMAT_VERSION, MANIFEST, N_KINDS, SPLITS, Manifest, Source
from lingua.errors import UserError, all_of
from lingua.files import write_atomically
from lingua.format import counted
from lingua.lock import exclusive, is_free
from lingua.tokenizer import Tokenizer

Report = Callable[[str], None]  # gets lines for the user


def prepare_sources(
    args: DataArgs,
    tokenizer: Tokenizer,
    report: Report,
    processes: int | None = None,
    validation: Sequence[str] = (),
) -> dict[str, Source]:
    """Every source with a weight above 0 at some step, and those of `validation.sources`, built
    where needed. Raises UserError."""
    check_sources(args, tokenizer, validation)
    return {
        name: prepare_source(name, args, tokenizer, report, processes)
        for name in [*args.used_sources(), *validation]
    }


def check_sources(args: DataArgs, tokenizer: Tokenizer, validation: Sequence[str] = ()) -> None:
    """Raises UserError with all mistakes of all sources: the first may take hours to tokenize."""
    used: dict[str, str] = {}  # the source of each file that is trained on

    def check_files(name: str) -> None:
        paths = [os.path.realpath(file.full) for file in source_files(name, args)]
        if name not in validation:
            used.update(dict.fromkeys(paths, name))
        elif shared := next((path for path in paths if path in used), None):
            raise UserError(
                f"{args.source_key(name)}: {shared} is also trained on, as {used[shared]}"
            )

    checks: list[Callable[[], object]]
    if args.chat is None:
        checks = [
            partial(tokenizer.encode, "", bos=args.add_bos),
            partial(tokenizer.encode, "", eos=args.add_eos),
        ]
    else:
        checks = [partial(open_chat, args.tokenizer, tokenizer, args.chat.template)]
    checks += [partial(check_files, name) for name in [*args.used_sources(), *validation]]
    wrong: list[str] = []
    for check in checks:
        try:
            check()
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        raise all_of(wrong)


def open_sources(
    args: DataArgs, tokenizer: Tokenizer, names: Iterable[str] | None = None
) -> dict[str, Source]:
    """The sources that another process has prepared, without a look at their text: those to train
    on, or `names`."""
    names = args.used_sources() if names is None else names
    return {name: Source.open(shard_folder(name, args, tokenizer)) for name in names}


def source_files(name: str, args: DataArgs) -> list[FilePart]:
    """The whole files of a source. Raises UserError."""
    patterns = args.source_files.get(name, SourceFiles()).files
    try:
        return find_files(name, Path(args.root_dir), patterns, args.source_key(name))
    except OSError as error:
        raise _cannot_prepare(args.source_key(name), error, args.root_dir) from error


def _cannot_prepare(key: str, error: OSError, place: str | Path) -> UserError:
    reason = f"{error.filename or place}: {error.strerror or error}"
    return UserError(f"{key}: cannot be prepared: {reason}")


def shard_folder(name: str, args: DataArgs, tokenizer: Tokenizer) -> Path:
    """The folder of the shards of source `name`."""
    key = [FORMAT_VERSION, tokenizer.fingerprint(), args.add_bos, args.add_eos]
    key.append(asdict(args.source_files.get(name, SourceFiles())))
    if args.chat is not None:
        text, _ = find_template(args.tokenizer, args.chat.template)
        names = special_names(args.tokenizer, tokenizer)
        key.append([text, names, args.chat.on_long_example, args.row_tokens])
        key += ["pairs"] * args.chat.pairs
    if name == STDLIB:  # machines that share the folder may have different ones
        key.append(platform.python_version())
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=6).hexdigest()
    return Path(args.cache_dir or Path(args.root_dir, ".tokens")) / f"{name}-{digest}"


def prepare_source(
    name: str,
    args: DataArgs,
    tokenizer: Tokenizer,
    report: Report,
    processes: int | None = None,
    unit_bytes: int = UNIT_BYTES,
) -> Source:
    """One source, built if it is missing or its text changed. Raises UserError.

    The shards do not depend on `processes` (default: one per core). They do depend on `unit_bytes`,
    which is the same for all who share the folder.
    """
    job = _job(name, args, tokenizer)
    processes = processes or len(os.sched_getaffinity(0))
    try:
        while True:
            files = source_files(name, args)
            manifest, why = _valid_manifest(job, files, report)
            if manifest is not None:
                break
            check_sample(files, job, tokenizer)
            job.folder.mkdir(parents=True, exist_ok=True)
            units = plan_units(files, unit_bytes)
            build_units(units, job, tokenizer, processes, why, report)
            lock = job.folder.with_name(f"{job.folder.name}.lock")
            with exclusive(lock, report, patient=True):
                # Whoever held the lock before has written it, or the text has changed meanwhile.
                if _valid_manifest(job, files, report)[0] is None:
                    _write_manifest([finished(unit, job) for unit in units], job)
                    _valid_manifest(job, files, report)  # so that of many processes one verifies it
    except OSError as error:
        raise _cannot_prepare(job.key, error, job.folder) from error
    for line in _summary(manifest, trained_on=name in args.used_sources()):
        report(f"{job.key}: {line}")
    return Source(job.folder, manifest)


def _job(name: str, args: DataArgs, tokenizer: Tokenizer) -> Job:
    n_values = tokenizer.vocab_size * (1 if args.chat is None else N_KINDS)
    manifest = Manifest(
        version=FORMAT_VERSION,
        source=name,
        tokenizer={
            "name": tokenizer.name,
            "fingerprint": tokenizer.fingerprint(),
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
        },
        add_bos=args.add_bos,
        add_eos=args.add_eos,
        dtype=np.min_scalar_type(n_values - 1).newbyteorder("<").str,
        chat=args.chat is not None,
    )
    return Job(args, shard_folder(name, args, tokenizer), manifest)


def _valid_manifest(job: Job, files: list[FilePart], report: Report) -> tuple[Manifest | None, str]:
    """(the manifest, "") if the shards are those of `files` as they are now, else (None, why)."""
    manifest = Manifest.load(job.folder)
    if manifest is None:
        return None, "no shards yet"
    before = [part.mtime_ns for part in manifest.parts]
    if why := why_stale(manifest, files, job):
        return None, why
    if before != [part.mtime_ns for part in manifest.parts]:
        with suppress(OSError):  # only saves reading the files again; the cache may be read-only
            write_atomically(job.folder / MANIFEST, manifest.to_json())
    if damaged := remove_damaged(job.folder, manifest, report):
        return None, f"{damaged[0]} was damaged"
    return manifest, ""


def _summary(manifest: Manifest, trained_on: bool) -> Iterator[str]:
    """Totals of both splits, of a source that is trained on the held-out one too, and what was left
    out."""
    held_out, held_out_tokens = (manifest.total("heldout", w) for w in ("documents", "tokens"))
    documents, tokens, n_bytes = (
        sum(manifest.total(split, what) for split in SPLITS)
        for what in ("documents", "tokens", "bytes")
    )
    if manifest.heldout_tail:
        documents, part = 1, "the end of it"
    else:
        part = f"{counted(held_out, 'document')} ({held_out / max(1, documents):.2%})"
    total = (
        f"{counted(documents, 'document')}, {counted(tokens, 'token')} "
        f"({n_bytes / max(1, tokens):.2f} bytes a token)"
    )
    share = f"{counted(held_out_tokens, 'token')} ({held_out_tokens / max(1, tokens):.2%})"
    yield f"{total}; held out {part}, {share}" if trained_on else total
    if manifest.skipped:
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in manifest.skipped.items())
        yield f"{counted(sum(manifest.skipped.values()), 'bad record')} left out ({kinds})"
    if manifest.cut:
        yield f"{counted(manifest.cut, 'example')} longer than a row cut at the end"
    if manifest.lost:
        yield (
            f"the tokenizer loses text: decoding does not give back {manifest.lost:.2%} of the "
            "characters, in a sample"
        )
    if manifest.rough_cuts:
        yield (
            "long documents were tokenized in pieces; the tokens at "
            f"{counted(manifest.rough_cuts, 'cut')} where no word begins may differ from those of "
            "the whole document"
        )


def _write_manifest(shares: list[Manifest | None], job: Job) -> None:
    """Write the manifest of all units, and remove what is not part of it. Does nothing where a unit
    is no longer finished."""
    built = [share for share in shares if share is not None]
    if len(built) < len(shares):
        return
    shards = [shard for share in built for shard in share.shards]
    content = [job.manifest.dtype, [[s.train.hash, s.heldout.hash] for s in shards]]
    skipped = sum((Counter(share.skipped) for share in built), Counter())
    manifest = replace(
        job.manifest,
        parts=[part for share in built for part in share.parts],
        shards=shards,
        skipped=dict(sorted(skipped.items())),
        rough_cuts=sum(share.rough_cuts for share in built),
        fingerprint=hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest(),
        heldout_tail=any(share.heldout_tail for share in built),
        lost=sum(share.lost for share in built) / len(built),
        cut=sum(share.cut for share in built),
    )
    write_atomically(job.folder / MANIFEST, manifest.to_json())
    # Of what killed or earlier builds left, nothing that is in use is removed. Names of all files
    # of a unit begin with its id, of 16 characters.
    keep = {MANIFEST, *(f"{shard.name[:16]}.json" for shard in shards)}
    keep = keep.union(*(shard.files(manifest.dtype) for shard in shards))
    for path in job.folder.iterdir():
        of_no_unit = path.name not in keep and ".lock" not in path.name
        if of_no_unit and is_free(job.folder / f"{path.name[:16]}.lock"):
            path.unlink(missing_ok=True)
