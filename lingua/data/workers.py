"""Builds units in worker processes."""

import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from lingua.data.units import Job, Unit, build_unit
from lingua.errors import UserError
from lingua.tokenizer import Tokenizer, TokenizerArgs, build_tokenizer

POLL_S = 0.2


def build_units(
    units: list[Unit],
    job: Job,
    tokenizer: Tokenizer,
    processes: int,
    advance: Callable[[int], None],
) -> None:
    """Build all units; the result does not depend on `processes`. One process is this one.

    The first error of a worker is raised here; units that were finished stay.
    """
    if min(processes, len(units)) <= 1:
        for unit in units:
            build_unit(unit, job, tokenizer, advance)
        return
    # Not forked: this process may have threads, and a CUDA context.
    context = multiprocessing.get_context("spawn")
    n_read, stop = context.Value("q", 0), context.Event()
    pool = ProcessPoolExecutor(
        min(processes, len(units)), context, initializer=_start_worker, initargs=(n_read, stop)
    )
    try:
        shown = 0
        waiting = {pool.submit(_build_in_worker, unit, job) for unit in units}
        while waiting:
            done, waiting = wait(waiting, POLL_S, FIRST_COMPLETED)
            for future in done:
                future.result()
            now = n_read.value
            advance(now - shown)
            shown = now
    except BrokenProcessPool:
        raise UserError(
            f"data.sources.{job.source}: a process that tokenized it was killed (out of memory?); "
            "start again to go on after the finished parts"
        ) from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


# ---- in a worker process

_state: dict[str, Any] = {}


def _start_worker(n_read: Any, stop: Any) -> None:
    _state.update(n_read=n_read, stop=stop)
    # Signals to the whole group are for the parent, which stops its workers.
    for number in (signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # One process per core already: threads of the tokenizers library would only get in the way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _build_in_worker(unit: Unit, job: Job) -> None:
    tokenizer = _tokenizer(job.tokenizer.name, job.tokenizer.path)
    build_unit(unit, job, tokenizer, _advance)


@functools.cache
def _tokenizer(name: str, path: str | None) -> Tokenizer:
    return build_tokenizer(TokenizerArgs(name=name, path=path))


def _advance(n_bytes: int) -> None:
    with _state["n_read"].get_lock():
        _state["n_read"].value += n_bytes
    if _state["stop"].is_set():
        raise SystemExit("stopped by the parent process")
