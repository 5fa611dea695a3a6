"""Runs with `optim.name: muon`: on every topology, over a stop, and past a bad gradient.

Newton-Schulz makes differences of rounding larger: where a gradient has small singular values it
lifts them to one, noise included. So how far a topology may be from one process is measured: it is
how far that process gets from itself when it only sums its micro-batches in another order.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.apps.runs import TOPOLOGIES, Outcome, Runs, Sizes, Twist, digests, name_of, relative

MUON: dict[str, Any] = {"optim.name": "muon", "stop_at": 6, "checkpoint.dump.every": 3}
K = 3
MARGIN = 4  # of what another order of the sums changes


def train(runs: Runs, sizes: Sizes, overrides: dict[str, Any] | None = None, **how) -> Outcome:
    return runs.train(sizes, MUON | (overrides or {}), **how)


def on_its_own(sizes: Sizes) -> dict[str, Any]:
    batch_size, grad_sync = TOPOLOGIES[sizes]
    return {"data.batch_size": batch_size, "distributed.grad_sync": grad_sync}


@pytest.fixture(scope="module", params=["bf16", "fp32"])
def dtype(request: pytest.FixtureRequest) -> dict[str, str]:
    return {"optim.muon.dtype": request.param}


@pytest.fixture(scope="module")
def alone(runs: Runs, dtype: dict[str, str]) -> Outcome:
    return train(runs, (1, 1, 1), dtype)


@pytest.fixture(scope="module")
def tolerance(runs: Runs, dtype: dict[str, str], alone: Outcome) -> float:
    """Of a loss, relative."""
    others = [train(runs, (1, 1, 1), dtype | {"data.batch_size": size}) for size in (1, 2, 3)]
    assert all(run.column("batch_hash") == alone.column("batch_hash") for run in others)
    measured = max(max(relative(run.column("loss"), alone.column("loss"))) for run in others)
    print(f"{dtype}: another order changes losses by up to {measured:.1e}")
    assert measured < (5e-4 if dtype["optim.muon.dtype"] == "bf16" else 1e-5)
    return MARGIN * measured


@pytest.mark.parametrize(
    "sizes", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2), (1, 3, 1)], ids=name_of
)
def test_every_topology_trains_the_same_run(
    runs: Runs, dtype: dict[str, str], alone: Outcome, tolerance: float, sizes: Sizes
) -> None:
    run = train(runs, sizes, dtype | on_its_own(sizes))
    assert run.weights == alone.weights
    assert run.column("batch_hash") == alone.column("batch_hash")
    differences = relative(run.column("loss"), alone.column("loss"))
    print(f"{name_of(sizes)} {dtype}: {max(differences):.1e} of {tolerance:.1e}")
    assert max(differences) < tolerance
