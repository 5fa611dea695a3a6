"""What programs read: lines of JSON in the dump dir, and the numbers that depend on the
device: peak FLOP/s, MFU, peak memory."""

import hashlib
import resource
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import torch

from lingua.base.errors import UserError
from lingua.base.files import append_whole, write_atomically

# ---- lines of JSON

# Scalars of numpy become numbers; NaN and infinity, which JSON lacks, become null.
OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
# What a run does not reproduce: the time, and what depends on the machine's speed and memory.
NOT_CHAINED = {"created_at", "tokens_per_s", "tokens_per_s_per_device", "mfu", "step_time_s"}
NOT_CHAINED |= {"data_time_s", "host_time_s", "slowest_rank", "slowest_ratio"}
NOT_CHAINED |= {"peak_mem_gib", "chain"}
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


def cut_back(path: Path, step: int) -> Chain:
    """Remove the lines of later steps than `step`, an incomplete last line, and what is no line of
    a run. The file is replaced atomically, and not touched where all lines stay. Returns the last
    links, empty where there are none. Raises UserError."""
    try:
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if _is_up_to(step, line)]
        if len(kept) < len(lines):
            write_atomically(path, b"".join(kept).decode())
        return reduce(Chain.after, map(orjson.loads, kept), Chain())
    except OSError as error:
        raise UserError(f"{path}: cannot be cut back to step {step}: {error}") from None


def _is_up_to(step: int, line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and orjson.loads(line).get("step", step) <= step
    except (ValueError, AttributeError, TypeError):  # incomplete, or no line of a run
        return False


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
