"""Parts of a model that are not trained stay as they are on every mesh, through every part of a run
that touches parameters.

The reference does not know of frozen parameters: it trains all, these at `optim.lr_scale` 0. No run
clips, since their gradients would be in the norm.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from apps.main import app as main
from lingua.app import Built
from tests.apps.meshes import Sizes, name_of, on_its_own
from tests.apps.runs import digests, relative
from tests.forks.frozen import FROZEN, app, within

ONE: Sizes = (1, 1, 1)
END = 4
SCALES = "{" + ", ".join(f"'{name}': 0.0" for name in FROZEN) + "}"
SETTINGS: dict[str, Any] = {"stop_at": END, "optim.clip": ".inf", "validation.every": END}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "muon": {"optim.name": "muon", "optim.muon.dtype": "fp32"},
    "bf16": {"distributed.model_dtype": "bf16", "model.dropout": 0.1},
    "compiled": {"distributed.compile": True, "distributed.activation_checkpointing": "selective"},
    "checkpointed": {"distributed.activation_checkpointing": "full"},
}


@pytest.fixture(scope="module")
def reference(runs):
    """The run of one process with the settings of a case; all parameters have gradients."""
    made: dict[str, Any] = {}

    def make(case: str) -> Any:
        if case not in made:
            settings = SETTINGS | CASES[case] | {"distributed.compile": False}
            made[case] = runs.train(ONE, settings | {"optim.lr_scale": SCALES})
        return made[case]

    return make


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        pytest.param(case, sizes, id=f"{case} on {name_of(sizes)}", marks=marks)
        for case, sizes, *marks in (
            ("plain", (1, 1, 2)),
            ("plain", (2, 2, 1)),
            ("muon", (1, 2, 2), pytest.mark.soak),
            ("bf16", ONE, pytest.mark.soak),
            ("bf16", (1, 1, 2), pytest.mark.soak),
            ("compiled", (1, 1, 2), pytest.mark.soak),
            ("checkpointed", (1, 1, 2), pytest.mark.soak),
        )
    ],
)
def test_what_is_frozen_stays_and_the_rest_trains_as_beside_a_rate_of_zero(
    runs, reference, case, sizes
):
    expected = reference(case)
    run = runs.train(sizes, SETTINGS | CASES[case] | on_its_own(sizes), app=app)
    tolerance = 5e-3 if case == "bf16" else 1e-5
    assert run.column("batch_hash") == expected.column("batch_hash")
    assert max(relative(run.column("loss"), expected.column("loss"))) < tolerance
    tensors, others = run.tensors(END), expected.tensors(END)
    model = [name for name in others if name.startswith("model.")]
    frozen = {name for name in model if within(name.removeprefix("model."), FROZEN)}
    moved = {n for n in model if digests({"": tensors[n]})[""] != run.weights[n[len("model.") :]]}
    assert moved == set(model) - frozen
    for name in model:
        apart = (tensors[name] - others[name]).norm() / others[name].norm()
        assert torch.equal(tensors[name], others[name]) if name in frozen else apart < tolerance
    # They are in no norm, and have no moments.
    both = zip(run.column("grad_norm"), expected.column("grad_norm"), strict=True)
    assert all(norm < whole for norm, whole in both)
    states = {name.split(".", 2)[2] for name in tensors if name.startswith("optim.")}
    assert states == {name.removeprefix("model.") for name in set(model) - frozen}
    n_trained = sum(tensors[name].numel() for name in set(model) - frozen)
    assert f"parameters ({n_trained:,} trained) on " in run.log


def freeze_all(args: Any) -> Built:
    built = main.build(args)
    built.module.requires_grad_(False)
    return built


def test_a_model_of_which_nothing_is_trained_is_refused(runs):
    run = runs.train(ONE, {}, app=replace(main, build=freeze_all), refused=True)
    assert run.error == "the model has no parameter to train: all are frozen"
