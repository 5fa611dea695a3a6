"""A probe may run the model before the update: the run is the same."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from apps.main import app
from apps.main.run import Run
from apps.main.train import train
from tests.apps.meshes import Sizes
from tests.apps.runs import Outcome, Runs, arguments


def run_the_model(run: Run) -> None:
    with torch.no_grad():
        run.model(torch.zeros(1, run.args.data.seq_len, dtype=torch.int64))


def train_here(overrides: dict[str, Any], looks: bool) -> None:
    train(replace(app, probe=run_the_model if looks else None), arguments(overrides))


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 1, 1)])
def test_a_probe_that_runs_the_model_changes_nothing(runs: Runs, sizes: Sizes) -> None:
    losses = []
    for looks in (False, True):
        folder = runs.folder / f"probe {sizes} {looks}"
        config = runs.config(sizes, {"stop_at": 4, "deterministic": True, "dump_dir": folder})
        runs.ranks.run(2, train_here, config, looks)
        losses.append(Outcome(folder, []).column("loss"))
    assert losses[0] == losses[1] and len(set(losses[0])) == 4
