"""The entry point of every program: a user's mistake becomes one message and exit code 2."""

import gc
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from lingua.errors import UserError
from lingua.parallel.launch import detect_launch, leave


def run_program(program: Callable[[], None]) -> NoReturn:
    """Run `program` and exit with its exit code.

    All ranks raise the same UserError, so rank 0 prints it; one that concerns a single machine
    (`UserError(..., local=True)`) is printed by the rank that raised it.
    """
    gc.freeze()  # imported objects stay: collecting over them takes a sixth of a second
    code, patience_s = 0, 30.0
    try:
        program()
    except UserError as error:
        if error.local or detect_launch().rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        code, patience_s = 2, 0.0 if error.local else patience_s
    # Slurm may still send its early signal, which must not turn the end of a run into a failure.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if dist.is_initialized():
        leave(patience_s)
    sys.exit(code)
