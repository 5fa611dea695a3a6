"""Training in the process that calls it, which is afterwards as it was; see lingua.train and
lingua.open_run."""

import inspect
import json
import multiprocessing
import signal
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from omegaconf import OmegaConf
from torch import nn

from lingua.app import App, import_app
from lingua.base.errors import UserError
from lingua.checkpoint.run_config import load_run
from lingua.config.values import plain
from lingua.data.loader import MicroBatch
from lingua.monitor.means import exact_sum
from lingua.parallel.alone import process_restored
from lingua.parallel.gradients import set_gradient_sync
from lingua.parallel.launch import detect_launch
from lingua.parallel.parallelize import reshard
from lingua.parallel.signals import Stopped, StopRequest
from lingua.run.describe import finish
from lingua.run.loop import Loop
from lingua.run.program import load_loop
from lingua.run.records import Record
from lingua.run.run import Run
from lingua.run.start import is_finished, start_run
from lingua.tokenizer.interface import Tokenizer

Config = Mapping[str, Any] | Sequence[str] | str | Path | None


def train_here(app: str | ModuleType | App, config: Config) -> Record:
    """See lingua.train."""
    with _training_process(app, config, "lingua.train") as (loop, chosen, args):
        stopped_by = loop.train(chosen, args)
    if stopped_by is not None:
        signal.raise_signal(signal.Signals[stopped_by])  # the caller's handler receives it
    return Record(args.folder)


class OpenRun:
    """A run of `lingua.open_run`, which trains while one iterates over it."""

    def __init__(self, run: Run, steps: Generator[int, None, None], stop: StopRequest) -> None:
        """`run` is before its first step, `steps` its loop."""
        self._run, self._steps, self._stop = run, steps, stop
        self._outside = ExitStack()  # of the loop: this time is no training time
        self._outside.enter_context(run.report.paused())
        set_gradient_sync(run.model, None, last=True)  # the caller may run a backward

    def __iter__(self) -> Iterator[int]:
        """Yields the number of each completed step. An interrupt of the body of the loop raises
        Stopped there. Gradients and mode that the body leaves in the model do not enter the next
        step, and its time is no training time: on CUDA the loop waits for the device."""
        run = self._run
        while True:
            reshard(run.model)  # a forward of the body has gathered what the next update changes
            run.model.zero_grad()
            run.model.train()
            self._outside.close()
            step = next(self._steps, None)
            self._outside.enter_context(run.report.paused())
            if step is None:
                return
            set_gradient_sync(run.model, None, last=True)  # a backward of the body is complete
            with self._stop.at_once():
                yield step

    @property
    def step(self) -> int:
        """Completed steps."""
        return self._run.progress.step

    @property
    def loss(self) -> float:
        """Loss of the newest step, in nats per token unless the app's objective has another unit.
        The host waits for the device."""
        return exact_sum(self._run.loss.flatten().tolist())

    def measure(self) -> float | None:
        """The held-out loss of the model as it is, as `validation.every` measures it: in nats per
        byte, of all sources together; None where nothing is held out. The console shows it; it is
        no line of metrics.validation.jsonl. Raises UserError once the run is closed."""
        if not dist.is_initialized():
            raise UserError("run.measure: must be called inside of `with lingua.open_run(...)`")
        report = self._run.report
        reshard(self._run.model)  # what the body has gathered may be out of date
        may_write, report.may_write = report.may_write, lambda: False
        try:
            return self._run.objective.measure()
        finally:
            reshard(self._run.model)
            report.may_write = may_write

    @property
    def batch(self) -> list[MicroBatch]:
        """Micro-batches of the newest step, on the CPU."""
        return self._run.batch

    @property
    def model(self) -> nn.Module:
        return self._run.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self._run.tokenizer

    @property
    def args(self) -> Any:
        """The configuration, every value resolved."""
        return self._run.args

    @property
    def record(self) -> Record:
        """What the run has written so far."""
        return Record(self._run.args.folder)

    def log(self, event: str, **values: Any) -> None:
        """Write a line about the newest step to metrics.jsonl: values of JSON, numbers for
        trackers among them."""
        self._run.report.event(event, self.step, **values)

    def end(self) -> None:
        """End the loop. Where the caller has left it, the newest step is saved."""
        run = self._run
        self._outside.close()
        if inspect.getgeneratorstate(self._steps) == inspect.GEN_CLOSED:
            return
        self._steps.close()
        reshard(run.model, interrupted=True)
        if self.step:
            run.save(None, final=True)
        run.signals = [self._stop.signal] if self._stop.signal else []


@contextmanager
def open_here(app: str | ModuleType | App, config: Config) -> Iterator[OpenRun]:
    """See lingua.open_run."""
    stopped_by: str | None = None
    with (
        _training_process(app, config, "lingua.open_run") as (loop, chosen, args),
        StopRequest("stopping before the next step") as stop,
    ):
        try:
            with ExitStack() as open_parts:
                started = start_run(chosen, args, stop, open_parts)
                finished = is_finished(started, args)
                run = loop.build_run(chosen, args, started, stop, open_parts)
                steps = loop.take_steps(run, stop)
                if finished:
                    steps.close()
                opened = OpenRun(run, steps, stop)
                try:
                    with suppress(Stopped):  # by a signal in the body of the caller's loop
                        yield opened
                finally:
                    opened.end()
                if not finished:
                    finish(run)
                stopped_by = run.signals[0] if run.signals else None
        except Stopped:  # by a signal before the first step
            stopped_by = stop.signal
    if stopped_by is not None:
        signal.raise_signal(signal.Signals[stopped_by])  # the caller's handler receives it


@contextmanager
def _training_process(
    app: str | ModuleType | App, config: Config, function: str
) -> Iterator[tuple[Loop, App, Any]]:
    """A context in which a run may be trained by the `function` of lingua: yields the loop, the
    app and the configuration. Raises UserError."""
    if threading.current_thread() is not threading.main_thread():
        raise UserError(f"{function}: must be called in the main thread, which receives signals")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        need = 'must be called below `if __name__ == "__main__":` in a script'
        raise UserError(f"{function}: {need}, since the processes that tokenize import it too")
    if (world_size := detect_launch().world_size) > 1:
        advice = "python -m apps.main.train is the program for them"
        raise UserError(f"{function}: is one process, and here are {world_size}; {advice}")
    chosen = app_of(app, function)
    loop = load_loop()
    args, notices = load_run(chosen, words(config))
    for line in notices:
        print(line)
    with process_restored(chosen.path):
        yield loop, chosen, args


def app_of(app: str | ModuleType | App, function: str) -> App:
    """The app that a `function` of lingua is given. Raises UserError where it is none."""
    chosen: Any = import_app(app, function) if isinstance(app, str) else app
    chosen = getattr(chosen, "app", None) if isinstance(chosen, ModuleType) else chosen
    if not isinstance(chosen, App):
        raise UserError(f"{function}: app = {app}: has no lingua.app.App named app")
    return chosen


def words(config: Config) -> list[str]:
    """A configuration as the command line has it."""
    if isinstance(config, str | Path):
        return [f"config={config}"]
    if isinstance(config, list | tuple) and all(isinstance(word, str) for word in config):
        return list(config)
    given: Any = OmegaConf.to_container(config) if OmegaConf.is_config(config) else config
    if not isinstance(given, Mapping | None):
        need = "must be a mapping, a YAML file, or a list of key=value"
        raise UserError(f"config = {given!r}: {need}")
    values = plain(given or {})
    return [f"{k}={json.dumps(v, ensure_ascii=False, default=str)}" for k, v in values.items()]
