"""What people read: the console of rank 0, `train.log`, and the progress line.

Modules use `logging.getLogger(__name__)`; a program calls init_logger once. Messages never contain
values of environment variables.
"""

import logging
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lingua.base.dump_dir import TRAIN_LOG
from lingua.base.errors import UserError
from lingua.base.format import printable, short_count, short_time, without_secrets

MAX_NUMBERS = 3  # of an app, in a line of the console


class _Format(logging.Formatter):
    """`08:05:17 message`, with `warning: ` or `error: ` before messages of such a level."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            record.message = f"{record.levelname.lower()}: {record.message}"
        record.message = printable(without_secrets(record.message))
        return super().formatMessage(record)


class _Console(logging.StreamHandler):
    """A stream handler. Where a line cannot be written, as on a full disk, it prints that once and
    the run goes on; where the reader has gone, such as `head`, it prints nothing."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.failed and not isinstance(error, BrokenPipeError):
            self.failed = True
            with suppress(OSError):
                name = error.filename or self.stream.name
                print(f"error: {name} cannot be written: {error.strerror}", file=sys.stderr)


class _LogFile(_Console, logging.FileHandler):
    pass


def init_logger(dump_dir: Path | None, rank: int, app: str = "") -> None:
    """Rank 0 logs to stdout and, with times in UTC, appends to `<dump_dir>/train.log`; other ranks
    log warnings and errors to stderr. `app` is the import path of an app whose package logs too.
    Another call replaces the handlers of the one before.

    Raises UserError where the log cannot be written.
    """
    handlers: list[logging.Handler] = [_Console(sys.stderr if rank else sys.stdout)]
    prefix = f"[rank {rank}] " if rank else ""
    handlers[0].setFormatter(_Format(f"%(asctime)s {prefix}%(message)s", "%H:%M:%S"))
    if rank == 0 and dump_dir is not None:
        path = Path(dump_dir) / TRAIN_LOG
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handlers.append(_LogFile(path, encoding="utf-8"))
        except OSError as error:
            raise UserError(
                f"dump_dir = {dump_dir}: {path} cannot be written ({error.strerror})"
            ) from None
        in_utc = _Format("%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
        in_utc.converter = time.gmtime
        handlers[1].setFormatter(in_utc)
    logging.basicConfig(handlers=handlers, level=logging.WARNING, force=True)
    for name in ("lingua", "apps", "__main__", app.partition(".")[0]):
        if name:
            logging.getLogger(name).setLevel(logging.WARNING if rank else logging.INFO)


def progress_line(
    step: int, steps: int, metrics: Mapping[str, Any], eta_s: float, numbers: Mapping[str, float]
) -> str:
    """Returns the console's form of a line of metrics.jsonl. With its time it fits 80 columns:

    step   120 loss 2.134 grad 0.81 lr 3.0e-4 31.2k tok/s mfu 41% eta 2.1m

    Where the MFU is not known, peak memory is shown in its place. `steps` is the last step. Of
    `numbers`, what the app measures in each step, the first MAX_NUMBERS follow the loss.
    """
    mfu, skipped = metrics["mfu"], metrics["skipped_steps"]
    parts = [
        f"step {step:>{len(str(steps))}}",
        f"loss {metrics['loss']:.3f}",
        *(f"{name} {value:.3g}" for name, value in list(numbers.items())[:MAX_NUMBERS]),
        f"grad {metrics['grad_norm']:.2f}",
        f"lr {metrics['lr']:.1e}".replace("e-0", "e-").replace("e+0", "e+"),
        f"{short_count(metrics['tokens_per_s']):>5} tok/s",
        f"{metrics['peak_mem_gib']:.1f} GiB" if mfu is None else f"mfu {mfu:.0f}%",
        f"eta {short_time(eta_s)}",
    ]
    if skipped:
        parts.append(f"skipped {skipped}")
    return " ".join(parts)
