"""Counts the collectives of a piece of code: kind, mesh axis, dtype and bytes.

with CollectiveCounter(mesh) as counter:
    train_step()
print(table(counter.totals()))
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from lingua.format import align, human_bytes

# c10d: FSDP2 and direct calls of torch.distributed. The others: DTensor and compiled graphs.
_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
# What the name of an operator starts with, without underscores; others go by their own name.
_KINDS = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
}


@dataclass
class Collective:
    """The collectives that agree in all but their size, as this rank issued them."""

    kind: str  # all_gather, reduce_scatter, all_reduce, broadcast, all_to_all, ...
    axis: str  # mesh axis of the group ("dp_shard"), several ("dp_replicate+dp_shard") or "world"
    dtype: str  # of the tensors sent: FSDP packs parameters of mixed dtypes into uint8
    backward: bool  # inside a backward pass, recomputed forwards included
    count: int = 0
    bytes: int = 0  # sum over the `count` collectives of the larger of input and output


class CollectiveCounter(TorchDispatchMode):
    """Context manager that counts every collective inside it; `totals` returns the counts.

    It sees what this thread issues, and what autograd issues for this thread's backward passes:
    torch.distributed calls, FSDP2, DTensor, compiled blocks, recomputation; gloo and NCCL alike.
    The bytes of a collective are those of its input or of its output on this rank, whichever is
    larger: the gathered buffer of an all-gather, the unreduced one of a reduce-scatter. They are
    not the bytes on the wire, which depend on the algorithm.

    A step that is counted is slow, since every operator passes through Python. Not counted: what a
    CUDA graph replays, and collectives inside symmetric-memory kernels.
    """

    # Without it, higher-order operators (checkpointing, flex attention) raise under the mode.
    supports_higher_order_operators = True

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh = mesh
        self._axis_of_group: dict[str, str] = {}
        self._counts: dict[tuple[str, str, str, bool], Collective] = {}

    def totals(self) -> list[Collective]:
        """Counts by kind, axis, dtype and pass, the most bytes first."""
        return sorted(self._counts.values(), key=lambda total: -total.bytes)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Without this dynamo runs compiled blocks uncompiled while the mode is active. With it they
        # run compiled, and the mode does not see what is traced meanwhile (on fake tensors).
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # DTensors and asynchronous results unfold first; their collectives then come back here.
        # Running `func` here instead would unfold them with the mode switched off.
        if any(is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operator = isinstance(func, torch._ops.OpOverload) and func.namespace in _NAMESPACES
        if operator and FakeTensor not in types:
            self._count(func, args, kwargs, result)
        return result

    def _count(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict, result: Any) -> None:
        names = [argument.name for argument in func._schema.arguments]
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        group = values.get("process_group", values.get("group_name"))
        if group is None:  # not a collective: wait_tensor and the like
            return
        n_bytes, dtype = max(_size(value) for value in (*values.values(), result))
        backward = torch._C._current_graph_task_id() != -1
        key = (_kind(func), self._axis(group), dtype, backward)
        total = self._counts.setdefault(key, Collective(*key))
        total.count += 1
        total.bytes += n_bytes

    def _axis(self, group: Any) -> str:
        if isinstance(group, str):
            group = _resolve_process_group(group)
        elif not isinstance(group, dist.ProcessGroup):
            group = dist.ProcessGroup.unbox(group)
        if group.group_name not in self._axis_of_group:
            self._axis_of_group[group.group_name] = axis_of(group, self._mesh)
        return self._axis_of_group[group.group_name]


def axis_of(group: dist.ProcessGroup, mesh: DeviceMesh) -> str:
    """The name of the mesh axis (or axes, joined by "+") whose ranks `group` connects, "world" for
    all ranks."""
    names = mesh.mesh_dim_names
    for i, name in enumerate(names):
        if mesh.get_group(i).group_name == group.group_name:
            return name
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == dist.get_world_size():
        return "world"
    places = torch.isin(mesh.mesh, torch.tensor(ranks)).nonzero()  # [ranks, axes]
    joined = [i for i in range(mesh.ndim) if len(places[:, i].unique()) > 1]
    if len(ranks) == math.prod(mesh.shape[i] for i in joined):
        return "+".join(names[i] for i in joined) or "none"
    return f"other ({len(ranks)} ranks)"


def table(collectives: list[Collective]) -> str:
    """Aligned text with a header line and a sum."""
    if not collectives:
        return "no collectives"
    rows = [("kind", "axis", "dtype", "pass", "count", "bytes")]
    for c in collectives:
        # Other than backward: forward, clipping and the optimizer.
        when = "backward" if c.backward else "other"
        rows.append((c.kind, c.axis, c.dtype, when, str(c.count), human_bytes(c.bytes)))
    count, n_bytes = sum(c.count for c in collectives), sum(c.bytes for c in collectives)
    rows.append(("all", "", "", "", str(count), human_bytes(n_bytes)))
    return "\n".join(align(rows, left=4))


def _kind(func: torch._ops.OpOverload) -> str:
    name = func._schema.name.split("::")[1].strip("_")
    bare = name.replace("_", "")
    return next((kind for prefix, kind in _KINDS.items() if bare.startswith(prefix)), name)


def _size(value: Any) -> tuple[int, str]:
    """Bytes in a tensor or nested lists of them, and their dtype; (0, "") for anything else."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size(), str(value.dtype).removeprefix("torch.")
    if isinstance(value, (list, tuple)):
        sizes = [_size(item) for item in value]
        return sum(n for n, _ in sizes), max(sizes, default=(0, ""))[1]
    return 0, ""
