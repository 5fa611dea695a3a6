"""A tensor that ranks share (DTensor) or not, as the part this rank holds and as the whole."""

from collections.abc import Callable

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


def map_whole(work: Callable[[Tensor], Tensor], part: Tensor, like: Tensor) -> Tensor:
    """This rank's part of `work` of a whole tensor, which keeps its shape.

    Each rank gives its `part` of a tensor that is sharded as `like` is, gathers the whole, works on
    it, and keeps its part: for what an optimizer can only compute of a whole matrix.
    """
    result = work(whole(as_shard(part, like)))
    if not isinstance(like, DTensor):
        return result
    mesh, placements = like.device_mesh, like.placements
    return distribute_tensor(result, mesh, placements, src_data_rank=None).to_local()  # sends none
