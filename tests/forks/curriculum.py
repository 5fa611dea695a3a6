"""A fork whose targets have weights: those of one type of token begin with a small one, which grows
until they count as much as others. The loss is divided by the sum of the weights."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from apps.main import app as main_app
from apps.main.config import TrainArgs as MainArgs
from apps.main.train import Objective
from lingua.config.schema import Announced, bounds
from lingua.data import IGNORE
from lingua.data.loader import MicroBatch
from lingua.model import Losses


@dataclass
class CurriculumArgs:
    first: Announced[float] = 0.1  # weight of the even tokens in the first step
    steps: Announced[int] = 4  # until it is 1

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 0, "first", maximum=1)
        yield from bounds(self, 1, "steps")


@dataclass
class TrainArgs(MainArgs):
    curriculum: CurriculumArgs = field(default_factory=CurriculumArgs)


class Curriculum(Objective):
    def weights(self, micro: MicroBatch) -> Tensor:  # float64, as targets
        args = self.run.args.curriculum
        share = 1.0 if micro.held_out else min(1.0, (micro.step - 1) / args.steps)
        even = args.first + (1 - args.first) * share
        weights = torch.where(micro.targets % 2 == 0, even, 1.0).double()
        return weights.masked_fill(micro.targets == IGNORE, 0.0)

    def count(self, micro: MicroBatch) -> Tensor:
        return self.weights(micro).sum((1, 2))

    def fields(self, micro: MicroBatch) -> dict[str, Tensor]:
        return {"weights": self.weights(micro).transpose(0, 1).float()}  # rows first

    def loss(self, micro: MicroBatch) -> Losses:
        losses = self.run.model(*micro.inputs(), **micro.random(), per_token=True)
        return Losses((losses * micro.fields["weights"].transpose(0, 1)).sum((1, 2)))


app = replace(main_app, path=__name__, config=TrainArgs, objective=Curriculum)
