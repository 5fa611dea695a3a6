"""Gradients: when they are reduced over ranks, their global norm and clipping."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lingua.parallel.tensors import local


def set_gradient_sync(model: nn.Module, mode: str | None, last: bool) -> None:
    """Set, before a micro-step's forward, which reductions its backward runs."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or mode in ("replica_last", "every"))
        model.set_requires_all_reduce(last or mode == "every")
    if (sums := getattr(model, "gradient_sums", None)) is not None:
        sums.start_micro_step(last)


@torch.no_grad()
def grad_norm(parameters: list[nn.Parameter], exact: bool = False) -> Tensor:
    """The global norm of the gradients: a float32 scalar on the device, equal on every rank, and on
    every data-parallel mesh with `exact`.

    Parameters may live on different meshes. Each group of equal layout sums the squares of its
    shards over just the axes that split it, so what an axis replicates counts once.
    """
    if exact:
        from lingua.parallel.exact import exact_norm

        return exact_norm(parameters)
    groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for grad in [p.grad for p in parameters if p.grad is not None]:
        mesh: DeviceMesh | None = None
        split: tuple[int, ...] = ()
        if isinstance(grad, DTensor):
            mesh, places = grad.device_mesh, enumerate(grad.placements)
            split = tuple(axis for axis, place in places if not place.is_replicate())
        groups.setdefault((mesh, split), []).append(local(grad))
    total = torch.zeros((), device=parameters[0].device)
    for (mesh, split), grads in groups.items():
        squares = nn.utils.get_total_norm(grads).square()
        for axis in split:
            if mesh is not None and mesh.size(axis) > 1:
                dist.all_reduce(squares, group=mesh.get_group(axis))
        total = total + squares
    return total.sqrt()


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """The number to divide gradients of this norm by, so that their norm is at most `max_norm`; 1
    where the norm is not finite."""
    return torch.where(norm.isfinite(), ((norm + 1e-6) / max_norm).clamp(min=1.0), 1.0)
