"""A fork that trains low-rank changes of linear layers (Hu et al., 2021, arXiv 2106.09685): the
layers are those of `checkpoint.init_from` and frozen, the changes are new and begin at zero.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apps.main import app as main_app
from apps.main.config import TrainArgs as MainArgs
from lingua.app import Built
from lingua.config.schema import Announced, Guarded, bounds
from lingua.parallel.plan import find_modules


@dataclass
class LoraArgs:
    rank: Guarded[int] = 2  # of each change
    alpha: Announced[float] = 4.0  # a change is times alpha / rank
    # the layers that have one, by patterns of names
    targets: Guarded[list[str]] = field(default_factory=lambda: ["layers.*.attention.w[qvo]"])

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 1, "rank")


@dataclass
class TrainArgs(MainArgs):
    lora: LoraArgs = field(default_factory=LoraArgs)


class Lora(nn.Linear):
    """A linear layer and its change."""

    def __init__(self, base: nn.Linear, args: LoraArgs) -> None:
        sizes, bias = (base.in_features, base.out_features), base.bias is not None
        super().__init__(*sizes, bias, device="meta")
        self.scale = args.alpha / args.rank
        self.down = nn.Parameter(torch.empty(args.rank, sizes[0], device="meta"))
        self.up = nn.Parameter(torch.empty(sizes[1], args.rank, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.down), self.up)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "down"):  # not yet where the base class is made
            nn.init.kaiming_uniform_(self.down, 5**0.5)
            nn.init.zeros_(self.up)


def build(args: Any) -> Built:
    built = main_app.build(args)
    for name, base in find_modules(built.module, args.lora.targets).items():
        built.module.set_submodule(name, Lora(base, args.lora))
    for name, p in built.module.named_parameters():
        p.requires_grad_(name.endswith((".down", ".up")))
    return built


app = replace(main_app, path=__name__, config=TrainArgs, build=build, hugging_face=None)
