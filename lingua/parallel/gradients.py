"""Gradients: when they are reduced over ranks, their global norm and clipping."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lingua.parallel.init import canonical_name
from lingua.parallel.parallelize import find_modules, within
from lingua.parallel.tensors import local


def set_gradient_sync(model: nn.Module, mode: str, last: bool) -> None:
    """Set, before a micro-step's forward, which reductions its backward runs."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or mode != "last")
        model.set_requires_all_reduce(last or mode == "every")


@torch.no_grad()
def grad_norm(parameters: list[nn.Parameter]) -> Tensor:
    """The global norm of the gradients: a float32 scalar on the device, equal on every rank."""
    total = torch.zeros((), device=parameters[0].device)
    for layout, grads in _by_layout((str(i), p) for i, p in enumerate(parameters)).items():
        total = total + _sum_(nn.utils.get_total_norm(list(grads.values())).square(), layout)
    return total.sqrt()


@torch.no_grad()
def grad_norms(model: nn.Module, *patterns: str) -> dict[str, float]:
    """The norm of the gradients of each module that a pattern names (see ParallelPlan), without
    patterns of each parameter: the same on every mesh. A tied parameter counts under its first
    name. Called by every rank; the host waits. Raises UserError where a pattern matches nothing."""
    squares: dict[str, float] = {}
    named = ((canonical_name(name), p) for name, p in model.named_parameters())
    for layout, grads in _by_layout(named).items():
        norms = torch.stack([grad.norm() for grad in grads.values()])
        squares |= zip(grads, _sum_(norms.square(), layout).tolist(), strict=True)
    return {
        key: sum(square for name, square in squares.items() if within(name, [key])) ** 0.5
        for key in (find_modules(model, patterns) if patterns else squares)
    }


Layout = tuple[DeviceMesh | None, tuple[int, ...]]  # a mesh, and its axes that split a tensor


def _by_layout(named: Iterable[tuple[str, nn.Parameter]]) -> dict[Layout, dict[str, Tensor]]:
    """This rank's parts of the gradients by name, grouped: parameters may live on different
    meshes."""
    groups: dict[Layout, dict[str, Tensor]] = {}
    for name, grad in [(name, p.grad) for name, p in named if p.grad is not None]:
        mesh: DeviceMesh | None = None
        split: tuple[int, ...] = ()
        if isinstance(grad, DTensor):
            mesh, places = grad.device_mesh, enumerate(grad.placements)
            split = tuple(axis for axis, place in places if not place.is_replicate())
        groups.setdefault((mesh, split), {})[name] = local(grad)
    return groups


def _sum_(squares: Tensor, layout: Layout) -> Tensor:
    """Sum in place over just the axes that split the gradients, so what an axis replicates counts
    once."""
    mesh, split = layout
    for axis in split:
        if mesh is not None and mesh.size(axis) > 1:
            dist.all_reduce(squares, group=mesh.get_group(axis))
    return squares


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """The number to divide gradients of this norm by, so that their norm is at most `max_norm`; 1
    where the norm is not finite."""
    return torch.where(norm.isfinite(), ((norm + 1e-6) / max_norm).clamp(min=1.0), 1.0)
