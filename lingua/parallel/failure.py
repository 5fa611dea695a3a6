"""Which ranks the others wait for, by what each has last written to the store (its heartbeat), and
the end of a rank that fails. Imported where one is late, slow, or fails."""

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, NoReturn, TypeVar

import torch.distributed as dist

from lingua.base.errors import UserError
from lingua.base.format import printable
from lingua.parallel.environment import show_in_torchrun
from lingua.parallel.heartbeat import BEAT_S, FIRST, LOOK_S, Heartbeat
from lingua.parallel.signals import STOPPING

T = TypeVar("T")

SILENT_S = 3 * BEAT_S  # without a write, a rank is silent
STORE_S = 5.0  # seconds for the store to answer
SAVING_S = 20.0  # seconds to save a part of a copy: launchers kill 30 s after they end a run
# In the store: replicas are to save a copy, as a rank has failed; one ends by a user's mistake.
LOST, MISTAKE = "lingua/lost", "lingua/mistake"
LEAVING, STARTING = threading.RLock(), threading.Lock()
SAVING: list[threading.Thread] = []  # that which saves a part, if one does
MAX_SHOWN = 16  # ranks, or groups of them, in one report
# What errors contain when a connection was lost or a collective timed out.
LOST_WORDS = (
    "gloo/",
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "Timed out",
    "pair closure",
)

logger = logging.getLogger(__name__)


class Beat(NamedTuple):
    """What a rank has written."""

    time: float  # seconds since the epoch, by the clock of its host
    place: int  # calls of `Heartbeat.at`
    step: int
    phase: str
    function: str  # where its main thread was
    host: str

    @classmethod
    def of_json(cls, text: bytes) -> "Beat":
        """What the store has. Whoever reaches it can write to it: UNREADABLE where it is no beat,
        so that what is reported is not hidden by an error here."""
        with suppress(ValueError, TypeError, RecursionError):
            beat = cls(*json.loads(text))
            if [type(value) for value in beat] == list(cls.__annotations__.values()):
                return beat
        return UNREADABLE

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}, in {self.function}"


UNREADABLE = Beat(0.0, -1, 0, "what it has written cannot be read", "?", "?")


def log_late(heart: Heartbeat) -> None:
    """Log which ranks are late, from one of those that wait at the same place. End the run where a
    rank has been silent for as long again, or another has ended it: gloo waits without an end for a
    rank that is stopped before they first connect."""
    place, step, phase, since = heart.place
    wait_s = max(heart.patience_s, LOOK_S)
    first = _is_first(heart, f"lingua/late/{place}")
    if first:
        for line in late_ranks(heart, same_place=phase == "step"):
            logger.error(f"step {step}, {phase}, takes {time.monotonic() - since:.0f} s: {line}")
    before, end = _read(heart) if first else [], time.monotonic() + wait_s
    while heart.place[0] == place and heart.wait():
        failed: str | bool | None = _within(6 * STORE_S, heart.first_failure)
        if not heart.is_beating():  # this rank has left the others, whose store may end
            return
        if failed is None:  # the main thread may wait for the store, which has no end
            line = f"error: {_who(heart)}: lost its connection after the store was lost"
            print(line, file=sys.stderr, flush=True)
            save_part(heart)
            for thread in SAVING:
                thread.join(SAVING_S)
            os._exit(1)
        if first and time.monotonic() > end:
            old, before, end = before, _read(heart), time.monotonic() + wait_s
            failed = any(a.time == b.time for a, b in zip(old, before, strict=False))
        if failed:
            waited_s = time.monotonic() - since
            error = TimeoutError(f"step {step}, {phase}, has taken {waited_s:.0f} s")
            fail(error.with_traceback(_traceback(heart)))


