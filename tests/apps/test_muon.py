"""Runs with `optim.name: muon` on every topology; test_pairs.py stops and resumes them.

Newton-Schulz makes differences of rounding larger: where a gradient has small singular values it
lifts them to one, noise included. So how far a topology may be from one process is measured: it is
how far that process gets from itself when it only sums its micro-batches in another order.
"""

from typing import Any

import pytest

from tests.apps.meshes import Sizes, on_its_own, on_meshes
from tests.apps.runs import Outcome, Runs, Twist, relative

MUON: dict[str, Any] = {"optim.name": "muon"}
END = 4
MARGIN = 10  # times what another order of the sums changes
bf16 = pytest.mark.parametrize("dtype", ["bf16"], indirect=True)


@pytest.fixture(scope="module", params=["bf16", pytest.param("fp32", marks=pytest.mark.soak)])
def dtype(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MUON | {"optim.muon.dtype": request.param, "stop_at": END}


@pytest.fixture(scope="module")
def alone(runs: Runs, dtype: dict[str, Any]) -> Outcome:
    return runs.train((1, 1, 1), dtype)


@pytest.fixture(scope="module")
def tolerance(runs: Runs, dtype: dict[str, Any], alone: Outcome) -> float:
    """Of a loss, relative."""
    others = [runs.train((1, 1, 1), dtype | {"data.batch_size": size}) for size in (1, 3)]
    measured = max(max(relative(run.column("loss"), alone.column("loss"))) for run in others)
    assert measured < (1e-4 if dtype["optim.muon.dtype"] == "bf16" else 1e-6)
    return MARGIN * measured


def apart(run: Outcome, other: Outcome) -> float:
    return max(relative(run.column("loss"), other.column("loss")))


@on_meshes(soak=[(1, 2, 2), (2, 2, 1), (1, 3, 1), (2, 1, 2)])  # by default in test_pairs.py
def test_every_topology_trains_the_same_run(
    runs: Runs, dtype: dict[str, Any], alone: Outcome, tolerance: float, sizes: Sizes
) -> None:
    run = runs.train(sizes, dtype | on_its_own(sizes))
    assert run.weights == alone.weights
    assert run.column("batch_hash") == alone.column("batch_hash")
    assert apart(run, alone) < tolerance


@bf16
def test_the_tolerance_tells_one_wrong_token_in_one_row(
    runs: Runs, dtype: dict[str, Any], alone: Outcome, tolerance: float
) -> None:
    run = runs.train((1, 1, 1), dtype, twist=Twist(wrong_token_on=-1))
    assert apart(run, alone) > 2 * tolerance


# ------------------------------------------------------------------------------ what is saved


def test_the_matrices_of_the_blocks_are_saved_with_their_momentum(alone: Outcome) -> None:
    saved = alone.tensors(END)
    matrices = {n for n in saved if n.startswith("model.layers.") and saved[n].ndim == 2}
    momenta = {n for n in saved if n.startswith("optim.momentum_buffer.")}
    assert momenta == {n.replace("model.", "optim.momentum_buffer.") for n in matrices}
    assert all(saved[name].any() for name in momenta)


def test_the_optimizer_of_a_run_stays_what_it_is(runs: Runs, alone: Outcome) -> None:
    run = runs.train((1, 1, 1), {"stop_at": 9}, dump_dir=alone.dump_dir, refused=True)
    assert "optim.name: muon in the checkpoint, adamw now" in run.error
