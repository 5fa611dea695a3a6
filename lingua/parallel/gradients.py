"""Gradients: when they are reduced over ranks, their global norm and clipping."""

from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lingua.parallel.tensors import local

if TYPE_CHECKING:
    from lingua.parallel.exact import GradientSums


class Sharded(FSDPModule):
    """A model that `parallelize_model` has sharded. FSDP makes the class of a module one of its own
    too, so that the module stays the same."""

    stays_gathered: bool  # from its first forward of a step to its last backward
    gradient_sums: "GradientSums | None"  # add gradients in FSDP's place: `deterministic: mesh`


def set_gradient_sync(model: nn.Module, mode: str | None, last: bool) -> None:
    """Set, before a micro-step's forward, which reductions its backward runs, and whether it frees
    the gathered parameters (`distributed.reshard`). A model that is not Sharded has none."""
    if isinstance(model, Sharded):
        model.set_reshard_after_backward(last or not model.stays_gathered)
        model.set_requires_gradient_sync(last or mode in ("replica_last", "every"))
        model.set_requires_all_reduce(last or mode == "every")
        if model.gradient_sums is not None:
            model.gradient_sums.start_micro_step(last)


def grad_norm(parameters: list[nn.Parameter], exact: bool = False) -> Tensor:
    """The global norm of the gradients: a float32 scalar on the device, equal on every rank, and on
    every data-parallel mesh with `exact`."""
    return grad_norms([parameters], exact)[0]


@torch.no_grad()
def grad_norms(groups: list[list[nn.Parameter]], exact: bool = False) -> Tensor:
    """The norm of the gradients of each group of parameters: float32 [n] on the device, equal on
    every rank. Called by every rank.

    Parameters may live on different meshes. Those of equal layout sum the squares of their shards
    over just the axes that split them, so what an axis replicates counts once.
    """
    if exact:
        from lingua.parallel.exact import exact_norm

        return torch.stack([exact_norm(parameters) for parameters in groups])
    total = torch.zeros(len(groups), device=next(chain(*groups)).device)
    layouts: dict[tuple[DeviceMesh | None, tuple[int, ...]], Tensor] = {}
    for i, parameters in enumerate(groups):
        parts: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
        for grad in [p.grad for p in parameters if p.grad is not None]:
            mesh: DeviceMesh | None = None
            split: tuple[int, ...] = ()
            if isinstance(grad, DTensor):
                mesh, places = grad.device_mesh, enumerate(grad.placements)
                split = tuple(axis for axis, place in places if not place.is_replicate())
            parts.setdefault((mesh, split), []).append(local(grad))
        for layout, grads in parts.items():
            squares = layouts.setdefault(layout, torch.zeros_like(total))
            squares[i] = nn.utils.get_total_norm(grads).square()
    for (mesh, split), squares in layouts.items():
        for axis in split:
            if mesh is not None and mesh.size(axis) > 1:
                dist.all_reduce(squares, group=mesh.get_group(axis))
        total += squares
    return total.sqrt()


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """The number to divide gradients of this norm by, so that their norm is at most `max_norm`; 1
    where the norm is not finite."""
    return torch.where(norm.isfinite(), ((norm + 1e-6) / max_norm).clamp(min=1.0), 1.0)
