"""The DeviceMesh (dp_replicate, dp_shard, tp), ranks on it, sums over them, and the five ways in
which ranks agree (docs/architecture.md: when to use which).

The mesh always has all three axes, each of any size, 1 included, so that no caller needs a special
case. `cp_size` neighbours on dp_shard are one data-parallel rank: they have the same rows.
"""

import json
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lingua.base.errors import UserError
from lingua.parallel.signals import STOPPING
from lingua.parallel.torch_private import default_store, without_prefix

T = TypeVar("T")
R = TypeVar("R")

AXES = ("dp_replicate", "dp_shard", "tp")
WORDS = (*AXES, "cp")  # of the numbers of `sizes_of`
LEFT = "lingua/left"  # key in the store: how many processes have left the group, or the idle ranks
_CP = "lingua_cp"  # attribute of a mesh
READ_S = 5.0  # seconds for the other ranks to read why rank 0 ends, whose process has the store


def share_rows(mesh: DeviceMesh, cp: int) -> None:
    """Make each `cp` neighbours on dp_shard one data-parallel rank. Called by every rank, once."""
    if cp > 1:
        ranks = mesh.mesh.view(-1, cp, mesh["tp"].size()).transpose(1, 2)  # ..., tp, cp
        group, _ = dist.new_subgroups_by_enumeration(ranks.reshape(-1, cp).tolist())
        setattr(mesh, _CP, lambda: group)  # torch.compile copies meshes, and cannot copy a group


def cp_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The ranks that divide the positions of this one's rows; None where it has them all."""
    return getattr(mesh, _CP, lambda: None)()


def cp_size(mesh: DeviceMesh) -> int:
    group = cp_group(mesh)
    return 1 if group is None else group.size()


def sizes_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """The topology as files have it: (dp_replicate, dp_shard, tp), and cp where it is not 1."""
    cp = cp_size(mesh)
    return (*mesh.shape, cp) if cp > 1 else mesh.shape


def dp_rank(mesh: DeviceMesh) -> int:
    """This process's data-parallel rank, the same for every tp and cp rank of a group.

    In `0 ... dp_degree(mesh) - 1`. Everything that differs from one data-parallel rank to the next
    uses this number.
    """
    replicate, shard = mesh.get_local_rank("dp_replicate"), mesh.get_local_rank("dp_shard")
    return (replicate * mesh["dp_shard"].size() + shard) // cp_size(mesh)


def dp_degree(mesh: DeviceMesh) -> int:
    """The number of data-parallel ranks."""
    replicate, shard, _ = mesh.shape  # called for each token: mesh["dp_shard"] takes 60 us
    return replicate * shard // cp_size(mesh)


def counts_rows(mesh: DeviceMesh) -> bool:
    """Whether this is the one of the ranks with the same rows that counts them."""
    group = cp_group(mesh)
    return not mesh.get_local_rank("tp") and (group is None or not group.rank())


