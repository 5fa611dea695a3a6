"""The trackers of a run (`logging.to`), which get its numbers besides the files of the dump dir.

Each works in a thread of its own, so that one which raises, hangs or ends its thread delays no
step: it is named once, and the run goes on without it.
"""

import json
import logging
import os
import socket
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from queue import Full, Queue
from textwrap import indent
from threading import Event, Thread
from typing import Any

from lingua.base import dump_dir
from lingua.base.errors import import_optional
from lingua.config.values import shorten
from lingua.monitor.args import LoggingArgs, TrackioArgs, WandbArgs
from lingua.run.records import Record

MAX_LINES = 10_000  # that wait for a tracker
WAIT_S = 30.0  # for all of them, at the start and at the end: Slurm's patience for a process

logger = logging.getLogger(__name__)


class Trackers:
    """The trackers of a dump dir, which get the lines that a Reporter writes."""

    def __init__(
        self, args: LoggingArgs, name: str, config: Mapping[str, Any], folder: Path, step: int = 0
    ) -> None:
        """Start them, and wait WAIT_S at most, so that no step begins while packages are imported.
        What an earlier start has sent of later steps than `step` is removed where that can be."""
        kinds = {"wandb": Wandb, "tensorboard": TensorBoard, "trackio": Trackio}
        run = name, dict(config), folder, step
        given = args.trackers.items()
        self.threads = [TrackerThread(k, partial(kinds[k], own, *run)) for k, own in given]
        end = time.monotonic() + WAIT_S
        for thread in self.threads:
            if not thread.started.wait(max(0.0, end - time.monotonic())):
                logger.info(f"logging.to: {thread.name} still starts; the run goes on")

    def log(self, file: str, line: Mapping[str, Any]) -> None:
        """Log a line of a .jsonl file of the dump dir, which has a `step`."""
        if values := values_of(file, line):
            for thread in self.threads:
                thread.put((line["step"], values))

    def samples(self, step: int, source: str, pairs: Sequence[tuple[str, str]]) -> None:
        """Log text that the model generated: (prompt, text), with prompts of one source."""
        for thread in self.threads:
            thread.put((step, {f"samples/{source}": [list(pair) for pair in pairs]}))

    def finish(self) -> None:
        """Wait until each has everything, WAIT_S at most."""
        end = time.monotonic() + WAIT_S
        for thread in self.threads:
            thread.put(None)
        for thread in self.threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                thread.fail(f"it has not finished after {WAIT_S:.0f} s")


def check_packages(args: LoggingArgs) -> None:
    """Raise UserError where the package of a tracker is not installed."""
    for name in args.trackers:
        if find_spec(name) is None:  # one that is, and fails, ends no run
            import_optional(name, f"logging.to = {name}")


class TrackerThread(Thread):
    """One tracker, started and called in this thread: what `start_tracker` returns has `log(step,
    values)`, of numbers, other values of a line and lists of (prompt, text) by name, and `finish`.
    Both may raise anything; neither is called after that."""

    def __init__(self, name: str, start_tracker: Callable[[], Any]) -> None:
        super().__init__(name=name, daemon=True)
        self.start_tracker, self.started, self.failed = start_tracker, Event(), False
        self.lines: Queue[tuple[int, Mapping[str, Any]] | None] = Queue(MAX_LINES)
        self.start()

    def put(self, line: tuple[int, Mapping[str, Any]] | None) -> None:
        """Have a line logged after those before it; None: the end."""
        try:
            if not self.failed:
                self.lines.put_nowait(line)
        except Full:
            self.fail(f"{MAX_LINES:,} lines wait for it")

    def run(self) -> None:
        try:
            tracker = self.start_tracker()
            self.started.set()
            while (line := self.lines.get()) is not None and not self.failed:
                tracker.log(*line)
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
    if file == dump_dir.SAMPLES:
        return {}  # Trackers.samples has them all
    if "event" in values:
        return _numbers(values.pop("event"), values)
    prefix = ""
    if file == dump_dir.VALIDATION:
        prefix = f"validation/{values.pop('source')}/"
    elif file == dump_dir.EVALUATION:
        prefix = f"eval/{values.pop('task')}/"
    return {prefix + key: value for key, value in values.items()}


def _numbers(path: str, value: Any) -> dict[str, Real]:
    """{path: number} of those in nested mappings."""
    if isinstance(value, Mapping):
        parts = [_numbers(f"{path}/{key}", inner) for key, inner in value.items()]
        return {path: number for part in parts for path, number in part.items()}
    return {path: value} if isinstance(value, Real) else {}


