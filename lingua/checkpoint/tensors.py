"""The tensors of a run by name, the parts of them that this rank has, and the settings of its
optimizer as JSON."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lingua.parallel.init import canonical_name
from lingua.parallel.parallelize import reshard
from lingua.parallel.tensors import as_shard, local
from lingua.parallel.torch_private import (
    compute_local_shape_and_global_offset,
    non_persistent_buffers,
)

if TYPE_CHECKING:
    from lingua.optim.optimizer import LoopOptimizer

JSON = (bool, int, float, str, list, tuple)  # types of an optimizer's settings


class Part(NamedTuple):
    """A box of a named tensor, and the memory that it is read into."""

    name: str
    box: tuple[slice, ...]  # indices in the whole tensor
    out: Tensor  # not a DTensor; has the shape of the box, and at least one element


def tensors_of(
    model: nn.Module,
    optimizer: "LoopOptimizer | None" = None,
    parameters: Mapping[str, nn.Parameter] | None = None,
    without: Collection[str] = (),
) -> dict[str, Tensor]:
    """Every tensor of a run by name: `model.<name>` and `optim.<state>.<parameter name>`.

    These are the live tensors: saving reads them, loading fills them in place. One on the meta
    device is held by another rank. `parameters` are the sharded ones, where another thread uses the
    model, which stays as it is. Those of the model whose names are in `without` are left out.
    """
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in non_persistent_buffers(module)
    }
    if parameters is None:
        reshard(model)
        parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for name, p in parameters.items():
        tensors[f"model.{canonical_name(name)}"] = as_shard(local(p.detach()), p)
        state = {} if optimizer is None else optimizer.state_of(p)
        for key, value in sorted(state.items()):
            tensors[f"optim.{key}.{canonical_name(name)}"] = value
    for name, b in model.named_buffers():
        if name not in transient:
            tensors[f"model.{canonical_name(name)}"] = b
    return {n: t for n, t in tensors.items() if n.removeprefix("model.") not in without}


def local_parts(tensors: Mapping[str, Tensor]) -> list[Part]:
    """The part of each tensor that this rank has, without those of which it has no element."""
    parts = []
    for name, t in tensors.items():
        begin: tuple[int, ...] = (0,) * t.dim()
        if isinstance(t, DTensor):
            _, begin = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
        out = local(t).detach()
        if out.numel() and not out.is_meta:
            box = (slice(first, first + n) for first, n in zip(begin, out.shape, strict=True))
            parts.append(Part(name, tuple(box), out))
    return parts


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns each parameter group without its parameters and values that JSON does not have."""
    return [
        {k: v for k, v in group.items() if k != "params" and (v is None or isinstance(v, JSON))}
        for group in optimizer.param_groups
    ]
