"""Work on whole tensors of which each rank holds a part, divided among the ranks."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lingua.parallel.tensors import as_shard, whole


def part_of(t: Tensor, like: Tensor) -> Tensor:
    """The part of `t`, a whole tensor, that this rank holds of one that is sharded as `like` is."""
    if not isinstance(like, DTensor):
        return t
    mesh, placements = like.device_mesh, like.placements
    return distribute_tensor(t, mesh, placements, src_data_rank=None).to_local()  # sends none


def map_whole(
    work: Callable[[Tensor], Tensor], parts: Sequence[Tensor], like: Sequence[Tensor]
) -> list[Tensor]:
    """This rank's parts of `work` of whole tensors of one shape, which keeps it: for what an
    optimizer can only compute of a whole matrix.

    Each rank gives its `parts` of tensors that are sharded as `like` are, all alike and at most
    `n_owners(like[0])`. Each tensor is sent to one rank, worked on there, and sent back. One that
    several axes of the mesh shard is gathered and worked on by all ranks.
    """
    sharding = _sharding(like[0])
    if sharding is None:
        wholes = (whole(as_shard(t, p)) for t, p in zip(parts, like, strict=True))
        return [part_of(work(t), p) for t, p in zip(wholes, like, strict=True)]
    (mesh, axis, dim), shape = sharding, like[0].shape
    group, n, rank = mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis)
    most = -(-shape[dim] // n)
    lengths = [max(0, min(most, shape[dim] - r * most)) for r in range(n)]
    owns = rank < len(parts)
    # Elements that this rank sends to each, and that it receives from each.
    sent = [parts[0].numel()] * len(parts) + [0] * (n - len(parts))
    received = [shape.numel() // shape[dim] * length * owns for length in lengths]
    shards = parts[0].new_empty(sum(received))
    flat = torch.cat([t.flatten() for t in parts])
    dist.all_to_all_single(shards, flat, received, sent, group)
    if owns:
        shapes = [(*shape[:dim], length, *shape[dim + 1 :]) for length in lengths]
        pieces = zip(shards.split(received), shapes, strict=True)
        result = work(torch.cat([t.view(piece) for t, piece in pieces], dim))
        shards = torch.cat([t.flatten() for t in result.split(lengths, dim)])
    dist.all_to_all_single(flat, shards, sent, received, group)
    return [t.view_as(p) for t, p in zip(flat.split(sent[: len(parts)]), parts, strict=True)]


def n_owners(t: Tensor) -> int:
    """How many ranks can each work on another tensor that is sharded as `t` is."""
    sharding = _sharding(t)
    return 1 if sharding is None else sharding[0].size(sharding[1])


def _sharding(t: Tensor) -> tuple[DeviceMesh, int, int] | None:
    """(Mesh, axis, dimension): the only axis that shards `t`, each of its ranks having a part of
    this dimension. None: there is no such axis, or several."""
    if not isinstance(t, DTensor):
        return None
    mesh, kinds = t.device_mesh, t.placements
    shards = [(i, p) for i, p in enumerate(kinds) if not p.is_replicate() and mesh.size(i) > 1]
    if len(shards) != 1 or type(placement := shards[0][1]) is not Shard:
        return None
    return mesh, shards[0][0], placement.dim
