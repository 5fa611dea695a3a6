"""The DeviceMesh (dp_replicate, dp_shard, tp), ranks on it, and communication between ranks.

The mesh always has all three axes, each of any size, 1 included, so that no caller needs a special
case.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lingua.base.errors import UserError
from lingua.config.schema import Announced, Free, bounds
from lingua.parallel.signals import STOPPING
from lingua.parallel.torch_private import default_store

T = TypeVar("T")
R = TypeVar("R")

AXES = ("dp_replicate", "dp_shard", "tp")


@dataclass
class DistributedArgs:
    dp_replicate: Free[int | None] = 1  # copies of the sharded model; null takes what remains
    dp_shard: Free[int | None] = None  # ranks each copy is sharded over; null takes what remains
    tp_size: Free[int] = 1  # ranks a layer is split over (tensor parallelism)
    rendezvous_s: Free[float] = 600.0  # seconds to wait for the other processes at the start
    # seconds to wait for another rank in a collective; the run then ends and names it
    timeout_s: Free[float] = 1800.0
    # the same for the device's collectives after the first step, which compiles
    step_timeout_s: Free[float] = 600.0
    # when gradients are reduced: `last` micro-step only, `replica_last` reduce-scatters each
    # micro-step and all-reduces across replicas on the last, `every` does both each time; all give
    # the same gradient; null: last, or every with deterministic: mesh
    grad_sync: Free[Literal["last", "replica_last", "every"] | None] = None
    # when ranks free the parameters that they have gathered: `always` after each use, or once a
    # `step`, whose other micro-steps gather none; each rank then holds all of them in model_dtype
    reshard: Free[Literal["always", "step"]] = "always"
    # CPU threads of the operators of a process, which rounding depends on; null: torch's choice, or
    # 1 with deterministic: mesh
    threads: Free[int | None] = None
    # dtype of forward and backward; parameters, gradients and their reduction stay float32; null:
    # bf16 on CUDA, fp32 on the CPU
    model_dtype: Announced[Literal["bf16", "fp32"] | None] = "bf16"
    # precision of the blocks' matrix products where not `model_dtype`: tensorwise, float8 with a
    # scale for each tensor (torchao), whose rounding depends on the mesh
    float8: Announced[Literal["tensorwise"] | None] = None
    compile: Announced[bool] = False  # compile each block, and the loss, with torch.compile
    matmul_allow_tf32: Announced[bool] = False  # TF32 in float32 matrix products on CUDA
    # what a block keeps for its backward: `none` all, `full` its input only, `selective` the
    # results of attention and of matrix products with no more inputs than outputs
    activation_checkpointing: Announced[Literal["none", "full", "selective"]] = "none"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of forward and backward."""
        return torch.bfloat16 if self.model_dtype == "bf16" else torch.float32

    def resolve(self, exact: bool) -> None:
        """Fill in what is open and depends on whether the run is `deterministic: mesh`."""
        self.grad_sync = self.grad_sync or ("every" if exact else "last")
        self.threads = self.threads or (1 if exact else None)

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 1, "dp_replicate", "dp_shard", "tp_size", maximum=1 << 24)
        yield from bounds(self, 1, "threads", maximum=1024)
        yield from bounds(self, 1, "rendezvous_s", "timeout_s", "step_timeout_s", maximum=86400)
        if self.dp_replicate is None and self.dp_shard is None:
            yield "dp_replicate", "must be given when distributed.dp_shard is null"


def mesh_sizes(args: DistributedArgs, world_size: int) -> tuple[int, int, int]:
    """(dp_replicate, dp_shard, tp) for `world_size` processes, the null axis filled in."""
    replicate, shard, tp = args.dp_replicate, args.dp_shard, args.tp_size
    known = (replicate or 1) * (shard or 1) * tp
    shown = f"distributed.dp_replicate = {replicate}, dp_shard = {shard}, tp_size = {tp}"
    shown = shown.replace("None", "null")
    if replicate is not None and shard is not None and known != world_size:
        raise UserError(f"{shown}: their product is {known}, but {world_size} processes run")
    if world_size % known:
        raise UserError(f"{shown}: {known} does not divide the number of processes, {world_size}")
    rest = world_size // known
    return replicate or rest, shard or rest, tp


def dp_rank(mesh: DeviceMesh) -> int:
    """This process's data-parallel rank, the same for every tp rank of a group.

    In `0 ... dp_degree(mesh) - 1`. Everything that differs from one data-parallel rank to the next
    uses this number.
    """
    replicate, shard = mesh.get_local_rank("dp_replicate"), mesh.get_local_rank("dp_shard")
    return replicate * mesh["dp_shard"].size() + shard


def dp_degree(mesh: DeviceMesh) -> int:
    """The number of data-parallel ranks."""
    replicate, shard, _ = mesh.shape  # called for each token: mesh["dp_shard"] takes 60 us
    return replicate * shard


