"""Runs with `optim.name: muon`: on every topology, over a stop, and past a bad gradient.

Newton-Schulz makes differences of rounding larger: where a gradient has small singular values it
lifts them to one, noise included. So how far a topology may be from one process is measured: it is
how far that process gets from itself when it only sums its micro-batches in another order.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.apps.runs import (
    TOPOLOGIES,
    Outcome,
    Runs,
    Sizes,
    Twist,
    differs,
    digests,
    name_of,
    relative,
)

MUON: dict[str, Any] = {"optim.name": "muon"}
K, END = 3, 6  # where the run stops first, and then
MARGIN = 10  # times what another order of the sums changes
bf16 = pytest.mark.parametrize("dtype", ["bf16"], indirect=True)


def on_its_own(sizes: Sizes) -> dict[str, Any]:
    batch_size, grad_sync = TOPOLOGIES[sizes]
    return {"data.batch_size": batch_size, "distributed.grad_sync": grad_sync}


@pytest.fixture(scope="module", params=["bf16", pytest.param("fp32", marks=pytest.mark.soak)])
def dtype(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MUON | {"optim.muon.dtype": request.param, "stop_at": END}


@pytest.fixture(scope="module")
def alone(runs: Runs, dtype: dict[str, Any]) -> Outcome:
    return runs.train((1, 1, 1), dtype)


@pytest.fixture(scope="module")
def tolerance(runs: Runs, dtype: dict[str, Any], alone: Outcome) -> float:
    """Of a loss, relative."""
    others = [runs.train((1, 1, 1), dtype | {"data.batch_size": size}) for size in (1, 2, 3)]
    measured = max(max(relative(run.column("loss"), alone.column("loss"))) for run in others)
    assert measured < (1e-4 if dtype["optim.muon.dtype"] == "bf16" else 1e-6)
    return MARGIN * measured


def apart(run: Outcome, other: Outcome) -> float:
    return max(relative(run.column("loss"), other.column("loss")))


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 3, 1), (2, 1, 2), (1, 2, 2)], ids=name_of)
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


def test_tied_weights_train_the_same_run(runs: Runs) -> None:
    tied = MUON | {"optim.muon.dtype": "fp32", "model.weight_tying": True, "stop_at": END}
    run = runs.train((1, 2, 2), tied | on_its_own((1, 2, 2)))
    assert "optim.exp_avg.tok_embeddings.weight" in run.tensors(END)
    assert differs(run, runs.train((1, 1, 1), tied)) == []


# -------------------------------------------------------------------------------- over a stop


@pytest.fixture(scope="module")
def stopped(runs: Runs) -> Outcome:
    return runs.train((1, 2, 2), MUON | {"stop_at": K})


def copy_of(run: Outcome, folder: Path) -> Path:
    shutil.copytree(run.dump_dir, folder / "run")
    return folder / "run"


@bf16
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 3, 1), (2, 1, 2)], ids=name_of)
def test_a_stopped_run_goes_on_as_the_same_run_on_any_topology(
    runs: Runs,
    stopped: Outcome,
    dtype: dict[str, Any],
    alone: Outcome,
    tolerance: float,
    tmp_path: Path,
    sizes: Sizes,
) -> None:
    saved = stopped.tensors(K)
    matrices = {n for n in saved if n.startswith("model.layers.") and saved[n].ndim == 2}
    momenta = {n for n in saved if n.startswith("optim.momentum_buffer.")}
    assert momenta == {n.replace("model.", "optim.momentum_buffer.") for n in matrices}
    assert all(saved[name].any() for name in momenta)
    restored = runs.restore(sizes, copy_of(stopped, tmp_path / "looked at"), dtype)
    assert restored["tensors"] == digests(saved)

    dump_dir = copy_of(stopped, tmp_path)
    run = runs.train(sizes, dtype | on_its_own(sizes), dump_dir=dump_dir)
    assert run.column("batch_hash") == alone.column("batch_hash")
    assert apart(run, alone) < tolerance


@bf16
def test_a_resume_that_loses_the_momentum_is_seen_to_differ(
    runs: Runs,
    stopped: Outcome,
    dtype: dict[str, Any],
    alone: Outcome,
    tolerance: float,
    tmp_path: Path,
) -> None:
    lost = Twist(lose_moments=True)
    run = runs.train((1, 1, 1), dtype, dump_dir=copy_of(stopped, tmp_path), twist=lost)
    assert apart(run, alone) > 2 * tolerance


def test_a_stop_changes_no_bit_on_the_same_topology_with_deterministic(runs: Runs) -> None:
    same = MUON | {"deterministic": True}
    whole = runs.train((1, 1, 2), same | {"stop_at": END})
    first = runs.train((1, 1, 2), same | {"stop_at": K})
    second = runs.train((1, 1, 2), same | {"stop_at": END}, dump_dir=first.dump_dir)
    assert second.column("loss") == whole.column("loss")
    assert digests(second.tensors(END)) == digests(whole.tensors(END))


def test_the_optimizer_of_a_run_stays_what_it_is(
    runs: Runs, stopped: Outcome, tmp_path: Path
) -> None:
    dump_dir = copy_of(stopped, tmp_path)
    run = runs.train((1, 1, 1), {"stop_at": END}, dump_dir=dump_dir, refused=True)
    assert "optim.name: muon in the checkpoint, adamw now" in run.error


def test_a_setting_that_an_older_checkpoint_lacks_is_the_configs_and_said(runs: Runs) -> None:
    def without_rms(state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group.pop("rms", None)

    run = runs.train((1, 1, 2), MUON | {"stop_at": 2})
    run.rewrite_state(2, without_rms)
    now = MUON | {"stop_at": 3, "optim.muon.rms": 0.3}
    groups = runs.restore((1, 2, 1), run.dump_dir, now)["groups"]
    assert groups["layers.0.attention.wq.weight"]["rms"] == 0.3
    run = runs.train((1, 1, 1), now, dump_dir=run.dump_dir)
    line = "rms of 14 parameters is not in the checkpoint: 0.3, as the config has it now"
    assert run.log.count(line) == 2 and run.log.count("is not in the checkpoint") == 2
    # What is saved now has it.
    run = runs.train((1, 1, 1), now | {"stop_at": 4}, dump_dir=run.dump_dir)
    assert run.log.count("is not in the checkpoint") == 2
