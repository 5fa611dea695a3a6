"""Between two log steps the host does not wait for the device: counted in the real loop by the
values that the host reads from tensors. Nor does Python collect garbage when it likes."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from apps.main import app
from apps.main.config import TrainArgs
from apps.main.train import Objective, train
from lingua.data.loader import MicroBatch
from lingua.optim.adapter import on_shards
from lingua.parallel import program
from lingua.parallel.plan import ParallelPlan
from lingua.parallel.tensors import local
from lingua.run.run import Run
from tests.apps.runs import arguments

FIRST, LAST = 2, 5  # the steps between whose forwards the reads are counted


class Reads(TorchDispatchMode):
    """Counts `.item()`, `bool()`, `.tolist()` and whatever else brings a value to the host."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class Counting(Objective):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.reads = Reads()
        self.collected: list[int] = []  # the step before each collection

    def collects(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.collected.append(self.run.progress.step)

    def gradients(self, batch: list[MicroBatch], valid: Tensor) -> tuple[Tensor, Tensor]:
        step = self.run.progress.step + 1
        if step == FIRST:
            self.reads.__enter__()
            gc.callbacks.append(self.collects)
        elif step == LAST:
            self.reads.__exit__(None, None, None)
            gc.callbacks.remove(self.collects)
        self.run.numbers.add({"rows": torch.ones(len(batch[0].row_ids))}, batch[0])
        return super().gradients(batch, valid)


def read_the_norm(run: Run) -> None:
    """The fault: a probe that looks at a gradient in every step."""
    assert local(next(run.model.parameters()).grad).norm().isfinite()


def momentum(model: nn.Module, args: TrainArgs, plan: ParallelPlan | None) -> Optimizer:
    """An optimizer of torch's, which does not suppress an update itself."""
    return on_shards([{"params": list(model.parameters())}], lambda g: SGD(g, momentum=0.9))


def reads_of(overrides: dict[str, Any], faulty: bool) -> tuple[float, list[int]]:
    """Values that the host reads in a step without a log line; steps behind which Python collects
    garbage."""
    program.COLLECT_EVERY = 2
    seen: list[Counting] = []
    optimizer = momentum if overrides["optim.name"] == "sgd" else None
    overrides = overrides if optimizer is None else overrides | {"optim.name": "adamw"}

    def objective(run: Run) -> Counting:
        seen.append(Counting(run))
        return seen[0]

    probe = read_the_norm if faulty else None
    forked = replace(app, objective=objective, probe=probe, optimizer=optimizer)
    train(forked, arguments(overrides))
    return seen[0].reads.n / (LAST - FIRST), seen[0].collected


@pytest.mark.parametrize(
    ("sizes", "optimizer"), [((1, 1, 1), "adamw"), ((1, 2, 1), "muon"), ((1, 1, 2), "sgd")]
)
def test_a_step_reads_nothing_but_the_counts_of_its_targets(runs, sizes, optimizer):
    """That one is of a tensor that is the host's: every view has targets."""
    quiet = {"logging.freq": 100, "data.batch_size": 2, "stop_at": LAST, "optim.name": optimizer}
    for faulty in (False, True) if optimizer == "adamw" else (False,):
        config = runs.config(sizes, quiet | {"dump_dir": runs.folder / f"reads {sizes} {faulty}"})
        for n, collected in runs.ranks.run(sizes[1] * sizes[2], reads_of, config, faulty):
            assert n == 1 + faulty and collected == [2, 4]
