"""A fork with an optimizer of torch's that needs whole matrices: Adafactor, which keeps means of
their rows and columns."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from apps.main import app as main_app
from lingua.optim.whole import on_whole
from lingua.parallel.plan import ParallelPlan


def build_adafactor(
    model: nn.Module, args: Any, plan: ParallelPlan | None
) -> torch.optim.Optimizer:
    return on_whole(
        [{"params": list(model.parameters())}],
        lambda groups: torch.optim.Adafactor(groups, args.optim.lr),
    )


app = replace(main_app, path=__name__, optimizer=build_adafactor)
