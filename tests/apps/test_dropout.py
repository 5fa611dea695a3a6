"""Runs with `model.dropout`: what the noise of a row depends on, and none in evaluation."""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from apps.main.config import TrainArgs
from apps.main.transformer import build
from lingua.app import Built
from lingua.base.hashing import hash_bits, key_of
from tests.apps.runs import GLOBAL_BATCH, TOLERANCES, differs

DROPPING: dict[str, Any] = {"model.dropout": 0.1, "stop_at": 5}


def test_evaluation_has_no_noise(runs):
    still = {"optim.lr": 0, "stop_at": 2, "validation.every": 2}
    noisy, quiet = (runs.train((1, 1, 1), still | {"model.dropout": p}) for p in (0.5, 0))
    assert [line["nats_per_token"] for line in noisy.held_out] == [
        line["nats_per_token"] for line in quiet.held_out
    ]
    assert set(differs(noisy, quiet)) == TOLERANCES.keys()


@dataclass
class Noise:
    """A builder of a model that is given the noise of a hash of seed, step and row, in one process
    and one micro-batch; in step 5 its first row is given that of the row `off` rows on."""

    off: int

    def __call__(self, args: TrainArgs) -> Built:
        built, steps = build(args), itertools.count(1)

        def forward_pre(module: Any, inputs: Any, named: dict[str, Any]) -> Any:
            if "noise" in named:
                key = key_of(args.seed, "noise", step := next(steps))
                rows = GLOBAL_BATCH * (step - 1) + torch.arange(GLOBAL_BATCH)
                assert torch.equal(named["noise"], hash_bits(key, rows))
                rows[0] += self.off * (step == 5)
                named["noise"] = hash_bits(key, rows)
            return inputs, named

        built.module.register_forward_pre_hook(forward_pre, with_kwargs=True)
        return built


@pytest.mark.parametrize("off", [0, 1])
def test_the_noise_of_a_row_is_a_hash_of_seed_step_and_row(runs, off):
    alone, run = (runs.train((1, 1, 1), DROPPING, build=b) for b in (None, Noise(off)))
    assert set(differs(run, alone)) == ({"loss", "grad_norm"} if off else set())
