"""Builds the token shards of a source with processes of this machine, where those in the cache are
not up to date (lingua.data.sources). One run builds a source at a time; another one waits for it.
Its units (lingua.tools.prepare.units) are finished in any order.
"""

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event

from tqdm import tqdm

from lingua.base.errors import UserError
from lingua.base.files import write_atomically
from lingua.base.lock import exclusive
from lingua.data.cache import ShardSpec, current_manifest
from lingua.data.files import IO_THREADS, FilePart
from lingua.data.shards import SHARDS_MANIFEST, Manifest
from lingua.parallel.environment import detect_launch
from lingua.parallel.signals import STOPPING
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import Tokenizer
from lingua.tools.prepare.conversations import unlearned_end
from lingua.tools.prepare.units import (
    UNIT_BYTES,
    Unit,
    build_unit,
    check_sample,
    finished,
    least_bound,
    plan_units,
)

MAX_WAITED_BYTES = 10 * 10**9  # text for which other machines may wait while one tokenizes it
PROGRESS_S = 0.2


def build_source(
    spec: ShardSpec,
    files: list[FilePart],
    tokenizer: Tokenizer,
    why: str,
    report: Callable[[str], None],
    processes: int | None = None,
    unit_bytes: int = UNIT_BYTES,
) -> None:
    """Build the shards of `files`, the text of a source, and their manifest. `why` they are built
    is reported. Where files change meanwhile, there is no manifest of them at the end. Raises
    UserError and OSError; finished units remain.

    The shards do not depend on `processes` (default: one per core). They do depend on `unit_bytes`.
    """
    launch, size = detect_launch(), sum(file.size for file in files)
    if launch.world_size > launch.local_world_size and size > MAX_WAITED_BYTES:
        raise UserError(
            f"{spec.key}: {why}, and {size / 1e9:,.0f} GB of text are too much for the other "
            "machines to wait for one: run `python -m lingua data prepare` with this configuration "
            "on one machine first"
        )
    check_sample(files, spec, tokenizer)
    spec.folder.mkdir(parents=True, exist_ok=True)
    with exclusive(spec.folder.with_name(f"{spec.folder.name}.lock"), report, patient=True) as lock:
        if current_manifest(spec, files, report)[0] is not None:
            return  # another run has built them
        _remove_unfinished(spec, report)
        units = plan_units(files, unit_bytes)
        todo = [unit for unit, share in zip(units, _shares(units, spec), strict=True) if not share]
        total = sum(part.end - part.begin for unit in todo for part in unit.parts)
        report(
            f"{spec.key}: tokenizing {total / 1e6:,.1f} MB into {spec.folder} "
            f"({why}; parts to build: {len(todo):,} of {len(units):,})"
        )
        if (note := unlearned_end(spec.args, tokenizer)) is not None:
            report(f"{spec.key}: {note}")
        often = {"mininterval": 0.2 if sys.stderr.isatty() else 30}  # a log file: now and then
        name = f"tokenizing {spec.manifest.source}"
        with tqdm(total=total, desc=name, unit="B", unit_scale=True, **often) as bar:
            processes = min(len(todo), processes or len(os.sched_getaffinity(0)))
            if processes > 1:
                _build_in_processes(todo, spec, processes, bar)
            else:
                for unit in todo:
                    build_unit(unit, spec, tokenizer, bar.update)
        spec = _hold_out_one(units, spec, tokenizer)
        lock.check()
        _write_manifest(_shares(units, spec), spec)
        current_manifest(spec, files, report)  # verifies them for all who wait


def _shares(units: list[Unit], spec: ShardSpec) -> list[Manifest | None]:
    with futures.ThreadPoolExecutor(IO_THREADS) as threads:
        return list(threads.map(partial(finished, spec=spec), units))


def _hold_out_one(units: list[Unit], spec: ShardSpec, tokenizer: Tokenizer) -> ShardSpec:
    """Returns the specification by which one document is held out at least; its unit is built."""
    shares = _shares(units, spec)
    if not any(share and share.total("heldout", "documents") for share in shares):
        below = least_bound(draw for share in shares if share for draw in share.lowest)
        spec = replace(spec, manifest=replace(spec.manifest, held_out_below=below))
        for unit, share in zip(units, shares, strict=True):
            if share and below - 1 in share.lowest:
                build_unit(unit, spec, tokenizer, lambda n_bytes: None)
    return spec


