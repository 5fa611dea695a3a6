"""Builds what is left of a source's units, in worker processes that claim them one by one.

The processes of one machine share the work as those of several do: by the lock that the builder of
a unit holds, and the record that a finished one leaves. Nobody hands out work.
"""

import functools
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from lingua.data.prepare.build import build_unit
from lingua.data.prepare.units import Job, Unit, is_recorded, lock_path
from lingua.errors import UserError
from lingua.lock import claimed
from lingua.tokenizer import Tokenizer, TokenizerArgs, build_tokenizer

POLL_S = 0.2


def build_units(
    units: list[Unit],
    job: Job,
    tokenizer: Tokenizer,
    processes: int,
    show: Callable[[int], None],
) -> int:
    """Build all units that nobody else builds, and return their number. What they are does not
    depend on `processes`; one is this one. `show` gets the bytes read for unfinished units.

    The first error of a worker is raised here; units that were finished stay.
    """
    if min(processes, len(units)) <= 1:
        return _build_each(units, job, tokenizer, show)
    processes = min(processes, len(units))
    # Not forked: this process may have threads, and a CUDA context.
    context = multiprocessing.get_context("spawn")
    n_read, started = context.Array("q", processes), context.Value("q", 0)
    stop = context.Event()
    pool = ProcessPoolExecutor(
        processes, context, initializer=_start_worker, initargs=(n_read, started, stop)
    )
    try:
        n_built = 0
        waiting = {pool.submit(_work, units, job) for _ in range(processes)}
        while waiting:
            done, waiting = wait(waiting, POLL_S, FIRST_COMPLETED)
            n_built += sum(future.result() for future in done)
            show(sum(n_read))
        return n_built
    except BrokenProcessPool:
        raise UserError(
            f"data.sources.{job.source}: a process that tokenized it was killed (out of memory?); "
            "start again to go on after the finished parts"
        ) from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _build_each(
    units: list[Unit], job: Job, tokenizer: Tokenizer, show: Callable[[int], None]
) -> int:
    n_built = 0
    start = random.randrange(len(units))  # so that processes seldom meet
    for unit in units[start:] + units[:start]:
        if is_recorded(unit, job):
            continue
        with claimed(lock_path(unit, job)) as mine:
            if mine and not is_recorded(unit, job):
                build_unit(unit, job, tokenizer, show)
                n_built += 1
        show(0)
    return n_built


# ---- in a worker process

_state: dict[str, Any] = {}


def _start_worker(n_read: Any, started: Any, stop: Any) -> None:
    with started.get_lock():
        _state.update(n_read=n_read, number=started.value, stop=stop)
        started.value += 1
    # Signals to all, such as Slurm's SIGTERM, are for the parent, which stops its workers.
    for number in (signal.SIGINT, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # One process per core already: threads of the tokenizers library would only get in the way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _work(units: list[Unit], job: Job) -> int:
    return _build_each(units, job, _tokenizer(job.tokenizer.name, job.tokenizer.path), _show)


@functools.cache
def _tokenizer(name: str, path: str | None) -> Tokenizer:
    return build_tokenizer(TokenizerArgs(name=name, path=path))


def _show(n_bytes: int) -> None:
    _state["n_read"][_state["number"]] = n_bytes
    if _state["stop"].is_set():
        raise SystemExit("stopped by the parent process")
