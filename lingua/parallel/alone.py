"""A process group of one process within a program, which is afterwards as it was."""

import atexit
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lingua.base.errors import UserError


@contextmanager
def process_restored(app_path: str) -> Iterator[None]:
    """A `temporary_process_group` in which a run of an app may be trained: at its end the process
    is as it was before lingua.monitor.logger.init_logger and lingua.parallel.launch.start."""
    root, package = logging.getLogger(), app_path.partition(".")[0]
    loggers = [root, *map(logging.getLogger, {"lingua", "apps", "__main__", package})]
    levels, handlers = [logger.level for logger in loggers], root.handlers[:]
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    tf32, threads = torch.backends.cuda.matmul.allow_tf32, torch.get_num_threads()
    root.handlers[:] = []  # init_logger closes those that it finds
    try:
        with temporary_process_group():
            yield
    finally:
        if deterministic != torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.backends.cuda.matmul.allow_tf32 = tf32
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        for handler in root.handlers:
            handler.close()
        root.handlers[:] = handlers
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


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


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of this process alone, for functions that ranks call together."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _wait() -> None:
    time.sleep(0.1)
