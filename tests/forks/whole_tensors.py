"""A fork with an optimizer that needs whole tensors: momentum, brought to norm 1. It creates its
state in its first step, replaces it in every one, and runs without an adapter's parts."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from apps.main import app as main_app
from lingua.parallel.parallelize import ParallelPlan
from lingua.parallel.tensors import local, map_whole


class Normalised(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p.grad)
                state["mean"] = 0.9 * state["mean"] + 0.1 * p.grad
                direction = map_whole(lambda t: t / (t.norm() + 1e-3), local(state["mean"]), p)
                local(p).add_(direction, alpha=-group["lr"])


def build_normalised(model: nn.Module, args: Any, plan: ParallelPlan | None) -> Normalised:
    return Normalised(model.parameters(), args.optim.lr)


app = replace(main_app, path=__name__, optimizer=build_normalised)
