"""The last layer of a language model and its loss: cross-entropy without the logits of all
positions in memory, also where tensor parallelism splits the vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from lingua.base.errors import UserError
from lingua.base.format import human_bytes
from lingua.data import IGNORE

# float32 logits that a rank computes at a time. Each chunk's product reads and writes the whole
# float32 gradient of the matrix: on an H200, 16,384 positions of 2,048 features and 128,256 tokens
# take 48.9 ms and 2.02 GiB by chunks of this size, 59.7 ms and 1.78 GiB by half of it, 45.6 ms and
# 2.51 GiB by twice as much.
CHUNK_BYTES = 1 << 29
TILE = 128  # rows of a matrix that a kernel multiplies at once: a part of them takes as long


class Head(nn.Linear):
    """Projection to the vocabulary, without bias. With targets it computes their cross-entropies, a
    chunk of positions at a time: neither all logits nor their gradients are ever in memory."""

    over_positions, padding = "head", IGNORE

    def __init__(self, dim: int, vocab_size: int, cap: float | None = None) -> None:
        """cap: bound of the logits' size, above 0: they are cap * tanh(logits / cap), as in Gemma 2
        (arXiv 2408.00118). None: as they are."""
        super().__init__(dim, vocab_size, bias=False)
        self.cap, self.compiled = cap, False

    def compile(self) -> None:
        """Compile the elementwise work of a chunk, of which there are many in a forward."""
        self.compiled = True

    def forward(self, x: Tensor, targets: Tensor | None = None, per_token: bool = False) -> Tensor:
        """
        Args:
            x: V*B S E, the hidden states of V views, one after the other.
            targets: int64 V B S, IGNORE where there is no loss.
            per_token: return the loss of each target. The gradient is then computed from logits
                that are computed again, a third more work than that of the sums.

        Returns:
            Without targets logits V*B S vocabulary, under tensor parallelism a DTensor. With them
            float32 [V], the sum of the cross-entropies of each view in nats; or float32 V B S, 0
            where the target is ignored. Both are equal on all tensor-parallel ranks.
        """
        if targets is None:
            logits = super().forward(x)
            return logits if self.cap is None else _capped(logits.float(), self.cap).type_as(logits)
        weight: Tensor = self.weight
        shard = _Shard(self.cap, self.compiled)
        if isinstance(weight, DTensor) and isinstance(x, DTensor):
            group, rank = weight.device_mesh.get_group(), weight.device_mesh.get_local_rank()
            begin = rank * -(-self.out_features // group.size())
            shard = _Shard(self.cap, self.compiled, group, begin)
            # Each rank's gradient is the part that its rows of the weight give.
            x, weight = x.to_local(grad_placements=[Partial()]), weight.to_local()
        elif targets[0].numel() <= _chunk_size(len(weight)):
            logits, flat = super().forward(x).float().flatten(0, 1), targets.flatten()
            logits = logits if self.cap is None else _capped(logits, self.cap)
            losses = F.cross_entropy(logits, flat, ignore_index=IGNORE, reduction="none")
            losses = losses.view(targets.shape)
            return losses.clone() if per_token else losses.sum((1, 2))
        # Without gradients, the loss of each target is all there is to compute.
        work = _TokenLosses if per_token or not torch.is_grad_enabled() else _SummedLosses
        views = zip(x.unflatten(0, (len(targets), -1)), targets, strict=True)
        losses = torch.stack(
            [work.apply(h.flatten(0, 1), weight, t.flatten(), shard) for h, t in views]
        )
        if per_token:
            return losses.view(targets.shape).clone()  # FSDP warns of a result that is a view
        return losses.view(len(targets), -1).sum(1)


class VocabularyParallel(ParallelStyle):
    """Splits the vocabulary of a Head over the ranks. Its input is split over positions."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, Head):
            raise TypeError(f"VocabularyParallel is for a Head, not for {type(module).__name__}")
        ranks, n = device_mesh.size(), module.out_features
        if -(-n // ranks) * (ranks - 1) >= n:
            raise UserError(f"distributed.tp_size = {ranks}: too many ranks for {n} tokens")
        return distribute_module(module, device_mesh, self._split, self._gather)

    @staticmethod
    def _split(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        split = distribute_tensor(module.get_parameter("weight"), mesh, [Shard(0)])
        module.register_parameter("weight", nn.Parameter(split))

    @staticmethod
    def _gather(module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Any:
        x = inputs[0]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
        return (x.redistribute(placements=[Replicate()]), *inputs[1:])


def chunk_note(model: nn.Module, positions: int, tp: int) -> Iterator[str]:
    """A line where the positions of a micro-batch are more than a chunk."""
    for layer in model.modules():
        if isinstance(layer, Head):
            n_rows = -(-layer.out_features // tp)
            if (size := _chunk_size(n_rows)) < positions:
                yield (
                    f"the loss is computed {size:,} positions at a time: the logits of "
                    f"{positions:,} would take {human_bytes(4 * n_rows * positions)}"
                )


class _Shard:
    """The part of the vocabulary that this rank holds: from token `begin` on. Without a group, all
    of it. `cap` is that of the logits."""

    def __init__(
        self,
        cap: float | None,
        compiled: bool,
        group: ProcessGroup | None = None,
        begin: int = 0,
    ) -> None:
        self.cap, self.group, self.begin = cap, group, begin
        self.log_sums = _compiled(_log_sums) if compiled else _log_sums
        self.logit_gradient = _compiled(_logit_gradient) if compiled else _logit_gradient


_compiled: Callable[[Any], Any] = cache(torch.compile)


class _SummedLosses(torch.autograd.Function):
    """Sum of the losses. Its gradients are computed with it, while a chunk's logits are at hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, shard: _Shard) -> Tensor:
        losses, *gradients = _gradients(x, weight, targets, shard, None, ctx.needs_input_grad)
        ctx.save_for_backward(*gradients)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors  # changed in place: a second backward raises
        return *(None if t is None else t.mul_(upstream) for t in gradients), None, None


class _TokenLosses(torch.autograd.Function):
    """Loss of each target, whose gradients may differ: the logits are computed again for them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, shard: _Shard) -> Tensor:
        ctx.save_for_backward(x, weight, targets)
        ctx.shard = shard
        chunks = _chunks(x, weight)
        return torch.cat([_losses(x[i], weight, targets[i], shard)[0] for i in chunks])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, targets = ctx.saved_tensors
        needed = ctx.needs_input_grad
        _, *gradients = _gradients(x, weight, targets, ctx.shard, upstream, needed)
        return *gradients, None, None


def _gradients(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: _Shard,
    scale: Tensor | None,
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The losses, and the gradients of their sum, each times its `scale` (float32 [N]), by x (under
    tensor parallelism this rank's part of it) and by weight, summed over the chunks in float32;
    None for one that is not `needed`."""
    losses = []
    x_grad = torch.empty_like(x) if needed[0] else None
    weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None
    factor = (targets != IGNORE).float()
    factor = factor if scale is None else factor * scale
    for i in _chunks(x, weight):
        loss, logits, index, total = _losses(x[i], weight, targets[i], shard)
        losses.append(loss)
        grad = shard.logit_gradient(logits, index, total, factor[i], shard.cap)
        if x_grad is not None:
            torch.mm(grad, weight, out=x_grad[i])
        if weight_grad is not None:
            _add_product(weight_grad, grad.T, x[i])
    return torch.cat(losses), x_grad, None if weight_grad is None else weight_grad.to(weight.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`, float32, without rounding the product to the dtype of a and b."""
    if a.dtype == torch.float32 or a.is_cpu:  # which has no kernel for two dtypes
        torch.addmm(total, a.float(), b.float(), out=total)
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def _chunk_size(n_rows: int) -> int:
    """Vectors whose products with each of `n_rows` take at most CHUNK_BYTES in float32."""
    size = max(1, CHUNK_BYTES // (4 * n_rows))
    return size if size < TILE else size // TILE * TILE


def _chunks(x: Tensor, weight: Tensor) -> Iterator[slice]:
    """Rows of x for which all products with the rows of weight are computed at once."""
    size = _chunk_size(len(weight))
    return (slice(i, i + size) for i in range(0, len(x), size))


def _capped(logits: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(logits / cap)


def _losses(
    x: Tensor, weight: Tensor, targets: Tensor, shard: _Shard
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cross-entropies of N targets in nats, float32 [N], 0 where the target is ignored; and what
    `_logit_gradient` takes of these: logits, index and total.

    x is N E; weight has this rank's rows of the vocabulary, in the same dtype.
    """
    logits, index = F.linear(x, weight), targets - shard.begin
    in_shard = (targets != IGNORE) & (index >= 0) & (index < len(weight))
    index = torch.where(in_shard, index, -1)
    total, target = shard.log_sums(logits, index, shard.cap)
    if shard.group is not None:
        local = torch.stack((total, target))
        ranks = local.new_empty((shard.group.size(), *local.shape))
        dist.all_gather(list(ranks), local, group=shard.group)
        total, target = ranks[:, 0].logsumexp(0), ranks[:, 1].sum(0)
    return torch.where(targets != IGNORE, total - target, 0.0), logits, index, total


def _log_sums(logits: Tensor, index: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """The log of the sum of exp(logits), and the logit of each target, float32 [N]; `index` is the
    row of the target in this rank's part of the vocabulary, int64 [N], or -1, whose logit is 0."""
    wide = logits.float() if cap is None else _capped(logits.float(), cap)
    target = wide.gather(1, index.clamp(min=0)[:, None])[:, 0]
    return wide.logsumexp(-1), torch.where(index >= 0, target, 0.0)


def _logit_gradient(
    logits: Tensor, index: Tensor, total: Tensor, factor: Tensor, cap: float | None
) -> Tensor:
    """Gradient of the losses, each times its `factor` (float32 [N]), by the logits before their
    cap, in their dtype: of softmax less 1 at the target, computed in float32."""
    capped = logits if cap is None else _capped(logits.float(), cap)
    grad = (capped - total[:, None]).exp_()  # float32, as total is
    if torch.compiler.is_compiling():  # a scatter would be a kernel of its own
        column = torch.arange(logits.shape[1], device=logits.device)
        grad -= (column == index[:, None]).float()
    else:
        grad.scatter_add_(1, index.clamp(min=0)[:, None], -(index >= 0).float()[:, None])
    if cap is not None:
        grad *= 1 - (capped / cap).square()  # slope of tanh
    return grad.mul_(factor[:, None]).to(logits.dtype)
