"""What each rank measures of its machine, and the table of all, which names what is out of line."""

import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from math import inf
from pathlib import Path
from statistics import median_high
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from lingua.base.format import align, counted, printable
from lingua.model.head import CHUNK_BYTES
from lingua.parallel.args import DistributedArgs
from lingua.parallel.heartbeat import ABORT_S, Heartbeat
from lingua.parallel.launch import detect_launch, pick_device, start
from lingua.parallel.mesh import gather_on_rank_0, on_rank_0, world_sum_
from lingua.tools.check import numbers
from lingua.tools.check.numbers import BOUND, loss_errors
from lingua.tools.check.rates import copy_rate, disk_rate, median_s, product_flops
from lingua.tools.plan.device import STEP_RANGE, Device, find_device, known_device, ring_speed

DISK_BYTES = 1 << 27
CLOCK_S = 1.0  # torchrun's report orders failures by seconds
# Least share of the median. GPUs of a kind differ by up to 22 %, and outliers are 1.5 times slower
# (Sinha et al., 2022, arXiv 2208.11035). CPUs and disks have other users.
SLOW = {"cuda": 0.75, "cpu": 0.5, "disk": 0.1}
PEAK = 1.1  # clocks reach 8 % above those that data sheets have peaks for
MAX_LINES = 20  # about ranks that are out of line
PATIENCE_S = 300.0  # that ranks wait for one whose device hangs

T = TypeVar("T")
Value = float | str | None  # in the unit of its label; text: why it failed; None: not measured
Rank = tuple[str, str, dict[str, Value]]  # its place, the name of its device, values by label


class Part(NamedTuple):
    """Right is from `low` to `high`, and at least `share` of the median of all ranks."""

    label: str
    work: Callable[[], Value]
    low: float = 0.0
    high: float = inf
    share: float = 0.0


def parts(device: torch.device, kind: Device | None, folder: Path) -> list[Part]:
    """What every rank measures, in this order. `kind`: what its device must be like, if known."""
    on_cuda, slow = device.type == "cuda", SLOW[device.type]
    dtype = torch.bfloat16 if on_cuda else torch.float32
    size, copied, reduced = (8192, 1 << 30, 1 << 28) if on_cuda else (1024, 1 << 26, 1 << 24)
    heads = (8, 2, 128, 1024) if on_cuda else (4, 2, 64, 256)
    chunk = CHUNK_BYTES // (4 * 32768)  # positions
    loss = numbers.LossCase(*((2 * chunk, 1024, 32768) if on_cuda else (512, 128, 1024)))
    flops = copies = links = 0.0, inf
    if kind is not None:  # from the rates at which a step takes as long as a plan allows
        peak, memory = kind.bf16_flops / 1e12 if on_cuda else kind.fp32_tflops, kind.memory_gb_per_s
        flops = peak * kind.matmul_share / STEP_RANGE[1], peak * PEAK
        copies = memory * kind.memory_share / STEP_RANGE[1], memory * PEAK
        links = ring_speed(kind, dist.get_world_size()) / 1e9 / STEP_RANGE[1], inf

    def attention(documents: bool, window: int | None) -> float:
        case = numbers.AttentionCase(*heads, documents, window)
        return largest(numbers.attention_errors(case, "auto", device, dtype))

    return [
        Part("memory in use, GiB", lambda: used_gib(device), high=Device.reserve_gib),
        Part("products, TFLOP/s", lambda: product_flops(device, dtype, size) / 1e12, *flops, slow),
        Part("copies, GB/s", lambda: copy_rate(device, copied) / 1e9, *copies, slow),
        Part("attention, error / plain", lambda: attention(False, None), high=BOUND),
        Part("masked attention, error / plain", lambda: attention(True, 100), high=BOUND),
        Part("loss, error / plain", lambda: largest(loss_errors(loss, device, dtype)), high=BOUND),
        Part("all-reduce, GB/s", lambda: all_reduce_rate(device, reduced), *links),
        Part("disk, GB/s", lambda: disk_rate(folder, DISK_BYTES) / 1e9, share=SLOW["disk"]),
        Part("clock, s from the median", clock_offset, high=CLOCK_S),
    ]


