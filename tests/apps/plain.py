"""A model as a fork may bring it: torch's own modules, initialised as torch does it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from apps.main.config import TrainArgs
from lingua.app import Built
from lingua.data import IGNORE
from lingua.parallel.plan import ParallelPlan


class Block(nn.Module):
    """With a buffer, a parameter smaller than any mesh, one that is frozen, one that is unused."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.norm.bias.requires_grad_(False)
        self.up, self.down = nn.Linear(dim, 31), nn.Linear(31, dim)
        self.gain, self.unused = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(2, 3))
        self.register_buffer("scale", torch.empty(dim))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        nn.init.normal_(self.unused)
        nn.init.uniform_(self.scale, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale * self.gain


class Plain(nn.Sequential):
    """Embedding, two blocks, head: torch's own modules, initialised as torch does it."""

    def __init__(self, n_tokens: int) -> None:
        super().__init__(nn.Embedding(n_tokens, 13), Block(13), Block(13), nn.Linear(13, n_tokens))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        logits = super().forward(tokens)
        if targets is None:
            return logits
        options = {"ignore_index": IGNORE, "reduction": "sum"}
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)
        return torch.stack([losses]), (targets != IGNORE).sum((1, 2))


def build_plain(args: TrainArgs) -> Built:
    return Built(Plain(args.model.vocab_size), None, flops_per_token=1.0)


def build_split(args: TrainArgs) -> Built:
    """With a tensor-parallel plan only; ends, norms and buffers stay on every tp rank."""
    plan = ParallelPlan(
        tp={"*.up": ColwiseParallel(use_local_output=False), "*.down": RowwiseParallel()},
        tp_equal=("0", "*.norm", "*.gain", "*.unused", "3"),
    )
    return Built(Plain(args.model.vocab_size), plan, flops_per_token=1.0)
