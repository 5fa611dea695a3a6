"""What programs read: lines of JSON in the dump dir, and the numbers that depend on the
device: peak FLOP/s, MFU, peak memory."""

import hashlib
import resource
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import torch

from lingua.base.errors import UserError
from lingua.base.files import append_whole, write_atomically
from lingua.checkpoint.starts import NUMBER, in_order

# ---- lines of JSON

# Scalars of numpy become numbers; NaN and infinity, which JSON lacks, become null.
OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
# What a run does not reproduce: the time, and what depends on the machine's speed and memory.
NOT_CHAINED = {"created_at", "tokens_per_s", "tokens_per_s_per_device", "mfu", "step_time_s"}
NOT_CHAINED |= {"data_time_s", "host_time_s", "slowest_rank", "slowest_ratio"}
NOT_CHAINED |= {"peak_mem_gib", "chain", NUMBER}
# Events of the run itself, at the step that it has reached. One of an app may be about any step.
LINKED_EVENTS = ("start", "topology", "stop")


class Chain(NamedTuple):
    """The last links of a file: of lines about steps, the same for a run that was stopped and
    resumed; and of events of the run, which rest on the lines before them too."""

    lines: str = ""
    events: str = ""

    def link(self, line: Mapping[str, Any]) -> str | None:
        """The `chain` of the next line, 16 hexadecimal digits: a hash of the links that it rests on
        and of what it has that a run reproduces. None for an event of an app."""
        if line.get("event", "stop") not in LINKED_EVENTS:
            return None
        kept = {key: value for key, value in line.items() if key not in NOT_CHAINED}
        text = orjson.dumps(kept, option=OPTIONS | orjson.OPT_SORT_KEYS)
        previous = self.events + self.lines if "event" in line else self.lines
        return hashlib.blake2b(previous.encode() + text, digest_size=8).hexdigest()

    def after(self, line: Mapping[str, Any]) -> "Chain":
        """The last links once `line`, with its own, is in the file."""
        if line.get("event", "stop") not in LINKED_EVENTS or not line.get("chain"):
            return self
        last = str(line["chain"])
        return self._replace(events=last) if "event" in line else self._replace(lines=last)


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append `line`, which has a `step`, to a .jsonl file, with the time as `created_at`.

    A line is one write to the operating system, so a killed process leaves at most its last line
    incomplete, which cut_back removes. Raises OSError where the disk is full, the file as before.
    """
    values = {**line, "created_at": datetime.now(UTC).isoformat()}
    append_whole(path, orjson.dumps(values, option=OPTIONS | orjson.OPT_APPEND_NEWLINE))


class Earlier(NamedTuple):
    """What earlier starts have left in a file."""

    chain: Chain = Chain()  # the last links of the lines that stay
    step: int = 0  # the highest of all lines
    start: Mapping[str, Any] = {}  # the last event of a start
    ended: str = ""  # why that start ended, where it has written that


def cut_back(path: Path, step: int, may_write: Callable[[], bool] = lambda: True) -> Earlier:
    """Remove the lines of later steps than `step`, those that a start has added after a later one
    had, an incomplete last line, and what is no line of a run. The file is replaced atomically, and
    not touched where all lines stay, nor where this process, asked right before, may not write.
    Raises UserError."""
    kept: list[bytes] = []
    left = Earlier()
    try:
        texts = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        for text, line in in_order(filter(None, map(_parsed, texts))):
            left = left._replace(step=max(left.step, line.get("step", 0)))
            if line.get("event") == "start":
                left = left._replace(start=line, ended="")
            elif line.get("event") == "stop":
                ended = ": ".join(str(line[key]) for key in ("reason", "error") if key in line)
                left = left._replace(ended=ended)
            if line.get("step", step) <= step:
                kept.append(text)
                left = left._replace(chain=left.chain.after(line))
        if len(kept) < len(texts) and may_write():
            write_atomically(path, b"".join(kept).decode())
    except OSError as error:
        raise UserError(f"{path}: cannot be cut back to step {step}: {error}") from None
    return left


def _parsed(text: bytes) -> tuple[bytes, dict[str, Any]] | None:
    """A line with its text. None where it is incomplete, or no line of a run."""
    try:
        line = orjson.loads(text) if text.endswith(b"\n") else None
    except ValueError:
        return None
    if isinstance(line, dict) and isinstance(line.get("step", 0), int | float):
        return text, line
    return None


# ---- the device


def mfu(flops_per_token: float, tokens_per_s_per_device: float, peak: float | None) -> float | None:
    """Model FLOPs utilization in percent of the device's peak (Chowdhery et al. 2022, PaLM,
    appendix B); None where the peak is not known."""
    return None if peak is None else 100 * flops_per_token * tokens_per_s_per_device / peak


def peak_mem_gib(device: torch.device) -> float:
    """Peak memory so far: of this process's tensors on CUDA, of the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # Linux counts in KiB, macOS in bytes
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
