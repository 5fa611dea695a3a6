"""A fork whose rank 1 computes wrongly in silence: one bit of one gradient, in step 5."""

import os
from dataclasses import replace

import torch
from torch import Tensor

from apps.main import app as main_app
from apps.main.train import Objective
from lingua.data.loader import MicroBatch
from lingua.parallel.tensors import local


class Flipped(Objective):
    def gradients(self, batch: list[MicroBatch], counts: Tensor) -> tuple[Tensor, Tensor]:
        result = super().gradients(batch, counts)
        if os.environ.get("FAULTY") and self.run.progress.step + 1 == 5:
            grad = local(next(self.run.model.parameters()).grad).view(-1)
            grad.view(torch.int32)[grad.abs().argmax()] ^= 1 << 20
        return result


app = replace(main_app, path=__name__, objective=Flipped)
