"""Gradients and their norm to the last bit the same on every data-parallel mesh: the sums of
`deterministic: mesh`.

The global batch consists of grains, micro-batches that begin at a multiple of `data.batch_size`
rows of it. Grain `k * ranks + r` is the k-th micro-batch of data-parallel rank r. So one grain's
gradient does not depend on the mesh, and those of each micro-step follow those of the one before.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lingua.base.errors import UserError
from lingua.parallel.mesh import share
from lingua.parallel.tensors import local

CHUNK = 1 << 22  # elements whose squares are in memory at once
HALF = 2.0**30  # the square of an element is kept as two integers of 30 bits each


class GradientSums:
    """Adds the gradients of a step's grains in their order, in float64, and rounds once.

    In place of a reduce-scatter, each rank receives from every rank the part of its grain's
    gradient that it adds up, which is as many bytes. Replicas share this work; their ranks exchange
    the rounded sums once a step.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, n_grains: int, dtype: torch.dtype
    ) -> None:
        """
        Args:
            model: from `parallelize_model` with `exact`; its `gradient_sums` are to be these.
            n_grains: grains of a step; what a rank computes in place of others is not added.
            dtype: of the gradients of one grain, before FSDP makes them float32.
        """
        self.n_grains, self.dtype = n_grains, dtype
        self.parameters = list(model.parameters())  # as FSDP shards them
        self.replicas, self.shards, _ = mesh.shape
        self.n_ranks = self.replicas * self.shards
        self.replicate_group = mesh.get_group("dp_replicate")
        axes = [axis for axis in ("dp_replicate", "dp_shard") if mesh[axis].size() == self.n_ranks]
        self.group = mesh.get_group(axes[0]) if axes else dist.group.WORLD  # tp_size is 1
        self.micro_step, self.last = -1, True
        # sees the gradients of each unit; true: they are not added (lingua.tools.elastic.recheck)
        self.observe: Callable[[Tensor], bool] | None = None
        self.units = [_Unit(self) for m in model.modules() if isinstance(m, FSDPModule)]
        modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        for module, unit in zip(modules, self.units, strict=True):
            if self.shards > 1:
                module.set_custom_reduce_scatter(unit)  # type: ignore[arg-type]  # a private class
            else:  # FSDP has nothing to scatter
                module.set_all_reduce_hook(unit.add)

    def start_micro_step(self, last: bool) -> None:
        """Called before the forward of each micro-step; the gradients of the `last` are the sums of
        the step."""
        self.micro_step, self.last = 0 if self.last else self.micro_step + 1, last
        for p in self.parameters:  # the model has the gathered ones now, with `reshard: step`
            p.grad = None  # FSDP would add to it
        for unit in self.units:
            unit.check(self.micro_step > 0 or not unit.totals)
            unit.n_calls = 0


