"""A fork with another loss of pairs: SimPO (Meng et al., 2024, arXiv 2405.14734, equation 6), which
needs no reference: -log sigmoid(beta (mean log p of the chosen answer's tokens - that of the
rejected one's) - gamma)."""

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from apps.dpo import TrainArgs as PairArgs
from apps.dpo.reference import answers
from apps.main import app as main_app
from apps.main.train import Objective
from lingua.config.schema import Guarded
from lingua.data.loader import MicroBatch
from lingua.model import Losses


@dataclass
class SimPOArgs:
    beta: Guarded[float] = 2.0  # scale of the margin
    gamma: Guarded[float] = 0.5  # margin that is aimed at


@dataclass
class TrainArgs(PairArgs):
    simpo: SimPOArgs = field(default_factory=SimPOArgs)


class SimPO(Objective):
    def count(self, micro: MicroBatch) -> Tensor:
        return answers(micro.targets, micro.documents)[1].sum()[None]

    def loss(self, micro: MicroBatch) -> Losses:
        answer, is_pair = answers(micro.targets, micro.documents)  # B K//2 2 S
        [losses] = self.run.model(*micro.inputs(), **micro.random(), per_token=True)
        means = torch.where(answer, -losses[:, None, None], 0.0).sum(-1) / answer.sum(-1).clamp(1)
        args, margins = self.run.args.simpo, means[..., 0] - means[..., 1]
        sums = torch.where(is_pair, -F.logsigmoid(args.beta * margins - args.gamma), 0.0).sum()
        return Losses(sums[None], metrics={"accuracy": (margins > 0, is_pair)})


app = replace(main_app, path=__name__, config=TrainArgs, objective=SimPO)
