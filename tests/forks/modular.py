"""A fork with a task of its own: a + b modulo P, from rows `a + b = c` of which only c is a target
(Power et al., 2022), with the share of right answers in training and held out."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch.nn.functional as F

from apps.main import app as main_app
from apps.main.config import TrainArgs as MainArgs
from apps.main.train import Objective
from lingua.data import IGNORE
from lingua.data.args import DataArgs
from lingua.data.loader import MicroBatch
from lingua.data.rows import Data, HeldOut, OpenData, Rows
from lingua.model import Losses
from lingua.parallel.tensors import whole
from lingua.tokenizer.interface import Tokenizer

P, PLUS, EQUALS = 23, 43, 61  # numbers are tokens, as are the signs
SUMS = np.array([(a, PLUS, b, EQUALS, (a + b) % P) for a in range(P) for b in range(P)])


@dataclass
class TrainArgs(MainArgs):
    data: DataArgs = field(default_factory=lambda: DataArgs(seq_len=4))


class Sums(Data, Rows):
    seq_len, n_views = 4, 2

    def open(self, args: TrainArgs, tokenizer: Tokenizer) -> OpenData:
        windows = np.where(np.arange(5) == 4, SUMS, IGNORE)[::7, 1:]
        held_out = HeldOut(SUMS[::7, :4], windows, n_bytes=len(windows))
        return OpenData(self, {"data.content.sums": "version 1"}, {"sums": held_out})

    def rows(self, positions: np.ndarray) -> np.ndarray:
        trained = np.delete(SUMS, np.s_[::7], axis=0)
        return trained[[np.random.default_rng(p).integers(len(trained)) for p in positions]]

    def is_target(self, positions: np.ndarray) -> np.ndarray:
        return np.tile(np.arange(5) == 4, (len(positions), 1))


class Answers(Objective):
    def loss(self, micro: MicroBatch) -> Losses:
        logits, targets = whole(self.run.model(micro.tokens)).float(), micro.targets[0]
        sums = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return Losses(sums[None], metrics={"accuracy": logits.argmax(-1) == targets})


app = replace(main_app, path=__name__, config=TrainArgs, data=Sums(), objective=Answers)
