"""A fork with an error that no check foresees, on some ranks."""

import os
from dataclasses import replace

from torch import Tensor

from apps.main import app as main_app
from apps.main.train import Objective
from lingua.data.loader import MicroBatch


class Failing(Objective):
    def gradients(self, batch: list[MicroBatch], counts: Tensor) -> tuple[Tensor, Tensor]:
        if os.environ["RANK"] in os.environ["FAULTY_RANKS"].split():
            raise ValueError("no gradients")
        return super().gradients(batch, counts)


app = replace(main_app, path=__name__, objective=Failing)
