"""The loss of direct preference optimisation. With log-ratios r of the policy and r0 of the
reference (log p(chosen answer) - log p(rejected answer), of their tokens after the prompt), a pair
has the margin beta (r - r0) and the loss -log sigmoid(margin)."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from apps.dpo.reference import Reference, answers, held_out_ratios, log_ratios
from apps.main.train import Objective
from lingua.data.loader import MicroBatch
from lingua.model import Losses
from lingua.run.run import Run


class Preferences(Objective):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.reference = Reference(run)

    def count(self, micro: MicroBatch) -> Tensor:
        return answers(micro.targets, micro.documents)[1].sum()[None]

    def fields(self, micro: MicroBatch) -> dict[str, Tensor]:
        return {"reference": self.reference.known_ratios(micro)}

    def loss(self, micro: MicroBatch) -> Losses:
        ratios, is_pair = log_ratios(self.run.model, *micro.inputs(), **micro.random())
        margins = self.run.args.dpo.beta * (ratios - micro.fields["reference"])
        loss = torch.where(is_pair, -F.logsigmoid(margins), 0.0).sum()
        metrics = {"accuracy": (margins > 0, is_pair), "margin": (margins, is_pair)}
        return Losses(loss[None], metrics=metrics)

    def measure(self) -> float | None:
        """Measure the pairs of every source; returns the mean of all their losses."""
        run, losses = self.run, []
        for name, windows in run.data.held_out.items():
            ratios = np.concatenate(held_out_ratios(run, run.model, windows))
            margins = run.args.dpo.beta * (ratios - np.concatenate(self.reference.held_out[name]))
            losses.append(np.logaddexp(0, -margins))
            numbers = {"loss": losses[-1], "accuracy": margins > 0, "margin": margins}
            means = {key: float(values.mean()) for key, values in numbers.items()}
            run.report.validation(run.progress.step, name, means)
        return float(np.concatenate(losses).mean()) if losses else None
