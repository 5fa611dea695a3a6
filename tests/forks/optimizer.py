"""A fork with an optimizer of torch's: NAdam, on the part of the parameters that a rank holds."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from apps.main import app as main_app
from lingua.optim.adapter import on_shards
from lingua.optim.optimizer import split_by_decay
from lingua.parallel.plan import ParallelPlan


def build_nadam(model: nn.Module, args: Any, plan: ParallelPlan | None) -> torch.optim.Optimizer:
    decay, rest = split_by_decay(model)
    groups = [
        {"params": decay, "weight_decay": args.optim.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    betas = (args.optim.beta1, args.optim.beta2)
    return on_shards(
        groups,
        lambda groups: torch.optim.NAdam(
            groups, args.optim.lr, betas, args.optim.epsilon, decoupled_weight_decay=True
        ),
    )


app = replace(main_app, path=__name__, optimizer=build_nadam)
