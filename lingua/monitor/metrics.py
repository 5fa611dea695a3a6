"""What a run says to programs: lines of JSON in the dump dir, Weights & Biases when configured,
and the numbers that need the device: peak FLOP/s, MFU, peak memory."""

import errno
import json
import math
import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from lingua.config.schema import Free
from lingua.errors import UserError
from lingua.files import open_synced


@dataclass
class WandbArgs:
    project: Free[str] = "lingua"  # project the run is filed under
    entity: Free[str | None] = None  # user or team; null: the account's default
    name: Free[str | None] = None  # shown name of the run; null: the config's `name`
    group: Free[str | None] = None  # runs that are shown together
    job_type: Free[str | None] = None  # label within a group
    tags: Free[list[str] | None] = None  # labels to search for
    notes: Free[str | None] = None  # a longer description
    # null: what WANDB_MODE or `wandb` itself is set to, online if nothing is
    mode: Free[Literal["online", "offline", "disabled"] | None] = None
    dir: Free[str | None] = None  # folder of wandb's own files; null: the dump dir


@dataclass
class LoggingArgs:
    freq: Free[int] = 10  # steps per line of metrics.jsonl and of the console
    wandb: Free[WandbArgs | None] = None  # Weights & Biases, when given

    def validate(self) -> Iterator[tuple[str, str]]:
        if self.freq < 1:
            yield "freq", "must be at least 1"


# ---- lines of JSON


class MetricsFile:
    """Appends lines to a .jsonl file. A line is one write to the operating system, so that readers
    and a killed process leave whole lines but for the last; cut_back removes that one."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115, closed by close()

    def write(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Append `line`, which has a `step`, and `created_at`; returns what was written.

        JSON has no NaN and no infinity: they become null. Raises OSError where the line does not
        fit on the disk; then none of it is there.
        """
        written = _strict({**line, "created_at": datetime.now(UTC).isoformat()})
        text = json.dumps(written, allow_nan=False).encode() + b"\n"
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError:
            with suppress(OSError):
                self._file.truncate(end)
            raise
        return written

    def event(self, event: str, step: int, **values: Any) -> dict[str, Any]:
        """Append what happened after `step` completed updates; readers tell it by its `event`."""
        return self.write({"event": event, "step": step, **values})

    def close(self) -> None:
        self._file.close()


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _strict(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(entry) for entry in value]
    return value


def cut_back(path: Path, step: int) -> int:
    """Drop the lines of steps after `step` (-1: all), and what a killed process left torn; returns
    how many. The file is replaced whole, or not touched where nothing is to be dropped."""
    try:
        lines = Path(path).read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    kept = [line for line in lines if _is_line_up_to(line, step)]
    if len(kept) < len(lines):
        new = Path(f"{path}.new")
        with open_synced(new) as file:
            file.writelines(kept)
        os.replace(new, path)
    return len(lines) - len(kept)


def _is_line_up_to(line: bytes, step: int) -> bool:
    try:
        values = json.loads(line)
    except ValueError:
        return False
    number = values.get("step") if isinstance(values, dict) else None
    return line.endswith(b"\n") and not (isinstance(number, int) and number > step)


# ---- the device

# Dense bf16/fp16 tensor-core peaks with fp32 accumulation, in TFLOP/s, from the makers' data
# sheets (half of what they print "with sparsity"). First match wins: all words must be in the name.
_PEAK_TFLOPS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("gb200",), 2500),
    (("b200",), 2250),
    (("h200", "nvl"), 835.5),
    (("h200",), 989),
    (("gh200",), 989),
    (("h100", "pcie"), 756),
    (("h100", "nvl"), 835.5),
    (("h100",), 989),
    (("h800", "pcie"), 756),
    (("h800",), 989),
    (("a100",), 312),
    (("a800",), 312),
    (("l40s",), 362),
    (("l40",), 181),
    (("l4",), 121),
    (("a40",), 149.7),
    (("a10",), 125),
    (("rtx", "4090"), 165.2),
    (("rtx", "3090"), 71),
    (("mi300x",), 1307.4),
    (("mi250x",), 191.5),  # a device is one of the card's two dies
)
# Words for a slice of the device, or a variant with fewer units or lower clocks.
_OTHER_DEVICES = {"mig", "grid", "laptop", "d"}


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s the device can do at most in `dtype`, or None where that is not known for sure.

    `device_name` as torch.cuda.get_device_name gives it; only bf16 and fp16 are known.
    """
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    if dtype not in (torch.bfloat16, torch.float16) or words & _OTHER_DEVICES:
        return None
    for name, tflops in _PEAK_TFLOPS:
        if words.issuperset(name):
            return tflops * 1e12
    return None


def mfu(flops_per_token: float, tokens_per_s_per_device: float, peak: float | None) -> float | None:
    """Model FLOPs utilisation in percent of the device's peak (Chowdhery et al. 2022, PaLM,
    appendix B); None where the peak is not known."""
    return None if peak is None else 100 * flops_per_token * tokens_per_s_per_device / peak


def peak_mem_gib(device: torch.device) -> float:
    """Most memory so far: of this process's tensors on CUDA, of the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # Linux counts in KiB, macOS in bytes
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


# ---- Weights & Biases


def start_wandb(args: WandbArgs, name: str, config: Mapping[str, Any], dump_dir: Path) -> Any:
    """The wandb run of this dump dir: a new one, or the same again where `<dump_dir>/wandb_id`
    names it. Log lines of metrics.jsonl as they are: `run.log(line)`.

    `step` is an axis of our own: wandb's can only rise, and a resumed run repeats steps. Raises
    UserError where wandb is not installed or refuses to start.
    """
    try:
        import wandb
    except ImportError:
        raise UserError(
            "logging.wandb is set, but the package wandb is not installed: "
            "`pip install wandb`, or remove logging.wandb"
        ) from None
    id_file = Path(dump_dir) / "wandb_id"
    run_id = id_file.read_text().strip() if id_file.exists() else ""
    try:
        run = wandb.init(
            project=args.project,
            entity=args.entity,
            name=args.name or name,
            group=args.group,
            job_type=args.job_type,
            tags=args.tags,
            notes=args.notes,
            mode=args.mode,
            dir=args.dir or str(dump_dir),
            config=dict(config),
            allow_val_change=True,
            id=run_id or None,
            resume="allow",
        )
    except Exception as error:  # wandb.Error, and what its own process or the system meets
        raise UserError(f"logging.wandb: wandb did not start: {error}") from None
    id_file.write_text(run.id + "\n")
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def wandb_values(kind: str, line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of `<kind>.jsonl` by wandb's names: what is of a source or a task is under its own,
    such as `validation/wiki/nats_per_byte`."""
    of = {"metrics.validation": "source", "metrics.eval": "task"}.get(kind, "")
    prefix = f"{kind.removeprefix('metrics.')}/{line[of]}/" if of else ""
    return {k if k == "step" else prefix + k: v for k, v in line.items() if k != of}
