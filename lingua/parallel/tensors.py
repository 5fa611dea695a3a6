"""Tensors: the part that this rank holds, and copies between the host and its device."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lingua.parallel.torch_private import inner_tensor


def local(t: Tensor) -> Tensor:
    """The part of `t` that this rank holds; of a plain tensor, all of it."""
    part = t.to_local() if isinstance(t, DTensor) else t
    return inner_tensor(part)


def whole(t: Tensor) -> Tensor:
    """All of `t`, gathered from the ranks that share it. Called by each of them."""
    return inner_tensor(t.full_tensor() if isinstance(t, DTensor) else t)


def as_shard(part: Tensor, like: Tensor) -> Tensor:
    """`part`, which this rank holds, as a tensor that is sharded as `like` is."""
    if not isinstance(like, DTensor):
        return part
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(part, mesh, placements, shape=like.shape, stride=like.stride())


def to_device(t: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on the device. It is copied from pinned memory: for a copy from other memory the
    host waits until the device has done all that is queued."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)


def to_host(*tensors: Tensor) -> list[Any]:
    """The values of tensors of one device, numbers or lists. The host waits for the device once."""
    copies = [t.to("cpu", non_blocking=t.is_cuda) for t in tensors]  # into pinned memory
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
