"""The entry point of every program: a user's mistake becomes one message and exit code 2. Importing
it does not import torch, which commands that only read files do without."""

import errno
import faulthandler
import gc
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from lingua.base.errors import UserError
from lingua.parallel.environment import detect_launch, restarts_in_torchrun, show_in_torchrun
from lingua.parallel.signals import STOPPING, take_signals

COLLECT_EVERY = 100  # steps between garbage collections; every tenth is a full one, 0.1 s
STDOUT = "standard output"  # file name in its errors
# errno of what is wrong with a file and needs no traceback
UNUSABLE = {"EACCES", "EPERM", "EROFS", "ENOSPC", "EDQUOT", "EFBIG", "ENAMETOOLONG"}
RANK_0_S = 10.0  # seconds for rank 0 to report a mistake that all ranks find before they meet


def run_program(program: Callable[[], None]) -> NoReturn:
    """Run `program` and exit with its exit code. What a terminal cannot show is escaped, and
    arguments are read as UTF-8 where they are."""
    for name in ("stdout", "stderr"):
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            buffer = io.BufferedWriter(_Standard(stream.fileno(), "w", closefd=False))
            text = io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", None, True)
            setattr(sys, name, text)  # each line is written at once
    sys.argv = [_in_utf8(word) for word in sys.argv]
    faulthandler.enable(2)  # stacks of all threads where torch aborts, as its NCCL watchdog does
    gc.freeze()  # imported objects stay: collecting over them takes a sixth of a second
    code: int | str | None = 0
    patience_s = 30.0
    try:
        try:
            program()
        except SystemExit as left:
            code = left.code
        except OSError as error:
            why = errno.errorcode.get(error.errno or 0)
            if why not in UNUSABLE or error.filename in (None, STDOUT):
                raise
            local = why != "ENAMETOOLONG"  # which all ranks are given
            raise UserError(f"{error.filename}: {error.strerror}", local) from None
    except UserError as error:
        if error.local and detect_launch().world_size > 1 and _has_process_group():
            sys.excepthook(type(error), error, None)  # others, which lose it, name this rank
        _report(error)
        code, patience_s = error.exit_code, 0.0 if error.local else patience_s
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        if detect_launch().world_size > 1:  # the other ranks may be in a collective
            os._exit(code)
    except Exception as error:
        if isinstance(error, OSError) and error.filename == STDOUT:
            code = 1 if error.errno != errno.EPIPE else 128 + signal.SIGPIPE  # `head` has gone
            if code == 1:
                _report(UserError(f"{STDOUT} cannot be written: {error.strerror}", local=True))
        else:
            if detect_launch().world_size > 1 and _has_process_group():
                from lingua.parallel.failure import fail

                fail(error)
            show_in_torchrun(traceback.format_exc())
            raise
    # Slurm's early signal, or its end of the others after a mistake, must not look like a failure.
    for number in STOPPING if code in (2, 3) else (signal.SIGUSR2,):
        signal.signal(number, signal.SIG_IGN)
    if _has_process_group():
        from lingua.parallel.launch import leave

        leave(patience_s)
        # Threads of gloo drop the tensors of the last collective, for which they need the
        # interpreter: one that is late, and meets its end, aborts the process (pytorch pull request
        # 179291).
        time.sleep(0.1)
    try:
        print(end="", flush=True)  # where there is a stdout
    except OSError:  # which was reported; Python flushes once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)


def _in_utf8(word: str) -> str:
    try:
        return os.fsencode(word).decode()
    except UnicodeError:  # it is in the encoding of the locale
        return word


def exit_stopped(name: str) -> NoReturn:
    """Exit as a run that the signal `name` stopped: with 128 + its number, or 0 where the launcher
    would start it again at once, as srun may, and torchrun with --max-restarts."""
    for number in STOPPING:  # torchrun ends the other ranks as soon as one has left
        signal.signal(number, signal.SIG_IGN)
    launch = detect_launch()
    if restarts_in_torchrun() or launch.by == "slurm":
        sys.exit(0)
    show_in_torchrun(f"stopped by {name}")
    sys.exit(128 + signal.Signals[name])


def _report(error: UserError) -> None:
    """Print a mistake once.

    All ranks raise it together, so rank 0 prints it; one that concerns a single machine
    (`UserError(..., local=True)`) is printed by the rank that raised it.
    """
    text = f"error: {error}"
    show_in_torchrun(text)
    first = error.local or detect_launch().rank == 0
    if not first and not _has_process_group():
        # A launcher ends all ranks when one exits: rank 0 exits first, unless it has no mistake.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(error.exit_code))
        take_signals()
        time.sleep(RANK_0_S)
        first = True
    if first:
        print(text, file=sys.stderr, flush=True)


def _has_process_group() -> bool:
    torch_distributed = sys.modules.get("torch.distributed")
    return torch_distributed is not None and torch_distributed.is_initialized()


class _Standard(io.FileIO):
    """Below stdout, whose errors it names, and stderr, whose errors end nothing."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if self.fileno() == 2:
                return len(data)
            raise OSError(error.errno, error.strerror, STDOUT) from None


@contextmanager
def collected_in_steps() -> Iterator[None]:
    """Inside it Python collects no garbage by itself, since one rank alone would delay the others;
    `collect_garbage` does, in the same steps on all ranks."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collect_garbage(step: int) -> None:
    """Collect what is due at `step`: new objects, or all."""
    if step % COLLECT_EVERY == 0:
        gc.collect(2 if step % (10 * COLLECT_EVERY) == 0 else 1)
