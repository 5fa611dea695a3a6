"""Devices and their links, and the time that a traced step takes on them (a roofline)."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lingua.base.errors import nearest
from lingua.config.load import from_values, load
from lingua.config.schema import Free, require
from lingua.config.values import plain, read_file
from lingua.monitor.peaks import peak_flops
from lingua.tools.plan.trace import StepPart, Trace
from lingua.tools.plan.work import Kernel

TABLE = Path(__file__).with_name("devices.yaml")
# Compiled blocks have this share of the memory traffic of kernels without matrix products (traced
# on an H200: 0.34 in llama_1B, 0.33 in a model of 124M), and it is taken for that of the launches.
# A cast to float8 becomes two kernels that read an element of bf16 and write it once: 5 of the 33
# bytes that torchao's operators move.
FUSED = {"block": 1 / 3, "float8": 5 / 33}
# Runs on one device, and on several, take from so many to so many times the planned step: what was
# measured, and what others have published (docs/planning.md).
STEP_RANGE, STEP_RANGE_OF_SEVERAL = (0.9, 1.25), (0.9, 1.65)


@dataclass
class Device:
    """A device, and nodes of several. Peaks are those of data sheets; the shares of them that real
    steps reach are assumptions, which a plan prints."""

    name: Free[str] = ""  # torch.cuda.get_device_name()
    memory_gib: Free[float] = 0.0  # memory that torch sees
    memory_gb_per_s: Free[float] = 0.0
    # peak in bf16; null: the one that the MFU of a device of this name refers to
    bf16_tflops: Free[float | None] = None
    float8_tflops: Free[float | None] = None  # peak in float8; null: it has no such products
    tf32_tflops: Free[float] = 0.0
    fp32_tflops: Free[float] = 0.0
    node_size: Free[int] = 8  # devices of a node
    node_gb_per_s: Free[float] = 0.0  # between devices of a node, each direction
    network_gb_per_s: Free[float] = 0.0  # between nodes, of each device and direction
    host_gb_per_s: Free[float] = 20.0  # copies from a device to pinned memory
    # Shares of the peak that matrix products and attention reach: by default as in runs published
    # in 2024. On an H100 FlashAttention-2 reaches 35 % (Shah et al., 2024, arXiv 2407.08608).
    matmul_share: Free[float] = 0.55
    attention_share: Free[float] = 0.35
    # that of products in float8, as published runs have it, which gain less than the peak
    float8_share: Free[float] = 0.4
    memory_share: Free[float] = 0.8  # share of the bandwidth that other kernels reach
    link_share: Free[float] = 0.75  # share of the bandwidth that large collectives reach
    launch_us: Free[float] = 10.0  # time of the host for an operator
    latency_us: Free[float] = 15.0  # latency of a collective for each doubling of its ranks
    reserve_gib: Free[float] = 2.0  # CUDA's context and NCCL
    fragmentation: Free[float] = 0.12  # memory lost by the allocator, a share of what it allocates

    def validate(self) -> Iterator[tuple[str, str]]:
        positive = ("memory_gib", "memory_gb_per_s", "fp32_tflops", "node_size", "host_gb_per_s")
        links = ("node_gb_per_s", "network_gb_per_s", "tf32_tflops")
        shares = ("matmul_share", "attention_share", "float8_share", "memory_share", "link_share")
        yield from require(
            self, "above 0 and finite", lambda v: 0 < v < math.inf, *positive, *links
        )
        yield from require(self, "above 0 and at most 1", lambda v: 0 < v <= 1, *shares)
        rest = ("launch_us", "latency_us", "reserve_gib", "fragmentation")
        yield from require(self, "at least 0 and finite", lambda v: 0 <= v < math.inf, *rest)
        if self.bf16_tflops is None and peak_flops(self.name, torch.bfloat16) is None:
            yield "bf16_tflops", "must be given: no device of this name is known"

    @property
    def bf16_flops(self) -> float:
        if self.bf16_tflops is not None:
            return self.bf16_tflops * 1e12
        peak = peak_flops(self.name, torch.bfloat16)
        assert peak is not None
        return peak

    def needs(self, allocated: int) -> float:
        """GiB that a process takes whose tensors take this many bytes at their peak."""
        return allocated * (1 + self.fragmentation) / 2**30 + self.reserve_gib


def unknown_device(given: str) -> str | None:
    """Returns the message about a device that `find_device` does not know: what to give instead."""
    table = read_file(TABLE, str(TABLE))
    if Path(given).suffix in (".yaml", ".yml") or given.lower() in table:
        return None
    return f"must be {', '.join(table)}, or a YAML file of its own{nearest(given, table)}"


def find_device(given: str) -> Device:
    """The device of this name, or of a YAML file with the keys of Device. Raises UserError."""
    if Path(given).suffix in (".yaml", ".yml"):
        return load(Device, [f"config={given}"])[0]
    values: Mapping[str, Any] = plain(read_file(TABLE, str(TABLE))[given.lower()])
    return from_values(Device(), values, str(TABLE))


def known_device(name: str) -> Device | None:
    """The device of the table that torch.cuda.get_device_name calls `name`."""
    table = plain(read_file(TABLE, str(TABLE)))
    return next((find_device(key) for key in table if table[key]["name"] == name), None)


@dataclass(frozen=True)
class Times:
    """Seconds of one rank."""

    micro: float  # each micro-step but the last
    last: float  # the last, with the reductions of gradients
    update: float  # clipping and optimizer
    compute: float  # time of the step's kernels
    host: float  # time in which the host launches them
    hidden: float  # time of sending while the device computes
    exposed: float  # time of sending while the device waits
    step: float
    range: tuple[float, float]  # of a step that is as far from its plan as other runs are


def step_times(trace: Trace, device: Device, tf32: bool, compiled: bool) -> Times:
    """The roofline of a step: a kernel takes the longer of its arithmetic and its memory traffic.
    What FSDP sends is hidden behind a micro-step's own kernels, what the ranks of a row send (tp,
    cp) is not. The host launches kernels ahead of the device, which waits where that takes longer.
    """

    def computed(part: StepPart) -> float:
        return sum(
            n * _kernel_s(kernel, device, tf32, compiled) for kernel, n in part.kernels.items()
        )

    def launched(part: StepPart) -> float:
        launches = [(kernel.place, n) for kernel, n in part.kernels.items() if not kernel.size]
        fused = FUSED if compiled else {}
        n_launches = sum(n * fused.get(place, 1) for place, n in launches)
        return n_launches * device.launch_us * 1e-6

    def sent(part: StepPart, of_row: bool) -> float:
        chosen = (t for t in part.collectives if (t["axis"] in ("tp", "cp")) == of_row)
        return sum(_sent_s(t, trace.sizes, device) for t in chosen)

    repeats = trace.n_micro - 1
    compute, host, hidden = computed(trace.update), launched(trace.update), 0.0
    exposed = sent(trace.update, False) + sent(trace.update, True)
    update = max(compute, host) + exposed
    durations = []
    for part, n in ((trace.micro, repeats), (trace.last, 1)):
        kernels_s, fsdp, waits = computed(part), sent(part, False), sent(part, True)
        launches_s = launched(part)
        durations.append(max(kernels_s + waits, fsdp, launches_s))
        compute += n * kernels_s
        host += n * launches_s
        hidden += n * min(kernels_s + waits, fsdp)
        exposed += n * (waits + max(0.0, fsdp - kernels_s - waits))
    step = repeats * durations[0] + durations[1] + update
    low, high = STEP_RANGE if trace.ranks == 1 else STEP_RANGE_OF_SEVERAL
    return Times(
        durations[0], durations[1], update, compute, host, hidden, exposed, step,
        (step * low, step * high),
    )  # fmt: skip


def _kernel_s(kernel: Kernel, device: Device, tf32: bool, compiled: bool) -> float:
    if kernel.place == "float8":
        peak = 1e12 * (device.float8_tflops or math.nan)
    elif kernel.size == 2:
        peak = device.bf16_flops
    else:
        peak = 1e12 * (device.tf32_tflops if tf32 else device.fp32_tflops)
    shares = {"attention": device.attention_share, "float8": device.float8_share}
    share = shares.get(kernel.place, device.matmul_share)
    fused = FUSED.get(kernel.place, 1) if compiled and not kernel.flops else 1
    traffic = fused * kernel.n_bytes / (device.memory_gb_per_s * 1e9 * device.memory_share)
    return max(kernel.flops / (peak * share), traffic)


def _sent_s(total: dict[str, Any], sizes: tuple[int, ...], device: Device) -> float:
    """Seconds of collectives as rings: each rank sends (n - 1) / n of the larger side, an
    all-reduce twice that (Thakur et al., 2005). In an all-to-all each sends for itself."""
    replicas, shards, tp, cp = (*sizes, 1)[:4]
    groups = {"tp": (tp, 1), "cp": (cp, tp), "dp_shard": (shards, tp)}  # ranks, and their distance
    groups["dp_replicate"] = replicas, shards * tp
    ranks, stride = groups.get(total["axis"], (math.prod(sizes[:3]), 1))
    if ranks == 1:
        return 0.0
    moved = total["bytes"] * (ranks - 1) / ranks * (2 if total["kind"] == "all_reduce" else 1)
    latency = total["count"] * device.latency_us * 1e-6 * math.log2(ranks)
    speed = ring_speed(device, ranks, stride)
    if total["kind"] == "all_to_all" and stride * ranks > device.node_size:  # by its own link alone
        speed = ring_speed(device, ranks, max(stride, device.node_size))
    return moved / speed + latency


def ring_speed(device: Device, ranks: int, stride: int = 1) -> float:
    """Bytes per second that each of `ranks` ranks, every `stride`-th one, sends in a large
    collective."""
    speed = device.node_gb_per_s
    if stride * ranks > device.node_size:  # rings through each of a node's devices in the group
        speed = min(speed, device.network_gb_per_s * max(1, device.node_size // stride))
    return speed * 1e9 * device.link_share
