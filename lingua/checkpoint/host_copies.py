"""Copies of a run's tensors in host memory, which a save in the background writes."""

import weakref
from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lingua.parallel.tensors import local
from lingua.parallel.torch_private import on_host


def copy_to_host(tensors: dict[str, Tensor], copies: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as they are now, in host memory: `copies`, which is used again at every save."""
    parts = {name: local(t) for name, t in tensors.items() if not t.is_meta}
    if not parts.keys() <= copies.keys():
        copies |= dict(zip(parts, host_memory(list(parts.values())), strict=True))
    copied = dict(tensors)  # those on the meta device are another rank's
    for name, part in parts.items():
        t, copy = tensors[name], copies[name].copy_(part, non_blocking=part.is_cuda)
        copied[name] = on_host(copy, t) if isinstance(t, DTensor) else copy
    if any(t.is_cuda for t in parts.values()):
        torch.cuda.synchronize()
    return copied


def host_memory(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Memory of the host for tensors, each with a storage of its own, in one block. It is pinned
    for those of CUDA, here: torch rounds the size of pinned memory up to a power of two."""
    sizes = [-(-t.nbytes // 64) * 64 for t in tensors]  # so that each is aligned
    block = torch.empty(sum(sizes), dtype=torch.uint8).numpy()
    if any(t.is_cuda for t in tensors):
        cuda, begin = torch.cuda.cudart(), block.ctypes.data
        torch.cuda.check_error(int(cuda.cudaHostRegister(begin, block.nbytes, 0)))
        weakref.finalize(block, cuda.cudaHostUnregister, begin)  # each copy keeps the block
    for t, begin in zip(tensors, accumulate(sizes, initial=0), strict=False):
        yield torch.from_numpy(block[begin : begin + t.nbytes]).view(t.dtype).view(t.shape)
