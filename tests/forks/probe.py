"""A fork that looks into the model: the norm of every gradient, every so many steps."""

from dataclasses import dataclass, field, replace

import torch

from apps.main import app as main_app
from apps.main.config import TrainArgs as MainArgs
from apps.main.run import Run
from lingua.config.schema import Free
from lingua.parallel.init import canonical_name
from lingua.parallel.tensors import whole


@dataclass
class GradientProbeArgs:
    every: Free[int] = 2  # steps between two looks; 0: none


@dataclass
class TrainArgs(MainArgs):
    gradients: GradientProbeArgs = field(default_factory=GradientProbeArgs)


def probe(run: Run) -> None:
    step, every = run.progress.step + 1, run.args.gradients.every
    if every and step % every == 0:
        grads = {canonical_name(n): whole(p.grad) for n, p in run.model.named_parameters()}
        norms = torch.stack([grad.norm() for grad in grads.values()])
        run.report.event("gradients", step, norms=dict(zip(grads, norms.tolist(), strict=True)))


app = replace(main_app, path=__name__, config=TrainArgs, probe=probe)