def positions_of_a_rank(positions: int, cp: int, tp: int) -> int:
    """How many positions of a row each cp rank has, padding included, which tp ranks divide too."""
    return -(-positions // (cp * tp)) * tp


def dp_sum_(t: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum `t` over the data-parallel ranks, in place. int64 wraps modulo 2^64."""
    if (group := cp_group(mesh)) is not None and group.rank():
        t.zero_()  # its group's first rank has the same
    for axis in ("dp_shard", "dp_replicate"):
        if mesh[axis].size() > 1:
            dist.all_reduce(t, group=mesh.get_group(axis))
    return t


def dp_gather(t: Tensor, mesh: DeviceMesh) -> Tensor:
    """`t` of every data-parallel rank, in their order: [ranks, ...]."""
    groups = mesh.get_group("dp_shard"), mesh.get_group("dp_replicate")
    return gather(t, *groups)[:: cp_size(mesh)]


def gather(t: Tensor, *groups: dist.ProcessGroup | None) -> Tensor:
    """`t` of every rank of these groups, the last one outermost: [ranks, ...]."""
    t = t[None]
    for group in groups:
        if group is not None and (size := group.size()) > 1:
            parts = [torch.empty_like(t) for _ in range(size)]
            dist.all_gather(parts, t.contiguous(), group=group)
            t = torch.cat(parts)
    return t


def divide(work: Callable[[list[T]], list[R]], items: list[T], mesh: DeviceMesh) -> list[R]:
    """The results of `work`, an item each, which the data-parallel ranks divide among themselves.

    Every rank calls it with the same items and has all results; the tp and cp ranks of a group do
    the same part. `work` is also called with no items: it may hold collectives.
    """
    parts = gather_on_every_rank(work(items[dp_rank(mesh) :: dp_degree(mesh)]))
    by_dp_rank = parts[:: mesh["tp"].size() * cp_size(mesh)]  # neighbours are a data-parallel rank
    return [by_dp_rank[i % len(by_dp_rank)][i // len(by_dp_rank)] for i in range(len(items))]


# ---- what ranks agree on


def on_rank_0(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and share its result with every rank: a value that JSON has, with lists
    for tuples. What `work` raises is raised on every rank: UserError as it is, another error as
    RuntimeError on the others. They poll the store without a timeout, since tokenizing may take
    hours. A process without a group is rank 0."""
    if not dist.is_initialized():
        return json.loads(json.dumps(work()))
    store, rank = default_store(), dist.get_rank()
    # The number of this rank's call, counted in the store: a process may outlive its group. Threads
    # count apart, since the order between them may differ from rank to rank.
    thread = f"lingua/on_rank_0/{threading.current_thread().name}"
    key = f"{thread}/{store.add(f'{thread}/calls_of_{rank}', 1)}"
    return share(work, store, key, rank, dist.get_world_size())


def share(work: Callable[[], T], store: dist.Store, key: str, rank: int, n_ranks: int) -> T:
    """`on_rank_0` by a store that ranks have before they have a group, and a `key` of this call. It
    is JSON since whoever reaches the store can write to it."""
    if rank == 0:
        try:
            text = json.dumps({"result": work()})
        except Exception as error:
            local = error.local if isinstance(error, UserError) else None
            store.set(key, json.dumps({"error": str(error), "local": local}))
            n_waited = 0 if dist.is_initialized() else n_ranks - 1  # a group waits at its end
            end = time.monotonic() + READ_S
            while store.add(f"{key}/read", 0) < n_waited and time.monotonic() < end:
                time.sleep(0.01)
            raise
        store.set(key, text)
        return json.loads(text)["result"]
    pause_s, most_s = 0.001, max(0.5, n_ranks / 1000)  # 1,000 checks a second of all
    while not store.check([key]):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, most_s)
    shared = json.loads(store.get(key))
    if "result" in shared:
        return shared["result"]
    store.add(f"{key}/read", 1)
    local = shared["local"]
    raise RuntimeError(shared["error"]) if local is None else UserError(shared["error"], local)


def world_sum_(t: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum a CPU tensor over all ranks, in place. It goes over gloo, past the device's queue. A
    thread beside the main one needs a `group` of its own, which has all ranks."""
    if dist.get_world_size() > 1:
        dist.all_reduce(t, group=group)
    return t


def world_min_(t: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The least value of all ranks, as `world_sum_`."""
    if dist.get_world_size() > 1:
        dist.all_reduce(t, dist.ReduceOp.MIN, group)
    return t


def begin_world_sum_(t: Tensor) -> dist.Work:
    """`world_sum_` that is complete after `wait()`. In a ring of n ranks it is 2 (n - 1) messages,
    one after another."""
    return dist.all_reduce(t, async_op=True)


def received_signals(received: Collection[str]) -> list[str]:
    """The names of the stop signals that ranks received, by their numbers. Called by every rank,
    with those that it received."""
    names = [number.name for number in sorted(STOPPING)]
    counts = world_sum_(torch.tensor([name in received for name in names]).long())
    return [name for name, count in zip(names, counts.tolist(), strict=True) if count]


def gather_on_every_rank(item: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The items of all ranks, in their order, on each. Called by every rank of `group`, which has
    all."""
    items = [item] * dist.get_world_size()
    dist.all_gather_object(items, item, group)
    return items


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


def all_call(key: str, patience_s: float, n: int | None = None) -> bool:
    """Whether every rank, or `n` processes with the store, call this with `key` up to `patience_s`
    seconds after this one. It is no collective: ranks that do something else meanwhile are not
    disturbed. Processes that have the store alone can add to the `key` too."""
    store, deadline = without_prefix(default_store()), time.monotonic() + patience_s
    n_called = store.add(key, 1)
    while n_called < (n or dist.get_world_size()):
        if time.monotonic() >= deadline:  # without patience it asks no second time
            return False
        time.sleep(max(0.01, dist.get_world_size() / 10_000))  # 10,000 questions a second of all
        n_called = store.add(key, 0)
    return True
