"""Runs with `model.dropout`: the same noise on any topology and over a stop, none in evaluation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from apps.main.config import TrainArgs
from apps.main.transformer import build
from lingua.app import Built
from lingua.hashing import hash_bits, key_of
from tests.apps.meshes import Sizes, name_of
from tests.apps.runs import TOLERANCES, Outcome, Runs, differs

DROPPING: dict[str, Any] = {"model.dropout": 0.1, "stop_at": 5}
CHECKPOINTING, COMPILE = "distributed.activation_checkpointing", "distributed.compile"


@pytest.fixture(scope="module")
def alone(runs: Runs) -> Outcome:
    """The run in one process, its global batch in one piece."""
    return runs.train((1, 1, 1), DROPPING)


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ((1, 1, 1), {"data.batch_size": 3, CHECKPOINTING: "full"}),
        ((1, 2, 1), {"data.batch_size": 3, CHECKPOINTING: "selective"}),
        ((1, 1, 2), {"data.batch_size": 2, CHECKPOINTING: "full"}),
        pytest.param((2, 1, 2), {"data.batch_size": 1}, marks=pytest.mark.soak),
        pytest.param(
            (1, 1, 2), {CHECKPOINTING: "selective", COMPILE: True}, marks=pytest.mark.soak
        ),
    ],
    ids=lambda value: name_of(value) if isinstance(value, tuple) else "",
)
def test_every_topology_drops_the_same(
    runs: Runs, alone: Outcome, sizes: Sizes, settings: dict[str, Any]
) -> None:
    run = runs.train(sizes, DROPPING | settings)
    assert run.weights == alone.weights
    assert differs(run, alone) == []


def test_a_stopped_run_goes_on_with_the_noise_of_its_steps(runs: Runs, alone: Outcome) -> None:
    first = runs.train((1, 1, 2), DROPPING | {"stop_at": 3})
    run = runs.train((2, 1, 1), DROPPING | {"data.batch_size": 2}, dump_dir=first.dump_dir)
    assert differs(run, alone) == []


def test_evaluation_has_no_noise(runs: Runs) -> None:
    still = {"optim.lr": 0, "stop_at": 2, "validation.every": 2}
    noisy, quiet = (runs.train((1, 1, 1), still | {"model.dropout": p}) for p in (0.5, 0))
    assert [line["nats_per_token"] for line in noisy.held_out] == [
        line["nats_per_token"] for line in quiet.held_out
    ]
    assert set(differs(noisy, quiet)) == TOLERANCES.keys()


# ------------------------------------------------------------- what the comparison can see


@dataclass
class Wrong:
    """A builder in whose runs the noise of a row is another function of what it may depend on."""

    noise: Callable[[int, torch.Tensor], torch.Tensor]

    def __call__(self, args: TrainArgs) -> Built:
        built = build(args)
        steps = iter(range(10**6))

        def forward_pre(module: Any, inputs: Any, named: dict[str, Any]) -> Any:
            ids = torch.arange(len(inputs[0]))  # one process, one micro-batch, no row left out
            if "noise" in named:
                step = next(steps) + 1
                assert torch.equal(named["noise"], of_rows(step, ids + 7 * (step - 1)))
                named["noise"] = self.noise(step, ids + 7 * (step - 1))
            return inputs, named

        built.module.register_forward_pre_hook(forward_pre, with_kwargs=True)
        return built


def of_rows(step: int, ids: torch.Tensor, seed: int = 42) -> torch.Tensor:
    return hash_bits(key_of(seed, "noise", step), ids)


def right(step: int, ids: torch.Tensor) -> torch.Tensor:
    return of_rows(step, ids)


def another_seed(step: int, ids: torch.Tensor) -> torch.Tensor:
    return of_rows(step, ids, seed=43)


def one_step_late(step: int, ids: torch.Tensor) -> torch.Tensor:
    return of_rows(step - 1, ids)


def rows_numbered_in_their_batch(step: int, ids: torch.Tensor) -> torch.Tensor:
    return of_rows(step, ids - 7 * (step - 1))


def one_row_off_in_the_last_step(step: int, ids: torch.Tensor) -> torch.Tensor:
    ids[0] += step == 5
    return of_rows(step, ids)


@pytest.mark.parametrize(
    ("noise", "same"),
    [
        (right, True),
        (another_seed, False),
        (one_step_late, False),
        (rows_numbered_in_their_batch, False),
        (one_row_off_in_the_last_step, False),
    ],
)
def test_noise_that_differs_is_seen_to_differ(
    runs: Runs, alone: Outcome, noise: Callable, same: bool
) -> None:
    run = runs.train((1, 1, 1), DROPPING, build=Wrong(noise))
    assert (differs(run, alone) == []) == same
    assert same or {"loss", "grad_norm"} <= set(differs(run, alone))
