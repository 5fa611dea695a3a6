"""Muon: momentum whose update of a matrix is replaced by the nearest orthogonal one.

After Jordan et al., 2024 (https://kellerjordan.github.io/posts/muon), with the scale of Liu et al.,
2025 (arXiv 2502.16982), which lets a learning rate and a weight decay found for AdamW stay. It is
for the matrices inside the blocks; `lingua.optim` gives AdamW the rest.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lingua.config.schema import Announced
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
        if not 0 <= self.momentum < 1:
            yield "momentum", "must be at least 0 and below 1"
        if self.ns_steps < 1:
            yield "ns_steps", "must be at least 1"
        if not 0 < self.rms < math.inf:
            yield "rms", "must be above 0 and finite"


def orthogonalise(matrix: Tensor, steps: int) -> Tensor:
    """About U V^T of a matrix U S V^T, in its dtype, by Newton-Schulz iterations.

    These need products of matrices only, and bfloat16 is enough for them.
    """
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
    buffers: list[Tensor],
    found_inf: Tensor | None,
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    ns_steps: int,
    rms: float,
    dtype: str,
) -> None:
    """One update of matrices and their `buffers` (the means of their gradients), in place; neither
    changes where `found_inf`, a scalar on the device, is 1.

    `grads` are the parts of the gradients that this rank holds.

    Orthogonal is a property of the whole matrix: each rank gathers it, works on it, and keeps its
    own part, so the update does not depend on how the matrix is sharded. torch's Muon works on the
    parts as DTensors, and is off by 2 % there (torch 2.13).
    """
    compute = torch.bfloat16 if dtype == "bf16" else torch.float32
    for p, grad, buffer in zip(parameters, grads, buffers, strict=True):
        own, own_buffer = local(p), local(buffer)
        mean = own_buffer.lerp(grad, 1 - momentum)
        direction = (grad.lerp(mean, momentum) if nesterov else mean).to(compute)
        step = map_whole(lambda t: orthogonalise(t, ns_steps), direction, p)
        # An orthogonal m x n matrix has elements of root mean square 1 / sqrt(max(m, n)).
        scale = rms * max(p.shape) ** 0.5
        new = (own * (1 - lr * weight_decay)).add_(step, alpha=-lr * scale)
        if found_inf is not None:
            new, mean = (
                torch.where(found_inf == 0, new, own),
                torch.where(found_inf == 0, mean, own_buffer),
            )
        own.copy_(new)
        own_buffer.copy_(mean)
