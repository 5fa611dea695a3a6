"""A tensor that ranks share (DTensor) or not, as the part this rank holds and as the whole."""

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local(t: Tensor) -> Tensor:
    """The part of `t` that this rank holds; of a plain tensor, all of it."""
    return t.to_local() if isinstance(t, DTensor) else t


def whole(t: Tensor) -> Tensor:
    """All of `t`, gathered from the ranks that share it. Called by each of them."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def as_shard(part: Tensor, like: Tensor) -> Tensor:
    """`part`, which this rank holds, as a tensor that is sharded as `like` is."""
    if not isinstance(like, DTensor):
        return part
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(part, mesh, placements, shape=like.shape, stride=like.stride())


def part_of(t: Tensor, like: Tensor) -> Tensor:
    """The part that this rank holds of `t`, which every rank has, when it is sharded as `like` is.
    Nothing is sent."""
    if not isinstance(like, DTensor):
        return t
    return distribute_tensor(t, like.device_mesh, like.placements, src_data_rank=None).to_local()
