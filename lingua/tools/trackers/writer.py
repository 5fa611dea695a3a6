"""The trackers of a run (`logging.to`): what gets the numbers of its files besides them.

Each tracker works in a thread of its own, so that one which raises, hangs or ends its thread delays
no step. It is named once, and the run goes on without it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from queue import Full, Queue
from threading import Event, Thread
from time import monotonic
from typing import Any, Protocol

from lingua.base.dump_dir import EVALUATION, SAMPLES, VALIDATION
from lingua.config.values import shorten
from lingua.monitor.args import LoggingArgs
from lingua.tools.trackers.tensorboard import TensorBoard
from lingua.tools.trackers.trackio import Trackio
from lingua.tools.trackers.wandb import FINISH_S, Wandb

# For all trackers, where a run starts and where it ends: Slurm's patience for a process
WAIT_S = FINISH_S + 5
MAX_CALLS = 10_000  # that wait for a tracker
Call = Callable[["Tracker"], None]

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """A started client. Its methods may raise any exception; none is called after that."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Values by name, numbers among them."""

    def samples(self, step: int, source: str, pairs: Sequence[tuple[str, str]]) -> None:
        """(prompt, text), with prompts of one source."""

    def finish(self) -> None: ...


TRACKERS: dict[str, Callable[..., Tracker]] = {
    "wandb": Wandb,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
}


class Trackers:
    """The trackers of a dump dir, which get the lines that a Reporter writes."""

    def __init__(
        self, args: LoggingArgs, name: str, config: Mapping[str, Any], folder: Path, step: int = 0
    ) -> None:
        """Start them, and wait WAIT_S at most, so that no step begins while packages are imported.
        What an earlier start has sent of later steps than `step` is removed where that can be."""
        run = name, dict(config), folder, step
        self.threads = [
            TrackerThread(tracker, partial(TRACKERS[tracker], settings, *run))
            for tracker, settings in args.trackers.items()
        ]
        end = monotonic() + WAIT_S
        for thread in self.threads:
            if not thread.started.wait(max(0.0, end - monotonic())):
                logger.info(f"logging.to: {thread.name} still starts; the run goes on")

    def log(self, file: str, line: Mapping[str, Any]) -> None:
        """Log a line of a .jsonl file of the dump dir, which has a `step`."""
        if values := values_of(file, line):
            for thread in self.threads:
                thread.put(lambda tracker: tracker.log(line["step"], values))

    def samples(self, step: int, source: str, pairs: Sequence[tuple[str, str]]) -> None:
        for thread in self.threads:
            thread.put(lambda tracker: tracker.samples(step, source, pairs))

    def finish(self) -> None:
        """Wait until each has everything, WAIT_S at most."""
        end = monotonic() + WAIT_S
        for thread in self.threads:
            thread.put(None)
        for thread in self.threads:
            thread.join(max(0.0, end - monotonic()))
            if thread.is_alive():
                thread.fail(f"it has not finished after {WAIT_S:.0f} s")


class TrackerThread(Thread):
    """One tracker, started and called in this thread. Nothing waits for it but its end."""

    def __init__(self, name: str, start_tracker: Callable[[], Tracker]) -> None:
        super().__init__(name=name, daemon=True)
        self.start_tracker, self.started, self.failed = start_tracker, Event(), False
        self.calls: Queue[Call | None] = Queue(MAX_CALLS)
        self.start()

    def put(self, call: Call | None) -> None:
        """Have a call made after those before it; None: the end."""
        try:
            if not self.failed:
                self.calls.put_nowait(call)
        except Full:
            self.fail(f"{MAX_CALLS:,} lines wait for it")

    def run(self) -> None:
        try:
            tracker = self.start_tracker()
            self.started.set()
            while (call := self.calls.get()) is not None and not self.failed:
                call(tracker)
            tracker.finish()
        except BaseException as error:  # SystemExit too, which would end this thread in silence
            first_line = shorten("".join(str(error).splitlines()[:1]))
            self.fail(f"{type(error).__name__}: {first_line}")
            self.started.set()

    def fail(self, why: str) -> None:
        if not self.failed:
            self.failed = True
            logger.warning(
                f"logging.to: {self.name} has failed ({why}); nothing more is sent to it, and the "
                "files of the dump dir have everything"
            )


def values_of(file: str, line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a line of a .jsonl file, without its step, by the names that trackers
    have. Names for a source, a task or an event begin with its name, such as
    `validation/wiki/nats_per_byte`; an event gives its numbers alone:
    `gradients/norms/output.weight`."""
    values = {key: value for key, value in line.items() if key != "step"}
    if file == SAMPLES:
        return {}  # Trackers.samples has them all
    if "event" in values:
        return _numbers(values.pop("event"), values)
    prefix = ""
    if file == VALIDATION:
        prefix = f"validation/{values.pop('source')}/"
    elif file == EVALUATION:
        prefix = f"eval/{values.pop('task')}/"
    return {prefix + key: value for key, value in values.items()}


def _numbers(path: str, value: Any) -> dict[str, Real]:
    """{path: number} of those in nested mappings."""
    if isinstance(value, Mapping):
        parts = [_numbers(f"{path}/{key}", inner) for key, inner in value.items()]
        return {path: number for part in parts for path, number in part.items()}
    return {path: value} if isinstance(value, Real) else {}
