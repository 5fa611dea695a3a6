"""Training in the process that calls it, which is afterwards as it was; see lingua.train."""

import atexit
import json
import logging
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from lingua.app import App, import_app, main_program
from lingua.base.errors import UserError
from lingua.checkpoint.run_config import load_run
from lingua.config.values import plain
from lingua.parallel.launch import detect_launch
from lingua.tools.runs.records import Record

Config = Mapping[str, Any] | str | Path | None


def train_here(app: str | ModuleType | App, config: Config) -> Record:
    """See lingua.train."""
    if threading.current_thread() is not threading.main_thread():
        raise UserError("lingua.train: must be called in the main thread, which receives signals")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        need = 'must be called below `if __name__ == "__main__":` in a script'
        raise UserError(f"lingua.train: {need}, since the processes that tokenize import it too")
    if (world_size := detect_launch().world_size) > 1:
        advice = "python -m apps.main.train is the program for them"
        raise UserError(f"lingua.train: is one process, and here are {world_size}; {advice}")
    chosen = app_of(app, "lingua.train")
    program = import_module(main_program("train"))
    args, notices = load_run(chosen, words(config))
    for line in notices:
        print(line)
    with (
        logging_restored({chosen.path.partition(".")[0]}),
        torch_restored(),
        temporary_process_group(),
    ):
        stopped_by = program.train(chosen, args)
    if stopped_by is not None:
        signal.raise_signal(signal.Signals[stopped_by])  # the caller's handler receives it
    return Record(args.folder)


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
    given: Any = OmegaConf.to_container(config) if OmegaConf.is_config(config) else config
    if not isinstance(given, Mapping | None):
        raise UserError(f"lingua.train: config = {given!r}: must be a mapping or a YAML file")
    values = plain(given or {})
    return [f"{k}={json.dumps(v, ensure_ascii=False, default=str)}" for k, v in values.items()]


@contextmanager
def logging_restored(packages: set[str]) -> Iterator[None]:
    """A context that undoes what lingua.monitor.logger.init_logger does inside."""
    root = logging.getLogger()
    loggers = [root, *map(logging.getLogger, {"lingua", "apps", "__main__", *packages})]
    levels, handlers = [logger.level for logger in loggers], root.handlers[:]
    root.handlers[:] = []  # it closes those that it finds
    try:
        yield
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers[:] = handlers
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def torch_restored() -> Iterator[None]:
    """A context that undoes what lingua.parallel.launch.start sets for the whole process."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    tf32, threads = torch.backends.cuda.matmul.allow_tf32, torch.get_num_threads()
    try:
        yield
    finally:
        if deterministic != torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.backends.cuda.matmul.allow_tf32 = tf32
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)


@contextmanager
def temporary_process_group() -> Iterator[None]:
    """Inside, a process group may be started, as in a process of its own; at the end it and what it
    leaves in Python are removed. Raises UserError where the process is in one already."""
    if dist.is_initialized():
        raise UserError("lingua.load and lingua.train need a process without a process group")
    # A thread of gloo that is late aborts the process at its end, as `run_program` explains.
    atexit.unregister(_wait)
    atexit.register(_wait)
    excepthook = sys.excepthook  # each group adds one, which writes "[rank0]: " in tracebacks
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook = excepthook


def _wait() -> None:
    time.sleep(0.1)
