"""The checkpoint with the lowest held-out loss: marked, and kept when asked."""

import pytest

from lingua.checkpoint.folder import find
from lingua.checkpoint.retention import marks
from lingua.tools.inspect.checkpoint import summary
from tests.apps.plain import build_plain
from tests.apps.runs import Outcome, build, digests, relative

# The rate is far too high after its warm-up: the loss falls and then rises.
RISING = {"optim.lr": 2, "optim.warmup": 8, "optim.clip": 100, "steps": 8, "stop_at": "null"}
SAVED = RISING | {"checkpoint.dump.every": 1, "checkpoint.dump.keep": 2}
BEST = SAVED | {"checkpoint.keep_best": True}


def held_out(run: Outcome) -> dict[int, float]:
    """Nats per byte over the text of both sources, by step."""
    sums: dict[int, list[float]] = {}
    for line in run.held_out:
        total = sums.setdefault(line["step"], [0.0, 0.0])
        total[0] += line["nats_per_byte"] * line["bytes"]
        total[1] += line["bytes"]
    return {step: nats / n_bytes for step, (nats, n_bytes) in sums.items()}


def saved(run: Outcome) -> list[int]:
    return sorted(c.step for c in find(run.checkpoint(0).parent))


def marked(run: Outcome) -> list[int]:
    return [step for step in saved(run) if "best" in marks(run.checkpoint(step))]


def lowest(losses: dict[int, float]) -> int:
    return min(losses, key=losses.get)


@pytest.mark.parametrize(
    ("sizes", "more"),
    [
        ((1, 2, 1), {"checkpoint.async_save": True}),
        pytest.param((1, 1, 2), {}, marks=pytest.mark.soak),
    ],
)
def test_the_best_is_marked_and_kept_and_a_resumed_run_knows_it(runs, sizes, more):
    begun = runs.train(sizes, BEST | more | {"stop_at": 5})
    losses = held_out(begun)
    assert sorted(losses) == [1, 2, 3, 4, 5]
    assert marked(begun) == [lowest(losses)]
    run = runs.train((1, 1, 1), BEST, dump_dir=begun.dump_dir)
    losses = held_out(run)
    best = lowest(losses)
    assert 1 < best < 5  # of the first start, not of its last checkpoints
    assert saved(run) == [best, 7, 8] and marked(run) == [best]
    assert max(relative([run.state(best)["held_out"]], [losses[best]])) < 1e-12
    shown = summary(find(run.checkpoint(0).parent)[-1])
    assert (shown["held_out"], shown["marks"]) == (pytest.approx(losses[best]), ["best"])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "without a plan"])
def test_measuring_before_a_save_changes_nothing_that_is_saved(runs, tied):
    """A forward without gradients leaves FSDP's root whole, in the dtype of the compute."""
    settings = {"stop_at": 2, "model.weight_tying": tied}
    settings["distributed.model_dtype"] = "bf16" if tied else "fp32"
    saved = []
    for measured in (True, False):
        settings["checkpoint.keep_best"] = measured
        run = runs.train((1, 2, 1), settings, build=build if tied else build_plain)
        assert bool(run.held_out) == measured
        saved.append(digests(run.tensors(2)))
    assert saved[0] == saved[1]
    assert {name.split(".")[1] for name in saved[0] if name[:5] == "optim"} == {
        "exp_avg", "exp_avg_sq", "step",
    }  # fmt: skip


def test_a_best_that_is_not_to_be_kept_is_the_best_of_what_is_left(runs):
    run = runs.train((1, 1, 1), SAVED | {"validation.every": 1})
    losses = held_out(run)
    assert saved(run) == [7, 8] and lowest(losses) < 7
    assert marked(run) == [lowest({step: losses[step] for step in (7, 8)})]
    assert len(list(run.checkpoint(0).parent.glob("*.best"))) == 1


def test_steps_that_were_not_measured_are_never_the_best(runs):
    run = runs.train((1, 1, 1), SAVED | {"checkpoint.dump.keep": -1, "validation.every": 5})
    assert sorted(held_out(run)) == [5, 8]
    assert [run.state(step)["held_out"] is None for step in (4, 5, 7, 8)] == [1, 0, 1, 0]
    assert marked(run) == [lowest(held_out(run))]