def check(asked: str, gpu: str | None, folder: Path) -> int:
    """Measure all ranks, and print the table. Returns the exit code, on each. Raises UserError."""
    said, launch = None if gpu is None else find_device(gpu), detect_launch()
    device = pick_device(asked, launch)
    # Ranks meet over gloo alone, so that one whose device fails can report it.
    heart, settings = Heartbeat(), DistributedArgs(timeout_s=PATIENCE_S)
    start(torch.device("cpu"), launch, settings, heart=heart)
    on_cuda = device.type == "cuda"
    name = attempt(lambda: torch.cuda.get_device_name(device) if on_cuda else "cpu", folder)
    place = f"rank {launch.rank} on {socket.gethostname()} ({device})"
    ranks = gather_on_rank_0((place, name, measure(device, folder, heart)))
    return on_rank_0(lambda: report(ranks or [], said, device, folder))


def measure(device: torch.device, folder: Path, heart: Heartbeat) -> dict[str, Value]:
    """Called by every rank. Each part begins on all at once: they share power, memory and disks."""
    found: dict[str, Value] = {}
    for part in parts(device, None, folder):
        heart.at(0, part.label)
        world_sum_(torch.zeros(1))
        found[part.label] = attempt(part.work, folder)
    return found


def attempt(work: Callable[[], T], folder: Path) -> T | str:
    """What `work` returns, or why it failed, so that every rank gets to the table."""
    try:
        return work()
    except OSError as error:
        return f"{folder}: {error.strerror}"
    except Exception as error:  # torch has no common class for those of a device that has failed
        return str(error).partition("\n")[0]


def used_gib(device: torch.device) -> Value:
    if device.type == "cpu":
        return None
    torch.cuda.set_device(device)
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def largest(errors: numbers.Errors) -> float:
    return float(torch.tensor(errors.multiples).max())  # NaN where one is


def all_reduce_rate(device: torch.device, n_bytes: int) -> Value:
    """GB/s that each rank sends, as in a ring. None where not all ranks can take part."""
    n, able = dist.get_world_size(), torch.zeros(2)  # ranks that can, by type of device
    with suppress(Exception):  # a device that has failed
        t = torch.zeros(n_bytes // 4, device=device)
        able[int(device.type == "cuda")] = 1
    if n == 1 or n not in world_sum_(able):
        return None
    patience = timedelta(seconds=PATIENCE_S + ABORT_S)  # the late are named before it ends
    group = dist.new_group(timeout=patience, backend="nccl") if device.type == "cuda" else None
    seconds = median_s(lambda: dist.all_reduce(t, group=group), device, repeats=5)
    dist.all_reduce(t.fill_(dist.get_rank() + 1), group=group)
    wrong = int((t != n * (n + 1) / 2).sum())
    return counted(wrong, "wrong sum") if wrong else 2 * (n - 1) / n * n_bytes / seconds / 1e9


def clock_offset() -> float:
    now = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    now[dist.get_rank()] = time.time()
    return abs(float(world_sum_(now)[dist.get_rank()] - now.median()))


def report(ranks: Sequence[Rank], said: Device | None, device: torch.device, folder: Path) -> int:
    """Print the table of all ranks and what is out of line. Returns the exit code."""
    name = (said and said.name) or Counter(name for _, name, _ in ranks).most_common(1)[0][0]
    if (kind := said or known_device(name)) is not None:
        kind.node_size = detect_launch().local_world_size
    rows = [["check", "verdict", "must be", "least", "median", "most"]]
    wrong = [f"error: device: {p}: {other}, not {name}" for p, other, _ in ranks if other != name]
    for label, _, low, high, share in parts(device, kind, folder):
        values = [(p, found[label]) for p, _, found in ranks if found[label] is not None]
        known = sorted(v for _, v in values if isinstance(v, float))
        typical = median_high(known or [0.0])
        low = max(low, share * typical * (len(ranks) > 1))
        bad = [(p, v) for p, v in values if not (isinstance(v, float) and low <= v <= high)]
        texts = [f"{v:.4g}" if isinstance(v, float) else v for _, v in bad]
        wrong += [f"error: {label}: {p}: {text}" for (p, _), text in zip(bad, texts, strict=True)]
        verdict = "OUT OF LINE" if bad else "right" if known else "not measured"
        need = [f"at least {low:.4g}"] * (low > 0) + [f"at most {high:.4g}"] * (high < inf)
        shown = [f"{v:.4g}" for v in (known[0], typical, known[-1])] if known else "---"
        rows.append([label, verdict, ", ".join(need) or "-", *shown])
    print(f"{counted(len(ranks), 'rank')}; device: {name}")
    print("\n".join(align(rows, left=3)), flush=True)
    wrong[MAX_LINES:] = [f"error: and {len(wrong) - MAX_LINES} more"] * (len(wrong) > MAX_LINES)
    print(printable("".join(f"{line}\n" for line in wrong)), end="", file=sys.stderr, flush=True)
    return int(bool(wrong))
