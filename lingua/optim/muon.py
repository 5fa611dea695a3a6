"""Muon: momentum whose update of a matrix is replaced by the nearest orthogonal one.

After Jordan et al., 2024 (https://kellerjordan.github.io/posts/muon), with the scale of Liu et al.,
2025 (arXiv 2502.16982), with which a learning rate and a weight decay found for AdamW stay valid.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lingua.base.errors import UserError
from lingua.parallel.init import Named
from lingua.parallel.plan import within
from lingua.parallel.tensors import local
from lingua.parallel.whole import map_whole, n_owners

# The quintic a x + b x^3 + c x^5 (Jordan et al.): steep at 0, and a few applications take all
# singular values to somewhere between 0.7 and 1.2, which trains as well as taking them to 1.
A, B, C = 3.4445, -4.7750, 2.0315
MIN_NORM = 1e-7  # keeps the update of a zero gradient zero


def take_matrices(decay: list[Named], blocks: tuple[str, ...]) -> tuple[list[Named], list[Named]]:
    """(the matrices in one of the blocks, which Muon trains, the other parameters). Raises
    UserError where there is none for it."""
    matrices = [(name, p) for name, p in decay if p.ndim == 2 and within(name, blocks)]
    if not matrices:
        raise UserError(
            "optim.name = muon: trains the matrices inside the blocks that the model's plan names, "
            "and there are none; must be adamw"
        )
    names = {name for name, _ in matrices}
    return matrices, [(name, p) for name, p in decay if name not in names]


def orthogonalise(matrix: Tensor, steps: int) -> Tensor:
    """About U V^T of a matrix U S V^T, in its dtype (bfloat16 is enough), by Newton-Schulz
    iterations."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix  # the smaller of the two Gram matrices
    x = x / x.norm().clamp(min=MIN_NORM)  # the iteration needs singular values up to 1
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if tall else x


@torch.no_grad()
def muon(
    parameters: list[nn.Parameter],
    grads: list[Tensor],
    states: list[dict[str, Tensor]],
    admitted: Tensor,
    divisor: Tensor,
    group: dict[str, Any],
) -> None:
    """One update of matrices and of the means of their gradients, in place; neither changes where
    `admitted`, a bool scalar on the device, is False. `grads` are this rank's parts of the
    gradients, which `divisor`, a float32 scalar there, divides; `group` has the rate, the weight
    decay and the fields of MuonArgs.

    Orthogonal is a property of the whole matrix: of matrices of one shape, each rank receives the
    parts of one, works on it, and sends them back, so the update does not depend on how the matrix
    is sharded. torch's Muon works on the parts as DTensors, and is off by 2 % there (torch 2.13).
    """
    momentum, steps = group["momentum"], group["ns_steps"]
    compute = torch.bfloat16 if group["dtype"] == "bf16" else torch.float32
    for bucket in _buckets(parameters):
        means, directions = [], []
        for i in bucket:
            grad = grads[i] / divisor
            mean = local(states[i]["momentum_buffer"]).lerp(grad, 1 - momentum)
            means.append(mean)
            directions.append(
                (grad.lerp(mean, momentum) if group["nesterov"] else mean).to(compute)
            )
        wholes = [parameters[i] for i in bucket]
        parts = map_whole(lambda t: orthogonalise(t, steps), directions, wholes)
        for i, mean, step in zip(bucket, means, parts, strict=True):
            p, buffer = parameters[i], local(states[i]["momentum_buffer"])
            shard = local(p)
            # An orthogonal m x n matrix has elements of root mean square 1 / sqrt(max(m, n)).
            scale = group["rms"] * max(p.shape) ** 0.5
            new = shard * (1 - group["lr"] * group["weight_decay"])
            new.add_(step, alpha=-group["lr"] * scale)
            shard.copy_(torch.where(admitted, new, shard))
            buffer.copy_(torch.where(admitted, mean, buffer))


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[int]]:
    """Indices of parameters that are alike, as many together as ranks can work on."""
    kinds: dict[Any, list[int]] = {}
    for i, p in enumerate(parameters):
        layout = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
        kinds.setdefault((p.shape, layout), []).append(i)
    for alike in kinds.values():
        n = n_owners(parameters[alike[0]])
        yield from (alike[begin : begin + n] for begin in range(0, len(alike), n))
