"""A hash of tensors that does not depend on how ranks share them: equal numbers, equal hash."""

import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from lingua.base.hashing import hash_bits, key_of
from lingua.checkpoint.tensors import Part, local_parts
from lingua.parallel.mesh import world_sum_

CHUNK = 1 << 20  # elements that are hashed at once
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def digest(tensors: Mapping[str, Tensor]) -> str:
    """The hash of tensors by name, such as those of `tensors_of`, 16 hexadecimal digits. Called by
    every rank; what several ranks hold counts once. Nothing is gathered but the places of parts."""
    parts = local_parts(tensors)
    places = [(part.name, tuple((s.start, s.stop) for s in part.box)) for part in parts]
    everyone = [places] * dist.get_world_size()
    dist.all_gather_object(everyone, places)
    elsewhere = set().union(*everyone[: dist.get_rank()])
    total = torch.zeros((), dtype=torch.int64)
    for part, place in zip(parts, places, strict=True):
        if place not in elsewhere:
            total += hash_part(part, tensors[part.name].shape)
    return f"{int(world_sum_(total)) % 2**64:016x}"


def hash_part(part: Part, shape: torch.Size) -> int:
    """Sum over the elements of a part, modulo 2^64, of a hash of (name and dtype, index in the
    whole tensor, which has this shape, bits). Parts sum to the same in any division."""
    key, total = key_of(part.name, part.out.dtype), torch.zeros((), dtype=torch.int64)
    total = total.to(part.out.device)
    for values, index in _chunks(part, shape):
        bits = values.contiguous().view(BITS[values.element_size()]).long()
        total += hash_bits(hash_bits(key, index), bits).sum()
    return int(total)


def _chunks(part: Part, shape: torch.Size) -> Iterator[tuple[Tensor, Tensor]]:
    """Some elements of a part at a time, and their indices in the tensor, row after row."""
    if not part.box:
        yield part.out, torch.zeros((), dtype=torch.int64, device=part.out.device)
        return
    index = torch.zeros((), dtype=torch.int64, device=part.out.device)
    for box, n in zip(part.box[1:], shape[1:], strict=True):
        index = index[..., None] * n + torch.arange(box.start, box.stop, device=index.device)
    row_size, first = math.prod(shape[1:]), part.box[0].start
    step = max(1, CHUNK // max(1, index.numel()))
    for i in range(0, len(part.out), step):
        values = part.out[i : i + step]
        rows = torch.arange(first + i, first + i + len(values), device=index.device)
        yield values, rows.view(-1, *[1] * index.dim()) * row_size + index