def _traceback(heart: Heartbeat) -> TracebackType | None:
    """Of where the main thread is."""
    frame, trace = sys._current_frames().get(heart.main), None
    while frame is not None:
        trace = TracebackType(trace, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return trace


def late_ranks(heart: Heartbeat, same_place: bool = True) -> list[str]:
    """Lines about the ranks that the others wait for; where none is silent or behind, and
    `same_place`, about where each is. It takes SILENT_S seconds."""
    before = _read(heart)
    time.sleep(SILENT_S if before else 0)
    now = _read(heart) if before else []
    if not now:
        host = os.environ.get("MASTER_ADDR", "?")
        return [f"rank 0 on {host} is silent, or its torchrun: the store does not answer"]
    lines, last = [], max(beat.place for beat in now)
    ranks_at: dict[str, list[str]] = defaultdict(list)
    for rank, (old, new) in enumerate(zip(before, now, strict=True)):
        ranks_at[str(new)].append(str(rank))
        if old.time == new.time:
            since = f" for {time.time() - new.time:.0f} s" if new is not UNREADABLE else ""
            lines.append(
                f"rank {rank} on {new.host} is silent{since}: its process is stopped or has ended, "
                f"or its machine cannot be reached; last seen in {new}"
            )
        elif new.place < last:
            lines.append(f"rank {rank} on {new.host} is behind: in {new}")
    if not lines and same_place:
        for where, ranks in ranks_at.items():
            shown = ", ".join(ranks[:MAX_SHOWN]) + ", ..." * (len(ranks) > MAX_SHOWN)
            lines.append(f"no rank is silent or behind: {shown} in {where}")
    more = len(lines) - MAX_SHOWN
    return lines[:MAX_SHOWN] + [f"and {more} more"] * (more > 0)


def fail(error: Exception) -> NoReturn:
    """End this rank of several by an error, which its excepthook reports."""
    sys.excepthook(type(error), error, error.__traceback__)
    print(end="", flush=True)
    os._exit(1)  # at the interpreter's end, a thread that waits for the store would abort


def report(heart: Heartbeat, print_error: Callable[..., object], error: Exception) -> None:
    """The excepthook of a rank of several: the first that fails prints its traceback by
    `print_error`, the hook before, others a line. A UserError is for others to know alone."""
    LEAVING.acquire()  # never released: the thread that comes second waits for the end of both
    save_part(heart, error)
    later = explain(heart, error)
    if isinstance(error, UserError):
        return
    text = "".join(traceback.format_exception(error))
    show_in_torchrun(text, later=later is not None)
    if later is None:
        print_error(type(error), error, error.__traceback__)  # torch's names the rank
    else:
        print(f"error: {printable(later)}", file=sys.stderr)
    for thread in SAVING:
        thread.join(SAVING_S)


def save_part(heart: Heartbeat, error: Exception | None = None) -> None:
    """Once, where replicas have copies of the run: begin to save what this rank has of one, and
    have the others do so; not where it ends by an `error` of its own, or a user's mistake."""
    with STARTING:  # who comes second finds the thread in SAVING
        save, heart.save_part = heart.save_part, None
        if save is None or _within(STORE_S, lambda: heart.store.check([MISTAKE])):
            return
        if error is None or _is_lost(error):
            thread = threading.Thread(target=_save, args=(heart, save), daemon=True)
            SAVING.append(thread)
            thread.start()
    # After a mistake, other ranks lose their connections, and know why.
    _within(STORE_S, lambda: heart.store.set(MISTAKE if isinstance(error, UserError) else LOST, ""))


def _save(heart: Heartbeat, save: Callable[[], str]) -> None:
    try:
        line = save()
    except Exception as error:  # another one ends the run
        line = f"its part of the run cannot be saved: {error}"
    print(printable(f"{_who(heart)}: {line}"), file=sys.stderr, flush=True)


def watch_others(heart: Heartbeat) -> None:
    """Save this rank's part once another rank has failed, or the store is lost. In a thread."""
    with suppress(dist.DistError):
        while heart.save_part is not None and heart.wait() and not heart.store.check([LOST]):
            pass
    if heart.is_beating():
        save_part(heart)


def _is_lost(error: Exception) -> bool:
    """Whether this rank ends by a connection that was lost or a collective that timed out."""
    known = isinstance(error, dist.DistError | TimeoutError)
    by_text = any(words in str(error) for words in LOST_WORDS)
    return (known or by_text) and not isinstance(error, UserError)


def explain(heart: Heartbeat, error: Exception) -> str | None:
    """On the first rank that fails, name those that it waited for in notes of `error`, where that
    is a connection that was lost or a collective that timed out. Returns one line on the others,
    once that rank knows: torchrun ends all as soon as one has left."""
    if threading.current_thread() is threading.main_thread():
        for number in STOPPING:  # a launcher sends them as soon as one rank has left
            signal.signal(number, signal.SIG_IGN)
    text = str(error)
    if not heart.is_beating():
        return None
    heart.patience_s = float("inf")
    lost = _is_lost(error)
    if not heart.failed and _is_first(heart, "lingua/failures"):
        for line in late_ranks(heart) if lost else []:
            error.add_note(printable(line))
        _within(STORE_S, lambda: heart.store.set(FIRST, str(heart.rank)))
        if heart.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            # The store ends with this process, and the others read it before: in a heartbeat, or at
            # once where they have lost a connection too.
            time.sleep(0.5 if lost else 2 * BEAT_S)
        return None
    end = time.monotonic() + SILENT_S + 2 * STORE_S
    while (known := _within(STORE_S, heart.first_failure)) == "":
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    cause = f"rank {known} failed" if known else "the store was lost"
    first_line = text.partition("\n")[0]
    what = "lost its connection" if lost else f"{type(error).__name__}: {first_line}"
    return f"{_who(heart)}: {what} after {cause}"


def _who(heart: Heartbeat) -> str:
    return f"rank {heart.rank} on {socket.gethostname()}"


def host_of(heart: Heartbeat, rank: int) -> str:
    """The host of a rank, where the store answers."""
    beats = _read(heart) if heart.is_beating() else []
    return beats[rank].host if beats else "?"


def _is_first(heart: Heartbeat, key: str) -> bool:
    """Whether no other rank has called this. Where the store does not answer, which is in the
    process of rank 0 or its torchrun, that is rank 1."""
    number = _within(STORE_S, lambda: heart.store.add(key, 1))
    return heart.rank == 1 if number is None else number == 1


def _read(heart: Heartbeat) -> list[Beat]:
    """What all ranks have written last, in one request; empty where the store does not answer."""
    texts = _within(STORE_S, lambda: heart.store.multi_get(heart.keys))
    return [Beat.of_json(text) for text in texts or []]


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
