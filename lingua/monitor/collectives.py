"""Counts the collectives a piece of code issues: kind, mesh axis, dtype and bytes of each.

with CollectiveCounter(mesh) as counter:
    train_step()
print(table(counter.records))
"""

import itertools
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from lingua.format import align, human_bytes

# c10d: FSDP2 and direct calls of torch.distributed. The others: DTensor and compiled graphs.
_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")


_GROUP_ARGUMENTS = ("process_group", "group_name")


# Operator names without their underscores start with one of these; the first that fits wins.
_KINDS = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sharddimalltoall": "all_to_all",
    "monitoredbarrier": "barrier",
    "reduce": "reduce",
    "isend": "send",
    "irecv": "recv",
}


@dataclass(frozen=True)
class Collective:
    """One collective as this rank issued it."""

    kind: str  # all_gather, reduce_scatter, all_reduce, broadcast, all_to_all, ...
    axis: str  # mesh axis of its group ("dp_shard"), several ("dp_replicate+dp_shard") or "world"
    dtype: str  # of its tensors, as sent: FSDP packs parameters of mixed dtypes into uint8
    bytes: int  # the larger of what this rank puts in and what it gets out
    backward: bool  # issued inside a backward pass, recomputed forwards included


@dataclass(frozen=True)
class CollectiveTotal:
    """All collectives of a record that agree in everything but their size."""

    kind: str
    axis: str
    dtype: str
    backward: bool
    count: int
    bytes: int  # sum over the `count` collectives


class CollectiveCounter(TorchDispatchMode):
    """Context manager whose `records` lists every collective issued under it, in order.

    It sees what this thread issues, and what autograd issues for this thread's backward passes:
    torch.distributed calls, FSDP2, DTensor, compiled blocks, recomputation; gloo and NCCL alike.
    The bytes of a collective are the bytes of its input or of its output on this rank, whichever
    is larger: the gathered buffer of an all-gather, the unreduced one of a reduce-scatter, the
    tensor of an all-reduce. They are not what crosses the wire, which depends on the algorithm.

    `axis` comes from the process group: an axis of `mesh` if the group is that axis's own, else
    the axes whose ranks it joins, or "world". Where an axis spans all ranks its group can be the
    world's, and then goes by the axis's name.

    Every operator under it passes through Python, so a counted step is slow: do not time it.
    Not seen: what a CUDA graph replays, and collectives inside symmetric-memory kernels.
    """

    # Higher-order operators (checkpointing, flex attention) would raise under the mode without it.
    supports_higher_order_operators = True

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.records: list[Collective] = []
        self._mesh = mesh
        self._axis_of_group: dict[str, str] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Without this dynamo runs compiled blocks uncompiled while the mode is active. With it they
        # run compiled, and what is traced meanwhile (on fake tensors) does not reach the mode.
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
            self._record(func, args, kwargs, result)
        return result

    def _record(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict, result) -> None:
        names = [argument.name for argument in func._schema.arguments]
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        group = next((values[name] for name in _GROUP_ARGUMENTS if name in values), None)
        if group is None:  # wait_tensor and the like
            return
        n_bytes, dtype = max(_size(value) for value in (*values.values(), result))
        self.records.append(
            Collective(
                kind=_kind(func),
                axis=self._axis(_process_group(group)),
                dtype=dtype,
                bytes=n_bytes,
                backward=torch._C._current_graph_task_id() != -1,
            )
        )

    def _axis(self, group: dist.ProcessGroup) -> str:
        if group.group_name not in self._axis_of_group:
            self._axis_of_group[group.group_name] = axis_of(group, self._mesh)
        return self._axis_of_group[group.group_name]


def axis_of(group: dist.ProcessGroup, mesh: DeviceMesh) -> str:
    """The name of the mesh axis (or axes, joined by "+") whose ranks `group` connects."""
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    for i, name in enumerate(names):
        if mesh.get_group(i).group_name == group.group_name:
            return name
    ranks = set(dist.get_process_group_ranks(group))
    if len(ranks) == dist.get_world_size():
        return "world"
    here = mesh.get_coordinate()
    if here is not None:
        for size in range(1, mesh.ndim):
            for free in itertools.combinations(range(mesh.ndim), size):
                index = tuple(slice(None) if i in free else here[i] for i in range(mesh.ndim))
                if ranks == set(mesh.mesh[index].flatten().tolist()):
                    return "+".join(names[i] for i in free)
    return f"other ({len(ranks)} ranks)"


def totals(records: list[Collective]) -> list[CollectiveTotal]:
    """Counts and bytes by kind, axis, dtype and pass; the most bytes first."""
    counts: Counter[tuple] = Counter()
    n_bytes: Counter[tuple] = Counter()
    for record in records:
        key = (record.kind, record.axis, record.dtype, record.backward)
        counts[key] += 1
        n_bytes[key] += record.bytes
    rows = [CollectiveTotal(*key, count=counts[key], bytes=n_bytes[key]) for key in counts]
    return sorted(rows, key=lambda row: (-row.bytes, row.kind, row.axis, row.dtype, row.backward))


def table(records: list[Collective]) -> str:
    """`totals` as text a person reads, a header line first."""
    if not records:
        return "no collectives"
    cells = [("kind", "axis", "dtype", "pass", "count", "bytes")]
    for row in totals(records):
        # Outside backward are forward, clipping and the optimizer.
        when = "backward" if row.backward else "other"
        size = human_bytes(row.bytes)
        cells.append((row.kind, row.axis, row.dtype, when, str(row.count), size))
    size = human_bytes(sum(record.bytes for record in records))
    cells.append(("all", "", "", "", str(len(records)), size))
    return "\n".join(align(cells, left=4))


def _kind(func: torch._ops.OpOverload) -> str:
    name = func._schema.name.split("::")[1].strip("_")
    bare = name.replace("_", "")
    return next((kind for prefix, kind in _KINDS.items() if bare.startswith(prefix)), name)


def _process_group(group) -> dist.ProcessGroup:
    if isinstance(group, str):
        return _resolve_process_group(group)
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def _size(value) -> tuple[int, str]:
    """Bytes in a tensor or nested lists of them, and their dtype; (0, "") for anything else."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size(), str(value.dtype).removeprefix("torch.")
    if isinstance(value, (list, tuple)):
        sizes = [_size(item) for item in value]
        return sum(n for n, _ in sizes), max(sizes, default=(0, ""))[1]
    return 0, ""
