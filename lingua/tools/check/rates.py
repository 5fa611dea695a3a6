"""What a device and a disk reach: matrix products, copies, a file written and synced."""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile

import torch

BLOCK_BYTES = 1 << 20  # bytes of one write


def median_s(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of a call of `work`, whose end the host waits for; two more warm up."""
    seconds = []
    for _ in range(2 + repeats):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[2:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def product_flops(
    device: torch.device, dtype: torch.dtype, size: int = 8192, repeats: int = 10
) -> float:
    """FLOP/s of the product of two square matrices with `size` rows."""
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    return 2 * size**3 / median_s(lambda: torch.mm(a, b), device, repeats)


def copy_rate(device: torch.device, n_bytes: int, repeats: int = 10) -> float:
    """Bytes per second that a copy on the device reads and writes."""
    source = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * n_bytes / median_s(lambda: target.copy_(source), device, repeats)


def disk_rate(folder: Path, n_bytes: int) -> float:
    """Bytes per second of a new file in `folder`, written and synced. It is removed. Raises
    OSError."""
    n_blocks, block = -(-n_bytes // BLOCK_BYTES), os.urandom(BLOCK_BYTES)
    begin = time.perf_counter()
    # It has no name: ranks of several machines may have one number and write to one folder.
    with TemporaryFile(dir=folder, buffering=0) as f:
        for _ in range(n_blocks):
            f.write(block)
        os.fsync(f.fileno())
        return n_blocks * BLOCK_BYTES / (time.perf_counter() - begin)