class _Unit:
    """The sums of one FSDP unit: a ReduceScatter, as FSDP calls it."""

    def __init__(self, sums: GradientSums) -> None:
        self.sums = sums
        # float64 [n] each, the part that this rank adds up. A unit that is called several times in
        # a forward is reduced as often.
        self.totals: dict[int, Tensor] = {}
        self.n_calls = 0  # in this micro-step

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: Any = None
    ) -> None:
        self.add(input_tensor, output_tensor)

    def add(self, grads: Tensor, out: Tensor | None = None) -> None:
        """Add the gradients of a grain, float32 [shards * n]: the n elements of each shard, one
        after the other. In the last micro-step `out`, float32 [n], becomes this shard's sum; None:
        it is written over the gradients of the only shard."""
        sums, i, out = self.sums, self.n_calls, grads if out is None else out
        if sums.observe is not None and sums.observe(grads):
            return
        received = self._exchange(grads, len(out))
        if sums.micro_step == 0:
            self.totals[i] = torch.zeros_like(received[0], dtype=torch.float64)
        self.check(i in self.totals)
        self.n_calls += 1
        for grad in received[: max(0, sums.n_grains - sums.micro_step * sums.n_ranks)]:
            self.totals[i] += grad
        if not sums.last:
            return
        total = self.totals.pop(i).float()
        if sums.replicas > 1:
            whole = total.new_empty(sums.replicas, len(total))
            dist.all_gather(list(whole), total, group=sums.replicate_group)
            total = whole.flatten()[: len(out)]
        out.copy_(total)

    @staticmethod
    def check(in_order: bool) -> None:
        """Raise UserError where a step has sums left of the one before, or adds to none."""
        if not in_order:
            raise UserError(
                "deterministic = mesh: the objective must call set_gradient_sync before each "
                "forward, and the model must use the same FSDP units in all of them"
            )

    def _exchange(self, grads: Tensor, n: int) -> Tensor:
        """Of each rank's gradients the part that this one adds up: [ranks, part]."""
        sums = self.sums
        if sums.n_ranks == 1:
            return grads[None]
        part = -(-n // sums.replicas)
        parts = F.pad(grads.view(sums.shards, n), (0, part * sums.replicas - n))
        by_rank = parts.view(sums.shards, sums.replicas, part).transpose(0, 1)
        sent = by_rank.to(sums.dtype).reshape(sums.n_ranks, part)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=sums.group)
        return received


@torch.no_grad()
def exact_norm(parameters: list[nn.Parameter]) -> Tensor:
    """`lingua.parallel.gradients.grad_norm` from integers, whose sum no order changes. The largest
    element of a tensor, which none changes either, gives their unit: a square is off by less than
    2^-60 of the largest. inf where an element is not finite, 0 where none has a gradient.

    A tensor has fewer than 2^32 elements.
    """
    grads = [local(p.grad).flatten() for p in parameters if p.grad is not None]
    device = parameters[0].device
    zero = torch.zeros((), device=device)
    if not grads:  # on no rank
        return zero
    largest = torch.stack([g.abs().max() if len(g) else zero for g in grads])
    largest = torch.where(largest.isfinite(), largest, torch.inf)
    mesh = parameters[0].device_mesh if isinstance(parameters[0], DTensor) else None
    group = mesh.get_group() if mesh is not None and mesh.size() > 1 else None
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    unit = torch.ldexp(torch.ones_like(largest, dtype=torch.float64), largest.frexp().exponent)
    counts = torch.zeros(len(grads), 2, dtype=torch.int64, device=device)
    for count, grad, one in zip(counts, grads, unit, strict=True):
        for part in grad.split(CHUNK):
            squares = (part.double() / one).square_().mul_(HALF)
            high = squares.floor()
            low = squares.sub_(high).mul_(HALF)
            count += torch.stack((high.sum(dtype=torch.int64), low.sum(dtype=torch.int64)))
    if group is not None:
        dist.all_reduce(counts, group=group)
    high, low = counts.double().unbind(1)
    norm = ((high / HALF + low / HALF**2) * unit.square()).sum().sqrt().float()
    return torch.where(largest.isfinite().all(), norm, torch.inf)


def check_ranks(store: dist.Store, rank: int, n_ranks: int, **facts: object) -> None:
    """Raise UserError on every rank where ranks differ in one of these facts, such as the version
    of torch. Needs no process group."""
    place = "lingua/facts"
    store.set(f"{place}/{rank}", json.dumps({key: str(fact) for key, fact in facts.items()}))

    def compare() -> None:
        ranks = [json.loads(store.get(f"{place}/{r}")) for r in range(n_ranks)]
        lines = []
        for name, value in ranks[0].items():
            others = {other[name]: r for r, other in reversed([*enumerate(ranks)])}
            shown = ", ".join(f"{v} on rank {r}" for v, r in sorted(others.items(), key=str))
            lines += [f"{name}: {shown}"] if others.keys() != {value} else []
        if lines:
            need = "needs ranks that are alike, since others round otherwise; these differ:"
            raise UserError("\n  ".join([f"deterministic = mesh: {need}", *lines]))

    share(compare, store, f"{place}/verdict", rank, n_ranks)
