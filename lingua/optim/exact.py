"""Updates of elements that do not depend on the shard they are in, for `deterministic: mesh`."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lingua.base.errors import UserError
from lingua.optim.optimizer import AdamWMuon, LoopOptimizer, update_adamw
from lingua.parallel.tensors import local

LANES = 16  # float32 elements in the longest vectors of a CPU


def make_exact(optimizer: LoopOptimizer) -> None:
    """torch's fused kernels for the CPU compute what fills no whole vector in double precision, the
    rest in float32. Have AdamW's fill whole vectors. Raises UserError for another fused one."""
    if isinstance(optimizer, AdamWMuon):
        optimizer.algorithms["adamw"] = update_padded_adamw
    elif any(g.get("fused") and any(p.is_cpu for p in g["params"]) for g in optimizer.param_groups):
        raise UserError(
            "deterministic = mesh: the app's optimizer is one of torch's with fused=True, whose "
            "rounding on a CPU depends on the shards; must have foreach=True or neither"
        )


def update_padded_adamw(
    parameters: list[nn.Parameter],
    grads: list[Tensor],
    states: list[dict[str, Tensor]],
    admitted: Tensor,
    divisor: Tensor,
    group: dict[str, Any],
) -> None:
    """`update_adamw` of whole vectors: of a CPU tensor that ends in a part of one, on a copy."""
    uneven = [local(p).is_cpu and local(p).numel() % LANES > 0 for p in parameters]
    copies = [
        tuple(
            _padded(t) if copied else local(t).detach()
            for t in (p, grad, state["exp_avg"], state["exp_avg_sq"])
        )
        for p, grad, state, copied in zip(parameters, grads, states, uneven, strict=True)
    ]
    means = [
        {"exp_avg": mean, "exp_avg_sq": square, "step": state["step"]}
        for (_, _, mean, square), state in zip(copies, states, strict=True)
    ]
    shards = [nn.Parameter(p, requires_grad=False) for p, *_ in copies]
    update_adamw(shards, [c[1] for c in copies], means, admitted, divisor, group)
    for (p, _, mean, square), whole, state, copied in zip(
        copies, parameters, states, uneven, strict=True
    ):
        if copied:
            for new, old in ((p, whole), (mean, state["exp_avg"]), (square, state["exp_avg_sq"])):
                local(old).copy_(new[: local(old).numel()].view_as(local(old)))


def _padded(t: Tensor) -> Tensor:
    return F.pad(local(t).detach().flatten(), (0, -local(t).numel() % LANES))
