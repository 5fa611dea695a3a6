"""The loss of each row of a step, under a checkpoint of its run: which rows made the loss jump."""

from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from lingua.base.hashing import hash_bits, key_of
from lingua.checkpoint.folder import Checkpoint
from lingua.data import IGNORE
from lingua.data.documents import DocumentMarks
from lingua.data.loader import Loader
from lingua.data.rows import Documents, Rows
from lingua.model import Losses
from lingua.run.args import RunArgs


class RowLosses(NamedTuple):
    """The losses of the G rows of a step, for each of the V-1 views that the model predicts."""

    sums: np.ndarray  # float64 [G, V-1]: token losses in nats
    counts: np.ndarray  # float64 [G, V-1]: the targets that these cover

    def row_means(self) -> np.ndarray:
        """float64 [G]: mean over the targets of a row, summed over the views as training does; a
        view without targets gives nothing."""
        return (self.sums / np.maximum(self.counts, 1)).sum(1)

    def step_loss(self) -> float:
        """The loss of the global batch, as metrics.jsonl has it."""
        return float((self.sums.sum(0) / self.counts.sum(0)).sum())


def nearest_checkpoint(checkpoints: list[Checkpoint], step: int) -> Checkpoint:
    """The checkpoint whose weights are nearest to those that `step` began with. One of a later
    step, which has trained on the rows of this one, only where no other is left."""
    return min(checkpoints, key=lambda c: (c.step > step, abs(c.step - (step - 1)), c.step))


@torch.no_grad()
def row_losses(
    model: nn.Module,
    args: RunArgs,
    rows: Rows,
    marks: DocumentMarks | None,
    step: int,
    position: int,
    documents: Documents | None = None,
) -> RowLosses:
    """The losses of the global batch that begins at `position`, as `step` computes them: with the
    same masks and documents, and the same elements dropped. One row at a time, since a model gives
    the sum over its rows."""
    size, device = args.data.step_rows, next(model.parameters()).device
    loader = Loader(
        rows, size, dp_rank=0, dp_size=1, n_micro=size, rows=1, marks=marks, documents=documents
    )
    noise = key_of(args.seed, "noise", step) if args.noisy else None
    model.train()
    losses = []
    for micro in next(islice(loader.steps(position), 1)):
        micro = micro.to(device)
        micro.noise = None if noise is None else hash_bits(noise, micro.row_ids)
        sums = Losses(*model(*micro.inputs(), **micro.random())).sums
        losses.append(torch.stack((sums.double(), (micro.targets != IGNORE).sum((1, 2)))))
    sums, counts = torch.stack(losses).cpu().numpy().swapaxes(0, 1)
    return RowLosses(sums, counts)
