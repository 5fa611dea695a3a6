"""Between the host and its device: copies without a wait, values with one, threads that use it."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


def to_device(t: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on the device. It is copied from pinned memory: for a copy from other memory the
    host waits until the device has done all that is queued."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t


def to_host(*tensors: Tensor) -> list[Any]:
    """The values of tensors of one device, numbers or lists. The host waits for the device once."""
    copies = [t.to("cpu", non_blocking=True) for t in tensors]  # into pinned memory
    if any(t.is_cuda for t in tensors):
        torch.cuda.current_stream().synchronize()
    return [t.tolist() for t in copies]


def device_threads(n: int, name: str) -> ThreadPoolExecutor:
    """`n` threads on the CUDA device of this one, where it has one. A new thread is on device 0,
    and whatever it asks of CUDA makes a context there: half a GiB for each rank of the machine."""
    if not torch.cuda.is_initialized():
        return ThreadPoolExecutor(n, name)
    device = torch.cuda.current_device()
    return ThreadPoolExecutor(n, name, torch.cuda.set_device, (device,))