def dp_sum_(t: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum `t` over the data-parallel ranks, in place. int64 wraps modulo 2^64."""
    for axis in ("dp_shard", "dp_replicate"):
        if mesh[axis].size() > 1:
            dist.all_reduce(t, group=mesh.get_group(axis))
    return t


def dp_gather(t: Tensor, mesh: DeviceMesh) -> Tensor:
    """`t` of every data-parallel rank, in their order: [ranks, ...]."""
    for axis in ("dp_shard", "dp_replicate"):
        size = mesh[axis].size()
        parts = [torch.empty_like(t) for _ in range(size)] if size > 1 else [t]
        if size > 1:
            dist.all_gather(parts, t.contiguous(), group=mesh.get_group(axis))
        t = torch.stack(parts)
    return t.flatten(0, 1)


def world_sum_(t: Tensor) -> Tensor:
    """Sum a CPU tensor over all ranks, in place. It goes over gloo, past the device's queue."""
    if dist.get_world_size() > 1:
        dist.all_reduce(t)
    return t


def received_signals(name: str | None) -> list[str]:
    """The names of the stop signals that ranks received, by their numbers. Called by every rank,
    with the one that it received, if any."""
    names = [number.name for number in sorted(STOPPING)]
    counts = world_sum_(torch.tensor([name == other for other in names]).long())
    return [other for other, count in zip(names, counts.tolist(), strict=True) if count]


def divide(work: Callable[[list[T]], list[R]], items: list[T], mesh: DeviceMesh) -> list[R]:
    """The results of `work`, an item each, which the data-parallel ranks divide among themselves.

    Every rank calls it with the same items and has all results; the tp ranks of a group do the same
    part. `work` is also called with no items: it may hold collectives.
    """
    parts: list[list[R]] = [[]] * dist.get_world_size()
    dist.all_gather_object(parts, work(items[dp_rank(mesh) :: dp_degree(mesh)]))
    by_dp_rank = parts[:: mesh["tp"].size()]  # a row of the mesh is a data-parallel rank
    return [by_dp_rank[i % len(by_dp_rank)][i // len(by_dp_rank)] for i in range(len(items))]


def gather_on_rank_0(item: T, group: dist.ProcessGroup | None = None) -> list[T] | None:
    """The items of all ranks, in their order, on rank 0; None on others. Called by every rank of
    `group`, which has all. In a tree: no rank receives from more than log2 of the ranks."""
    items, rank, step = [item], dist.get_rank(), 1
    while step < dist.get_world_size():
        if rank & step:
            dist.send_object_list([items], rank - step, group)
            return None
        if rank + step < dist.get_world_size():
            received: list[Any] = [None]
            dist.recv_object_list(received, rank + step, group)
            items += received[0]
        step *= 2
    return items


def on_rank_0(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and share its result with every rank: a value that JSON has, with lists
    for tuples. What `work` raises is raised on every rank: UserError as it is, another error as
    RuntimeError on the others. They poll the store without a timeout, since tokenizing may take
    hours. It is JSON since whoever reaches the store can write to it. A process without a group is
    rank 0."""
    if not dist.is_initialized():
        return json.loads(json.dumps(work()))
    store, rank = default_store(), dist.get_rank()
    # The number of this rank's call, counted in the store: a process may outlive its group. Threads
    # count apart, since the order between them may differ from rank to rank.
    thread = f"lingua/on_rank_0/{threading.current_thread().name}"
    key = f"{thread}/{store.add(f'{thread}/calls_of_{rank}', 1)}"
    if rank == 0:
        try:
            text = json.dumps({"result": work()})
        except Exception as error:
            local = error.local if isinstance(error, UserError) else None
            store.set(key, json.dumps({"error": str(error), "local": local}))
            raise
        store.set(key, text)
        return json.loads(text)["result"]
    pause_s, most_s = 0.001, max(0.5, dist.get_world_size() / 1000)  # 1,000 checks a second of all
    while not store.check([key]):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, most_s)
    shared = json.loads(store.get(key))
    if "result" in shared:
        return shared["result"]
    local = shared["local"]
    raise RuntimeError(shared["error"]) if local is None else UserError(shared["error"], local)


def all_call(key: str, patience_s: float) -> bool:
    """Whether every rank calls this with `key` up to `patience_s` seconds after this one. It is no
    collective: ranks that do something else meanwhile are not disturbed."""
    store, deadline = default_store(), time.monotonic() + patience_s
    store.add(f"lingua/{key}", 1)
    while store.add(f"lingua/{key}", 0) < dist.get_world_size():
        if time.monotonic() > deadline:
            return False
        time.sleep(max(0.01, dist.get_world_size() / 10_000))  # 10,000 questions a second of all
    return True


def silent_ranks() -> list[int]:
    """The ranks that the others wait for, where collectives time out: those that do not call this
    within a tenth of that time. Where the store does not answer it is rank 0, whose process has the
    store unless torchrun has it."""
    store, silent = default_store(), [0]
    patience_s = store.timeout.total_seconds() / 10  # type: ignore[attr-defined]  # torch's stub
    end = time.monotonic() + patience_s

    def ask() -> None:
        store.set(f"lingua/timed_out/{dist.get_rank()}", "")
        while time.monotonic() < end:
            ranks = range(dist.get_world_size())
            silent[:] = [r for r in ranks if not store.check([f"lingua/timed_out/{r}"])]
            time.sleep(patience_s / 20)

    asking = threading.Thread(target=ask, daemon=True)  # torch's wait for the store has no end
    asking.start()
    asking.join(patience_s + 1)
    if dist.get_rank() == 0:
        time.sleep(patience_s)  # the others may still ask
    return silent
