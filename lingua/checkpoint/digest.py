"""A hash of a run's tensors, to the bit, that does not depend on how ranks share them. Checkpoints
record it, so that two of them can be compared, and one with what a run computes again.

It is linear: the bits of each element times one odd number for its index in each dimension, summed
modulo 2^64. That is a multiplication an element, less than writing it takes. It shows damage and
mistakes; a forger can keep it.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lingua.base.hashing import hash_bits, key_of
from lingua.checkpoint.tensors import Part, local_parts
from lingua.parallel.mesh import world_min_, world_sum_

# Elements that are hashed at once. On the CPU they stay in its cache, and are too few for torch to
# divide among threads, which wait for each other where the machine is busy.
CHUNKS = {"cpu": (1 << 15) - 1, "cuda": 1 << 22}
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def digest(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> str:
    """The hash of tensors by name, such as those of `tensors_of`: 16 hexadecimal digits. Called by
    every rank; `group` has all of them, over gloo. What several ranks hold counts once."""
    total = torch.zeros((), dtype=torch.int64)
    for part in local_parts(once(tensors, group)):
        total += hash_part(part).cpu()
    world_sum_(total, group)
    return digest_text(tensors, total)


def hash_part(part: Part) -> Tensor:
    """An int64 scalar on the device of the part. Those of the parts of a tensor have the same sum
    modulo 2^64 for any division into boxes."""
    t, device = part.out, part.out.device
    sides = (torch.arange(side.start, side.stop, device=device) for side in part.box)
    keys = (key_of(part.name, t.dtype, dim) for dim in range(t.dim()))
    rows, *columns = [hash_bits(k, i) | 1 for k, i in zip(keys, sides, strict=True)] or [
        torch.ones(1, dtype=torch.int64, device=device)
    ]
    inner = torch.ones(1, dtype=torch.int64, device=device)
    for factors in columns:
        inner = (inner[:, None] * factors).flatten()
    total = torch.zeros((), dtype=torch.int64, device=device)
    n = max(1, CHUNKS.get(device.type, 1 << 22) // len(inner))
    for values, factors in zip(t.reshape(len(rows), -1).split(n), rows.split(n), strict=True):
        bits = values.contiguous().view(BITS[t.element_size()])
        total += ((bits * inner).sum(1) * factors).sum()
    return total


def once(
    tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Those of tensors by name whose part this rank is to count or to write: what several ranks
    have equal parts of is chosen on one of them. Called by every rank; `group` has all of them."""
    plain = [name for name, t in tensors.items() if not isinstance(t, DTensor)]
    rank, none = dist.get_rank(), dist.get_world_size()
    # Where the tensor is on the meta device, another rank has it. Of others the first rank's.
    first = torch.tensor([none if tensors[name].is_meta else rank for name in plain])
    world_min_(first, group)
    holders = dict(zip(plain, first.tolist(), strict=True))
    loads: dict[int, list[int]] = {}  # bytes of each copy, by the number of copies
    return {
        name: t
        for name, t in tensors.items()
        if (_is_next(t, loads) if isinstance(t, DTensor) else holders[name] == rank)
    }


def _is_next(t: DTensor, loads: dict[int, list[int]]) -> bool:
    """Whether this rank has the copy of `t` that is chosen, that with the least bytes yet."""
    mesh, place = t.device_mesh, t.device_mesh.get_coordinate()
    assert place is not None
    copy, copies = 0, 1
    for i, n, placement in zip(place, mesh.shape, t.placements, strict=True):
        if placement.is_replicate():
            copy, copies = copy * n + i, copies * n
    load = loads.setdefault(copies, [0] * copies)
    turn = load.index(min(load))
    load[turn] += t.nbytes
    return turn == copy and bool((mesh.mesh == 0).any())  # replicas may each have a mesh


def digest_text(tensors: Mapping[str, Tensor], total: Tensor) -> str:
    """The hash of tensors whose parts have the sum `total`."""
    shapes = sum(key_of(name, t.dtype, *t.shape) for name, t in tensors.items())
    return f"{(int(total) + shapes) % 2**64:016x}"
