"""Muon: momentum whose update of a matrix is replaced by the nearest orthogonal one.

After Jordan et al., 2024 (https://kellerjordan.github.io/posts/muon), with the scale of Liu et al.,
2025 (arXiv 2502.16982), with which a learning rate and a weight decay found for AdamW stay valid.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lingua.config.schema import Announced, bounds, require
from lingua.dtensor import local, map_whole

# Of the quintic a x + b x^3 + c x^5 (Jordan et al.): steep at 0, and a few applications take all
# singular values to somewhere between 0.7 and 1.2, which trains as well as taking them to 1.
A, B, C = 3.4445, -4.7750, 2.0315
SMALLEST_NORM = 1e-7  # so that a gradient of zeros changes nothing


@dataclass
class MuonArgs:
    momentum: Announced[float] = 0.95  # decay per update of the mean of the gradient
    nesterov: Announced[bool] = True  # the mean looks one update ahead
    ns_steps: Announced[int] = 5  # Newton-Schulz iterations that make an update orthogonal
    # root mean square of an update's elements at learning rate 1; AdamW's is about 0.2
    rms: Announced[float] = 0.2
    dtype: Announced[Literal["bf16", "fp32"]] = "bf16"  # of the iterations; the mean stays float32

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 1, "ns_steps", most=1000)
        yield from require(self, "at least 0 and below 1", lambda v: 0 <= v < 1, "momentum")
        yield from require(self, "above 0 and finite", lambda v: 0 < v < math.inf, "rms")


def orthogonalise(matrix: Tensor, steps: int) -> Tensor:
    """About U V^T of a matrix U S V^T, in its dtype (bfloat16 is enough), by Newton-Schulz
    iterations."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix  # the smaller of the two Gram matrices
    x = x / x.norm().clamp(min=SMALLEST_NORM)  # the iteration needs singular values up to 1
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

    Orthogonal is a property of the whole matrix: each rank gathers it, works on it, and keeps its
    own part, so the update does not depend on how the matrix is sharded. torch's Muon works on the
    parts as DTensors, and is off by 2 % there (torch 2.13).
    """
    momentum, steps = group["momentum"], group["ns_steps"]
    compute = torch.bfloat16 if group["dtype"] == "bf16" else torch.float32
    for p, grad, state in zip(parameters, grads, states, strict=True):
        own, own_mean, grad = local(p), local(state["momentum_buffer"]), grad / divisor
        mean = own_mean.lerp(grad, 1 - momentum)
        direction = (grad.lerp(mean, momentum) if group["nesterov"] else mean).to(compute)
        step = map_whole(lambda t: orthogonalise(t, steps), direction, p)
        # An orthogonal m x n matrix has elements of root mean square 1 / sqrt(max(m, n)).
        scale = group["rms"] * max(p.shape) ** 0.5
        new = (own * (1 - group["lr"] * group["weight_decay"])).add_(
            step, alpha=-group["lr"] * scale
        )
        own.copy_(torch.where(admitted, new, own))
        own_mean.copy_(torch.where(admitted, mean, own_mean))
