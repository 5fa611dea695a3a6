"""Notes about the traffic of a run on several ranks, and what it could be."""

from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lingua.base.format import human_bytes
from lingua.parallel.args import DistributedArgs
from lingua.parallel.environment import detect_launch
from lingua.parallel.gradients import Sharded
from lingua.parallel.tensors import local


def traffic_notes(
    model: nn.Module, mesh: DeviceMesh, args: DistributedArgs, n_micro: int
) -> Iterator[str]:
    """Lines about a model that is laid out on the mesh, with `n_micro` micro-steps a step."""
    yield from grad_sync_note(model, mesh, args.grad_sync, n_micro)
    if args.reshard == "step" and n_micro > 1 and mesh.shape[1] > 1:
        gathered = _elements(model) * mesh.shape[1]
        size = human_bytes(gathered * args.dtype.itemsize)
        yield (
            f"distributed.reshard = step: keeps {size} of gathered parameters through a step, and "
            f"gathers them once in its {n_micro} micro-steps, not {2 * n_micro} times"
        )
    yield from replicas_note(model, mesh, args, n_micro, detect_launch().local_world_size)


def grad_sync_note(
    model: nn.Module, mesh: DeviceMesh, mode: str | None, n_micro: int
) -> Iterator[str]:
    """The memory that `grad_sync` costs and the traffic that it saves, on each rank."""
    replicas, shards, _ = mesh.shape
    if n_micro == 1 or shards * replicas == 1:
        return
    # Bytes of this rank's float32 gradients, after and before they are split over dp_shard.
    shard_bytes = _elements(model, trained=True) * 4
    whole_bytes = shard_bytes * shards
    reduces = shard_bytes if replicas > 1 and mode != "every" else 0
    kept = whole_bytes if mode == "last" else reduces
    if isinstance(model, Sharded) and model.gradient_sums is not None:  # sums are float64
        kept = 2 * whole_bytes // (replicas * shards)
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
    whole, trained = (_elements(model, t) * shards * tp for t in (False, True))
    others = 1 - inside / shards  # share of a copy on other nodes
    # Weights are gathered in forward and backward, gradients are float32; an all-reduce moves twice
    # what it reduces.
    scatters = 1 if args.grad_sync == "last" else n_micro
    moved = others * (2 * n_micro * args.dtype.itemsize * whole + 4 * scatters * trained)
    # Weights, and for those that are trained gradients and two moments.
    weights = sum(local(p).nbytes for p in model.parameters()) * shards * tp
    kept = (weights + 12 * trained) * (1 / inside - 1 / shards) / tp
    yield (
        f"distributed.dp_shard = null: one copy is shared by {shards} ranks, and about "
        f"{human_bytes(int(moved))} of weights and gradients enter each node in a step. "
        f"distributed.dp_replicate = {replicas * shards // inside}, a copy on each node, makes it "
        f"{human_bytes(int(others * trained * 8))}, gathers weights within the node, and takes "
        f"{human_bytes(int(kept))} more memory on each rank"
    )


def _elements(model: nn.Module, trained: bool = False) -> int:
    """Elements that this rank holds of the parameters, or of those that are `trained`."""
    return sum(local(p).numel() for p in model.parameters() if p.requires_grad or not trained)
