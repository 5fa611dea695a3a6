"""Gradients: when they are reduced over ranks, what that costs, their global norm and clipping."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lingua.base.format import human_bytes
from lingua.parallel.mesh import DistributedArgs
from lingua.parallel.tensors import local


def set_gradient_sync(model: nn.Module, mode: str, last: bool) -> None:
    """Set, before a micro-step's forward, which reductions its backward runs."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or mode != "last")
        model.set_requires_all_reduce(last or mode == "every")


def grad_sync_note(model: nn.Module, mesh: DeviceMesh, mode: str, n_micro: int) -> Iterator[str]:
    """The memory that `grad_sync` costs and the traffic that it saves, on each rank."""
    replicas, shards, _ = mesh.shape
    if n_micro == 1 or shards * replicas == 1:
        return
    # Bytes of this rank's float32 gradients, after and before they are split over dp_shard.
    shard_bytes = sum(local(p).numel() for p in model.parameters()) * 4
    whole_bytes = shard_bytes * shards
    reduces = shard_bytes if replicas > 1 and mode != "every" else 0
    kept = whole_bytes if mode == "last" else reduces
    scatters = whole_bytes if shards > 1 and mode == "last" else 0
    yield (
        f"distributed.grad_sync = {mode}: keeps {human_bytes(kept)} of gradients between "
        f"micro-steps and saves {human_bytes((n_micro - 1) * (scatters + reduces))} of gradient "
        "traffic a step"
    )


def replicas_note(
    model: nn.Module, mesh: DeviceMesh, args: DistributedArgs, n_micro: int, node: int
) -> Iterator[str]:
    """The traffic that a copy of the model on each node (`node` ranks) would save, where
    `dp_shard` is null and takes more than 64 ranks."""
    replicas, shards, tp = mesh.shape
    inside = node // tp  # ranks of a node that share one copy
    if args.dp_shard is not None or shards <= 64 or inside < 2 or shards % inside:
        return
    whole = sum(local(p).numel() for p in model.parameters()) * shards * tp
    others = 1 - inside / shards  # share of a copy on other nodes
    # Weights are gathered in forward and backward, gradients are float32; an all-reduce moves twice
    # what it reduces.
    scatters = 1 if args.grad_sync == "last" else n_micro
    moved = others * whole * (2 * n_micro * args.dtype.itemsize + 4 * scatters)
    kept = 16 * whole * (1 / inside - 1 / shards) / tp  # weights, gradients and two moments
    yield (
        f"distributed.dp_shard = null: one copy is shared by {shards} ranks, and about "
        f"{human_bytes(int(moved))} of weights and gradients enter each node in a step. "
        f"distributed.dp_replicate = {replicas * shards // inside}, a copy on each node, makes it "
        f"{human_bytes(int(others * whole * 8))}, gathers weights within the node, and takes "
        f"{human_bytes(int(kept))} more memory on each rank"
    )


@torch.no_grad()
def grad_norm(parameters: list[nn.Parameter]) -> Tensor:
    """The global norm of the gradients: a float32 scalar on the device, equal on every rank.

    Parameters may live on different meshes. Each group of equal layout sums the squares of its
    shards over just the axes that split it, so what an axis replicates counts once.
    """
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
