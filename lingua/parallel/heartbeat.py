"""Where each rank is: a thread of each process writes it to the store, on any device, so that the
ranks that others wait for can be named. A process that is stopped, or whose machine cannot be
reached, writes nothing; one that is behind writes where it is.
"""

import json
import logging
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar

import torch.distributed as dist

T = TypeVar("T")

BEAT_S = 2.0  # seconds between two writes of a rank
SILENT_S = 3 * BEAT_S  # without a write, a rank is silent
STORE_S = 5.0  # seconds for the store to answer
# Seconds a place may take longer than a collective before a thread looks who is late: gloo has
# raised an error by then. NCCL's watchdog aborts the process, later by `ABORT_S`.
LOOK_S, ABORT_S = 10.0, 45.0
MAX_SHOWN = 16  # ranks named in one report
LOST = ("gloo/", "Connection closed", "Connection reset", "Broken pipe", "Timed out")

logger = logging.getLogger(__name__)


class Beat(NamedTuple):
    """What a rank writes."""

    time: float  # by the clock of its host, in seconds since the epoch
    place: int  # number of calls of `at`, which all ranks make in the same order
    step: int
    phase: str
    function: str  # where its main thread is
    host: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}, in {self.function}"


class Heartbeat:
    """The thread of this process that writes to the store, and what it knows of the others."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, patience_s: float) -> None:
        self.patience_s = patience_s  # seconds that a collective waits
        self._store, self._rank = store, rank
        self._keys = [f"lingua/heartbeat/{r}" for r in range(world_size)]
        self._host, self._main = socket.gethostname(), threading.get_ident()
        self._at = 0, 0, "start", time.monotonic()
        self._ended = threading.Event()
        self._write()
        threading.Thread(target=self._run, daemon=True).start()

    def at(self, step: int, phase: str) -> None:
        self._at = self._at[0] + 1, step, phase, time.monotonic()

    def stop(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        looked = -1
        # Rank 0 looks first: what it logs is in train.log.
        patience_s = LOOK_S + (2 * BEAT_S if self._rank else 0)
        with suppress(dist.DistError):  # the store has gone, and so does the run
            while not self._ended.wait(BEAT_S):
                self._write()
                place, _, _, since = self._at
                late = time.monotonic() - since > self.patience_s + patience_s
                if late and looked < place:
                    looked = place
                    if self._store.add(f"lingua/late/{place}", 1) == 1:  # the first looks for all
                        threading.Thread(target=self._log_late, daemon=True).start()

    def _write(self) -> None:
        place, step, phase, _ = self._at
        frame = sys._current_frames().get(self._main)
        function = "no function"
        if frame is not None:
            code = frame.f_code
            function = f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
        beat = Beat(time.time(), place, step, phase, function, self._host)
        self._store.set(self._keys[self._rank], json.dumps(beat))

    def read(self) -> list[Beat]:
        """What all ranks have written last, by rank, in one request."""
        return [Beat(*json.loads(text)) for text in self._store.multi_get(self._keys)]

    def _log_late(self) -> None:
        _, step, phase, since = self._at
        for line in self.late(same_place=phase == "step"):
            waited_s = time.monotonic() - since
            logger.error(f"step {step}, {phase}, takes {waited_s:.0f} s: {line}")

    def late(self, same_place: bool = True) -> list[str]:
        """Lines about the ranks that the others wait for; where none is silent or behind, and
        `same_place`, about where all are. It takes SILENT_S seconds."""
        before = _within(STORE_S, self.read)
        time.sleep(SILENT_S if before else 0)
        now = _within(STORE_S, self.read) if before else None
        if before is None or now is None:
            place = os.environ.get("MASTER_ADDR", "?")
            return [f"rank 0 on {place} is silent, or its torchrun: the store does not answer"]
        lines, last = [], max(beat.place for beat in now)
        functions = defaultdict(list)
        for rank, (old, new) in enumerate(zip(before, now, strict=True)):
            functions[str(new)].append(str(rank))
            if old.time == new.time:
                lines.append(
                    f"rank {rank} on {new.host} is silent for {time.time() - new.time:.0f} s: its "
                    "process is stopped or has ended, or its machine cannot be reached; it was in "
                    f"{new}"
                )
            elif new.place < last:
                lines.append(f"rank {rank} on {new.host} is behind: in {new}")
        if not lines and same_place:
            lines = [
                f"no rank is silent or behind: {', '.join(ranks[:MAX_SHOWN])} in {where}"
                for where, ranks in functions.items()
            ]
        more = len(lines) - MAX_SHOWN
        return lines[:MAX_SHOWN] + ([f"{more} more ranks"] if more > 0 else [])

    def explain(self, error: Exception) -> str | None:
        """Name the ranks that the others wait for in notes of `error`, where it is a connection
        that was lost, or a collective that timed out; on the first rank that fails. Returns one
        line on the others, once that rank knows: torchrun ends all as soon as one has left."""
        self.patience_s = float("inf")
        text = str(error)
        lost = isinstance(error, dist.DistError) or any(words in text for words in LOST)
        number = _within(STORE_S, lambda: self._store.add("lingua/failures", 1))
        first = "lingua/first_failure"
        # Without the store of rank 0 nobody knows who is first.
        if number == 1 or (number is None and self._rank == 1):
            for line in self.late() if lost else []:
                error.add_note(line)
            _within(STORE_S, lambda: self._store.set(first, str(self._rank)))
            return None
        end = time.monotonic() + SILENT_S + 2 * STORE_S
        while (known := _within(STORE_S, lambda: self._store.check([first]))) is False:
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        cause = f"rank {self._store.get(first).decode()} failed" if known else "the store was lost"
        what = "lost its connection" if lost else f"{type(error).__name__}: {text.splitlines()[0]}"
        return f"rank {self._rank} on {self._host}: {what} after {cause}"


def _within(seconds: float, ask: Callable[[], T]) -> T | None:
    """What the store answers; None where it does not in time, for which torch would wait without
    an end, or where the connection is lost."""
    answers: list[T] = []

    def attempt() -> None:
        with suppress(dist.DistError):
            answers.append(ask())

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


# ---- that of this process, which has one process group

_current: Heartbeat | None = None


def start_heartbeat(store: dist.Store, rank: int, world_size: int, patience_s: float) -> None:
    """Write where this rank is from now on; `patience_s` is how long collectives wait."""
    global _current
    stop_heartbeat()
    if world_size > 1:
        _current = Heartbeat(store, rank, world_size, patience_s)


def stop_heartbeat() -> None:
    global _current
    if _current is not None:
        _current.stop()
    _current = None


def set_patience(seconds: float) -> None:
    if _current is not None:
        _current.patience_s = seconds


def at(step: int, phase: str) -> None:
    """State where this rank is. Called by every rank, in the same order."""
    if _current is not None:
        _current.at(step, phase)


def host_of(rank: int) -> str:
    """The host of a rank."""
    beats = None if _current is None else _within(STORE_S, _current.read)
    return beats[rank].host if beats else socket.gethostname()


def explain(error: Exception) -> str | None:
    """What `Heartbeat.explain` returns, None for a process alone."""
    return None if _current is None else _current.explain(error)