def _remove_unfinished(spec: ShardSpec, report: Callable[[str], None]) -> None:
    """Remove what earlier builds, also those of earlier versions, left of unfinished units."""
    left = [p for p in spec.folder.iterdir() if p.suffix == ".lock" or ".tmp-" in p.name]
    if left:
        names = ", ".join(sorted({path.name[:16] for path in left}))
        report(f"{spec.key}: parts that an earlier preparation did not finish are removed: {names}")
    for path in left:
        path.unlink()


# ---- processes


def _build_in_processes(units: list[Unit], spec: ShardSpec, processes: int, bar: tqdm) -> None:
    context = multiprocessing.get_context("spawn")  # this process may have threads and use CUDA
    n_read, cancelled = context.Value("q", 0), context.Event()
    pool = futures.ProcessPoolExecutor(processes, context, _start_worker, (spec, n_read, cancelled))

    def submit() -> set:
        resource_tracker.ensure_running()  # its own start unblocks signals
        # Workers inherit it: a signal would end them with a traceback while they import.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        return {pool.submit(_build_in_worker, unit) for unit in units}

    try:
        with futures.ThreadPoolExecutor(1) as thread:  # a signal interrupts this one, no start
            waiting = thread.submit(submit).result()
        while waiting:
            done, waiting = futures.wait(waiting, PROGRESS_S, futures.FIRST_EXCEPTION)
            bar.update(n_read.value - bar.n)
            for future in done:
                future.result()
    except BrokenProcessPool:
        raise UserError(
            f"{spec.key}: a process that tokenized it was killed or failed (out of memory?); start "
            "again to continue after the finished parts"
        ) from None
    finally:
        cancelled.set()
        pool.shutdown(cancel_futures=True)


_worker: dict[str, Callable[[Unit], None]] = {}  # `build` of a worker process


def _start_worker(spec: ShardSpec, n_read: "Synchronized[int]", cancelled: Event) -> None:
    # Signals to all, such as Slurm's SIGTERM, are for the parent, which stops its workers.
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    # There is one process per core already: threads of the tokenizers library would slow it down.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()

    def on_read(n_bytes: int) -> None:
        if cancelled.is_set():
            raise futures.CancelledError
        with n_read.get_lock():
            n_read.value += n_bytes

    tokenizer = build_tokenizer(spec.args.tokenizer)
    _worker["build"] = partial(build_unit, spec=spec, tokenizer=tokenizer, on_read=on_read)


def _exit_with_parent() -> None:
    """A worker waits for its next unit for ever where its parent was killed."""
    multiprocessing.parent_process().join()  # type: ignore[union-attr]  # only a child calls it
    os._exit(1)


def _build_in_worker(unit: Unit) -> None:
    _worker["build"](unit)


# ---- the manifest


def _write_manifest(shares: list[Manifest | None], spec: ShardSpec) -> None:
    """Write the manifest of all units, and remove what is not part of it. Does nothing where a unit
    is no longer finished."""
    built = [share for share in shares if share is not None]
    if len(built) < len(shares):
        return
    shards = [shard for share in built for shard in share.shards]
    content = [spec.manifest.dtype, [[s.train.hash, s.heldout.hash] for s in shards]]
    skipped = sum((Counter(share.skipped) for share in built), Counter())
    manifest = replace(
        spec.manifest,
        parts=[part for share in built for part in share.parts],
        shards=shards,
        skipped=dict(sorted(skipped.items())),
        rough_cuts=sum(share.rough_cuts for share in built),
        fingerprint=hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest(),
        heldout_tail=any(share.heldout_tail for share in built),
        lost=sum(share.lost for share in built) / len(built),
        cut=sum(share.cut for share in built),
    )
    write_atomically(spec.folder / SHARDS_MANIFEST, manifest.to_json())
    # Names of all files of a unit begin with its id, of 16 characters.
    keep = {SHARDS_MANIFEST, *(f"{shard.name[:16]}.json" for shard in shards)}
    for path in spec.folder.iterdir():
        if path.name not in keep.union(*(shard.files(manifest.dtype) for shard in shards)):
            path.unlink(missing_ok=True)
