"""A fork that learns from another model: the mean Kullback-Leibler divergence of its distributions
of the next token from those of a frozen checkpoint (Hinton et al., 2015)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from apps.main import app as main_app
from apps.main.config import TrainArgs as MainArgs
from apps.main.train import Objective
from lingua.config.schema import Guarded
from lingua.data import IGNORE
from lingua.data.loader import MicroBatch
from lingua.model import Losses
from lingua.parallel.tensors import whole
from lingua.run.run import Run
from lingua.tools.exchange.trained import open_trained


@dataclass
class TrainArgs(MainArgs):
    teacher: Guarded[str] = ""  # checkpoint of the model to learn from


class Distillation(Objective):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        teacher = open_trained("teacher", run.args.teacher, main_app)
        self.teacher = teacher.load(run.args.distributed, run.mesh).requires_grad_(False)

    def log_p(self, model: torch.nn.Module, micro: MicroBatch) -> Tensor:  # B S vocabulary
        logits = model(micro.tokens, None, *micro.inputs()[2:], **micro.random())
        return whole(logits).float().log_softmax(-1)

    def loss(self, micro: MicroBatch) -> Losses:
        if not self.run.model.training:  # held out, the loss of the text is measured
            return super().loss(micro)
        [teacher, student] = self.log_p(self.teacher, micro), self.log_p(self.run.model, micro)
        divergence = (teacher.exp() * (teacher - student)).sum(-1)  # B S
        sums = torch.where(micro.targets[0] != IGNORE, divergence, 0.0).sum()
        return Losses(sums[None], metrics={"agreement": teacher.argmax(-1) == student.argmax(-1)})


app = replace(main_app, path=__name__, config=TrainArgs, objective=Distillation)