class Wandb:
    """The wandb run that `<dump_dir>/wandb_id` names, or a new one.

    `step` is a metric and the x-axis of the others: wandb's own step cannot go back, which a
    resumed run does.
    """

    def __init__(
        self, args: WandbArgs | None, name: str, config: Any, folder: Path, step: int
    ) -> None:
        import wandb

        # Without a network it would wait for ever, here and once more when the process ends.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(WAIT_S - 5))
        os.environ.setdefault("WANDB_FINISH_TIMEOUT_RAISES", "true")
        id_file = folder / dump_dir.WANDB_ID
        settings = asdict(args or WandbArgs())
        settings |= {"name": settings["name"] or name, "dir": settings["dir"] or str(folder)}
        settings["id"] = id_file.read_text().strip() if id_file.exists() else None
        self.table = partial(wandb.Table, columns=["prompt", "text"])
        self.run = wandb.init(**settings, config=config, allow_val_change=True, resume="allow")
        id_file.write_text(self.run.id + "\n")
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        self.finish = self.run.finish

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        tables = {key: self.table(data=v) for key, v in values.items() if isinstance(v, list)}
        self.run.log({"step": step, **values, **tables})


class TensorBoard:
    """An event file for each start: scalars, text, and the config as hyperparameters.

    torch's SummaryWriter has a thread that writes up to two minutes later, and imports TensorFlow
    where that exists. Here what is logged before a checkpoint is in the file when that is saved.
    """

    def __init__(self, args: None, name: str, config: Any, folder: Path, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import hparams, text

        self.event, self.summary, self.text = Event, Summary, text
        (folder / dump_dir.TENSORBOARD).mkdir(exist_ok=True)
        place = f"{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        file = open(folder / dump_dir.TENSORBOARD / f"events.out.tfevents.{place}", "xb")  # noqa: SIM115
        self.records = RecordWriter(file)
        self.finish = self.records.close
        self._write(file_version="brain.Event:2")
        # What earlier files have of later steps is not shown.
        self._write(step=step + 1, session_log=SessionLog(status=SessionLog.START))
        sources = [*config.get("data.sources", ()), *config.get("validation.sources", ())]
        metrics = ["loss", *(f"validation/{source}/nats_per_byte" for source in sources)]
        plain, as_text = (int, float, str, type(None)), partial(json.dumps, default=str)
        given = {k: v if type(v) in plain else as_text(v) for k, v in config.items()}
        for summary in hparams(given, dict.fromkeys(metrics, 0.0))[:2]:  # experiment and session
            self._write(summary=summary)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {tag: float(value) for tag, value in values.items() if isinstance(value, Real)}
        scalars = [self.summary.Value(tag=tag, simple_value=x) for tag, x in numbers.items()]
        self._write(step=step, summary=self.summary(value=scalars))
        for tag, pairs in values.items():
            if isinstance(pairs, list):  # as blocks of code in Markdown
                blocks = [indent("".join(pair), "    ") for pair in pairs]
                self._write(step=step, summary=self.text(tag, "\n\n---\n\n".join(blocks)))

    def _write(self, **fields: Any) -> None:
        self.records.write(self.event(wall_time=time.time(), **fields).SerializeToString())
        self.records.flush()


class Trackio:
    """The trackio run that `<dump_dir>/trackio_id` names, or a new one: rows of a database that
    this machine has for all runs of a project, or with a `space_id` of a Space."""

    def __init__(
        self, args: TrackioArgs | None, name: str, config: Any, folder: Path, step: int
    ) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage
        from trackio.utils import get_storage_mode

        self.table = partial(trackio.Table, columns=["prompt", "text"])
        id_file = folder / dump_dir.TRACKIO_ID
        run_id = id_file.read_text().strip() if id_file.exists() else None
        args = args or TrackioArgs()
        settings = {**asdict(args), "name": name, "config": config, "embed": False}
        settings |= {"auto_log_cpu": False, "auto_log_gpu": False}
        self.run: Any = trackio.init(**settings, resume="allow" if run_id else "never")
        self.run.id = run_id or self.run.id  # another run may have the name, and be the newest
        id_file.write_text(self.run.id + "\n")
        self.send: Callable[..., None] = self.run.log
        self.finish = self.run.finish
        # and not a Space, or files that the dashboard puts into a database
        if self.run.url is None and get_storage_mode() == "sqlite":
            with closing(sqlite3.connect(SQLiteStorage.init_db(args.project))) as db, db:
                run = {"id": self.run.id, "step": step}
                db.execute("DELETE FROM metrics WHERE run_id = :id AND step > :step", run)
                rows = db.execute("SELECT step, metrics FROM metrics WHERE run_id = :id", run)
                there = {(at, key) for at, text in rows for key in json.loads(text)}
            # log() leaves it to a thread, which is late, and prints what it cannot write.
            save = partial(SQLiteStorage.bulk_log, args.project, self.run.name, run_id=self.run.id)
            # What an earlier start had not sent when it was killed
            unsent: list[Any] = [({}, step)]
            for file in dump_dir.LINES:
                for line in Record(folder).lines(file):
                    at, values = line["step"], values_of(file, line).items()
                    new = {k: v for k, v in values if isinstance(v, Real) and (at, k) not in there}
                    if new and at <= step:
                        unsent.append((new, at))
            numbers, steps = map(list, zip(*unsent, strict=True))
            save(numbers, steps, config=self.run.config)
            self.send = lambda numbers, step: save([numbers], [step])

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if numbers := {k: v for k, v in values.items() if isinstance(v, Real)}:
            self.send(numbers, step)
        for key, value in values.items():
            if isinstance(value, list):
                self.run.log({key: self.table(data=value)}, step)
