"""Counts the collectives of a piece of code: kind, mesh axis and bytes.

with CollectiveCounter(mesh) as counter:
    train_step()
print(collectives_table(counter.totals))

torch's CommDebugMode counts neither bytes nor by mesh axis, and fails with checkpointed blocks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lingua.base.format import align, human_bytes
from lingua.parallel.mesh import cp_group
from lingua.parallel.torch_private import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    graph_task_id,
    is_traceable_wrapper_subclass_type,
    resolve_process_group,
    schema,
)

# c10d: FSDP2 and direct calls of torch.distributed. The others: DTensor and compiled graphs.
_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
# What the name of an operator starts with, without underscores; others go by their own name.
_KINDS = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
}


class CollectiveCounter(TorchDispatchMode):
    """Context manager that counts every collective that this rank issues inside it, recomputation
    and compiled blocks included. `totals` has a dict for each kind, axis and pass:

    kind: all_gather, reduce_scatter, all_reduce, broadcast, all_to_all, ...
    axis: mesh axis of the group; "cp" for ranks that divide positions, "world" for all ranks.
    backward: inside a backward pass, recomputed forwards included.
    count, bytes: the sum of the larger of input and output of each on this rank, which is not what
        is on the wire.

    A step that is counted is slow, since every operator passes through Python. Not counted: what a
    CUDA graph replays, and collectives inside symmetric-memory kernels.
    """

    # Without it, higher-order operators (checkpointing, flex attention) raise under the mode.
    supports_higher_order_operators = True

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        # By ranks is found a group of an earlier mesh of the same shape, which DTensor may keep.
        self._axes: dict[str | tuple[int, ...], str] = {
            tuple(range(dist.get_world_size())): "world"
        }
        groups = {axis: mesh.get_group(axis) for axis in mesh.mesh_dim_names or ()}
        if (parts := cp_group(mesh)) is not None:
            groups["cp"] = parts
        for axis, group in groups.items():
            self._axes[group.group_name] = axis
            self._axes.setdefault(tuple(dist.get_process_group_ranks(group)), axis)
        self._totals: dict[tuple[str, str, bool], dict[str, Any]] = {}

    @property
    def totals(self) -> list[dict[str, Any]]:
        """The most bytes first."""
        return sorted(self._totals.values(), key=lambda total: -total["bytes"])

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Without this dynamo runs compiled blocks uncompiled while the mode is active. With it they
        # run compiled, and the mode does not see what is traced meanwhile (on fake tensors).
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        # DTensors and asynchronous results unfold first; their collectives then come back here.
        # Running `func` here instead would unfold them with the mode switched off.
        if any(is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if FakeTensor not in types:
            self.count(func, args, kwargs, result)
        return result

    def count(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Count an operator that has run, if it is a collective."""
        if not isinstance(func, OpOverload) or func.namespace not in _NAMESPACES:
            return
        names = [argument.name for argument in schema(func).arguments]
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        group = values.get("process_group", values.get("group_name"))
        if group is None:  # not a collective: wait_tensor and the like
            return
        kind, axis = _kind(func), self._axis(group)
        backward = graph_task_id() != -1
        zero = {"kind": kind, "axis": axis, "backward": backward, "count": 0, "bytes": 0}
        total = self._totals.setdefault((kind, axis, backward), zero)
        total["count"] += 1
        total["bytes"] += max(map(_bytes, (*values.values(), result)))

    def _axis(self, group: Any) -> str:
        if isinstance(group, str):
            group = resolve_process_group(group)  # type: ignore[arg-type]  # a NewType of str
        elif not isinstance(group, dist.ProcessGroup):
            group = dist.ProcessGroup.unbox(group)
        ranks = tuple(dist.get_process_group_ranks(group))
        other = f"other ({len(ranks)} ranks)"
        return self._axes.get(group.group_name) or self._axes.get(ranks, other)


def collectives_table(totals: list[dict[str, Any]]) -> str:
    """Aligned text with a header and a sum. The pass `other` is forward, clipping, optimizer."""
    rows = [("kind", "axis", "pass", "count", "bytes")]
    for t in totals:
        when = "backward" if t["backward"] else "other"
        rows.append((t["kind"], t["axis"], when, str(t["count"]), human_bytes(t["bytes"])))
    count, n_bytes = (sum(t[key] for t in totals) for key in ("count", "bytes"))
    rows.append(("all", "", "", str(count), human_bytes(n_bytes)))
    return "\n".join(align(rows, left=3))


def _kind(func: OpOverload) -> str:
    name = schema(func).name.split("::")[1].strip("_")
    bare = name.replace("_", "")
    return next((kind for prefix, kind in _KINDS.items() if bare.startswith(prefix)), name)


def _bytes(value: Any) -> int:
    """Bytes of a tensor or of nested lists of them; 0 for anything else."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0
