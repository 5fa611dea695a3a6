"""A fork with experts: each position goes to one of several feed-forwards (Switch Transformer,
Fedus et al., 2022, arXiv 2101.03961).

In training an expert takes at most `capacity` times its equal share of the positions of a row, the
most likely ones; other positions pass by. The auxiliary loss, too, is of a row, so neither depends
on which rows a micro-batch has.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, parallel

from apps.main import app as main_app
from apps.main.config import ModelArgs as MainModelArgs
from apps.main.config import TrainArgs as MainArgs
from apps.main.transformer import build as main_build
from lingua.app import Built
from lingua.config.schema import Guarded, bounds, require
from lingua.model import PerRow
from lingua.model.transformer import FeedForward, TransformerBlock


@dataclass
class ModelArgs(MainModelArgs):
    n_experts: Guarded[int] = 4  # feed-forwards of each block
    capacity: Guarded[float] = 1.5  # positions an expert takes, over an equal share of the row's
    balance: Guarded[float] = 0.01  # weight of the auxiliary loss

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from super().validate()
        yield from bounds(self, 1, "n_experts")
        yield from require(self, "above 0", lambda v: v > 0, "capacity", "balance")


@dataclass
class TrainArgs(MainArgs):
    model: ModelArgs = field(default_factory=ModelArgs)


class Experts(nn.Module):
    def __init__(self, args: ModelArgs, out_factor: float) -> None:
        super().__init__()
        self.args = args
        self.router = nn.Linear(args.dim, args.n_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(args, out_factor) for _ in range(args.n_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, PerRow]:  # B S E -> B S E
        seq_len, n = x.shape[1], len(self.experts)
        probabilities = self.router(x).float().softmax(-1)  # B S n
        gate, chosen = probabilities.max(-1)  # B S
        limit = min(seq_len, ceil(self.args.capacity * seq_len / n)) if self.training else seq_len
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            # The positions that chose it, the most likely first; those behind them weigh nothing.
            weight, place = torch.where(chosen == i, gate, 0.0).topk(limit, dim=1)  # B limit
            place = place[..., None].expand(-1, -1, x.shape[2])
            result = expert(x.gather(1, place)) * weight[..., None].type_as(x)
            out = out.scatter_add(1, place, result)
        share = torch.stack([(chosen == i).float().mean(1) for i in range(n)], dim=1)  # B n
        balance = n * (share * probabilities.mean(1)).sum(1)  # B, 1 where all have an equal share
        return out, {"balance": self.args.balance * balance}


def build(args: Any) -> Built:
    """The hidden features of every expert are split; each tp rank routes all positions alike."""
    built = main_build(args, block=partial(TransformerBlock, feed_forward=Experts))
    styles = {
        "": parallel.PrepareModuleInputOutput(
            input_layouts=(Shard(1),),
            desired_input_layouts=(Replicate(),),
            use_local_input=True,
            output_layouts=(Replicate(), None),
            desired_output_layouts=(Shard(1), None),
        ),
        "w[123]": None,
        "experts.*.w[13]": parallel.ColwiseParallel(use_local_output=False),
        "experts.*.w2": parallel.RowwiseParallel(output_layouts=Replicate()),
    }
    plan = built.plan.with_part("layers.*.feed_forward", styles, tp_equal=("router",))
    return replace(built, plan=plan)


app = replace(main_app, path=__name__, config=TrainArgs, build=build, hugging_face=None)
