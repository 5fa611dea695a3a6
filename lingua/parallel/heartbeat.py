"""Where this rank is, which a thread writes to the store, on any device. By it
lingua.parallel.failure names the ranks that others wait for: one that is stopped writes nothing."""

import json
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch.distributed as dist

BEAT_S = 2.0  # seconds between two writes
# Seconds after which the thread looks which ranks are late, beyond those that a collective waits:
# gloo has raised an error by then. NCCL's watchdog aborts the process, later, by ABORT_S.
LOOK_S, ABORT_S = 10.0, 45.0
FIRST = "lingua/first_failure"


class Heartbeat:
    """Of this process in one process group."""

    def __init__(self) -> None:
        self.patience_s = float("inf")  # seconds that a collective waits
        # calls of `at`, which all ranks make in the same order; the last one, and when it was
        self.place = 0, 0, "start", time.monotonic()
        self.keys: list[str] = []  # of each rank, in the store
        self.group: Callable[[], object] = object  # that in which it beats, kept by torch alone

    def start(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        on_late: "Callable[[Heartbeat], object]",
    ) -> None:
        """Write where this rank of several is from now on. `on_late` is called, in a thread, where
        it stays at a place for longer than a collective waits. Called by the main thread."""
        self.store, self.rank, self.main = store, rank, threading.get_ident()
        self.place = 0, 0, "start", time.monotonic()
        self.failed = ""  # the rank that failed first, once this one knows it
        self.group = weakref.ref(dist.group.WORLD)
        self.keys = [f"lingua/heartbeat/{r}" for r in range(world_size)]
        self._write()
        for work in (self._beat, partial(self._watch, on_late)):
            threading.Thread(target=work, daemon=True).start()

    def is_beating(self) -> bool:
        """Whether this rank is one of several, which it has not left."""
        return dist.is_initialized() and self.group() is dist.group.WORLD

    def wait(self) -> bool:
        """Wait for the next write. Returns `is_beating`."""
        time.sleep(BEAT_S)
        return self.is_beating()

    def at(self, step: int, phase: str) -> None:
        """State where this rank is. Called by every rank, in the same order."""
        self.place = self.place[0] + 1, step, phase, time.monotonic()

    def first_failure(self) -> str:
        """The rank that failed first; an empty string where none has. It may have the store, which
        ends with its process: so ranks ask in advance, and once."""
        if not self.failed and self.store.check([FIRST]):
            self.failed = self.store.get(FIRST).decode()
        return self.failed

    def _beat(self) -> None:
        with suppress(dist.DistError):  # the store has gone, and so does the run
            while self.wait():
                self._write()
                self.first_failure()

    def _watch(self, on_late: "Callable[[Heartbeat], object]") -> None:
        """Apart from `_beat`, which waits for as long as the main thread waits for the store."""
        looked = -1
        look_s = LOOK_S + 2 * BEAT_S * (self.rank > 0)  # what rank 0 logs is in train.log
        while self.wait():
            place, *_, since = self.place
            if looked < place and time.monotonic() - since > self.patience_s + look_s:
                looked = place
                threading.Thread(target=on_late, args=(self,), daemon=True).start()

    def _write(self) -> None:
        place, step, phase, _ = self.place
        frame = sys._current_frames()[self.main]
        file = os.path.basename(frame.f_code.co_filename)
        function = f"{frame.f_code.co_name} ({file}:{frame.f_lineno})"
        beat = time.time(), place, step, phase, function, socket.gethostname()
        self.store.set(self.keys[self.rank], json.dumps(beat))
