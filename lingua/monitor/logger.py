"""What a run says to people: the console of rank 0, `train.log`, and the progress line.

Modules use `logging.getLogger(__name__)`; an entry point calls init_logger once. Messages never
hold values of environment variables.
"""

import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lingua.errors import UserError
from lingua.format import short_count, short_time

# Loggers whose INFO is shown; everything else speaks from WARNING on.
OURS = ("lingua", "apps", "__main__")


_HANDLER = "lingua"


class _Format(logging.Formatter):
    """`08:05:17 message`, with `warning: ` before what is one and `[rank 3] ` on other ranks."""

    def __init__(self, time_format: str, prefix: str = "", utc: bool = False) -> None:
        super().__init__(datefmt=time_format)
        self.prefix = prefix
        self.converter = time.gmtime if utc else time.localtime

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        when = self.formatTime(record, self.datefmt)
        return f"{when} {self.prefix}{level}{record.message}"

    def usesTime(self) -> bool:
        return False  # formatMessage asks for it itself


def init_logger(dump_dir: Path | None, rank: int, app: str = "") -> None:
    """Rank 0 speaks on stdout and, in UTC, into `<dump_dir>/train.log` (appended); other ranks
    only warn, on stderr. `app` is the import path of an app whose package logs too. Called again,
    it replaces what it set up before.

    Raises UserError where the log cannot be written.
    """
    root = logging.getLogger()
    for handler in [h for h in root.handlers if h.name == _HANDLER]:
        root.removeHandler(handler)
        handler.close()
    if rank == 0:
        handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
        handlers[0].setFormatter(_Format("%H:%M:%S"))
        if dump_dir is not None:
            handlers.append(_file_handler(dump_dir))
    else:
        handlers = [logging.StreamHandler(sys.stderr)]
        handlers[0].setFormatter(_Format("%H:%M:%S", prefix=f"[rank {rank}] "))
        handlers[0].setLevel(logging.WARNING)
    for handler in handlers:
        handler.set_name(_HANDLER)
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for name in (*OURS, *([app.partition(".")[0]] if app else [])):
        logging.getLogger(name).setLevel(logging.INFO)


def _file_handler(dump_dir: Path) -> logging.Handler:
    path = Path(dump_dir) / "train.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"dump_dir = {dump_dir}: {path} cannot be written ({error.strerror})"
        ) from None
    handler.setFormatter(_Format("%Y-%m-%dT%H:%M:%SZ", utc=True))
    return handler


def progress_line(step: int, steps: int, metrics: Mapping[str, Any], eta_s: float | None) -> str:
    """One aligned line for people from a line of metrics.jsonl; what is None is left out.

    `step  120/2000  loss 2.1345  grad 0.81  lr 3.00e-03  31.2k tok/s  mfu 41.2%  1.2 GiB
    eta 2m05s`
    """
    shown = {
        "loss": "loss {:7.4f}",
        "grad_norm": "grad {:5.2f}",
        "lr": "lr {:.2e}",
        "tokens_per_s": "{:>6} tok/s",
        "mfu": "mfu {:4.1f}%",
        "peak_mem_gib": "{:.1f} GiB",
    }
    parts = [f"step {step:>{len(str(steps))}}/{steps}"]
    for key, text in shown.items():
        value = metrics.get(key)
        if value is not None:
            parts.append(text.format(short_count(value) if key == "tokens_per_s" else value))
    if metrics.get("skipped_steps"):
        parts.append(f"skipped {metrics['skipped_steps']}")
    if eta_s is not None:
        parts.append(f"eta {short_time(eta_s)}")
    return "  ".join(parts)
