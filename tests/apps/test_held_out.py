"""The loss of held-out text: what cannot be measured, and the checkpoint with the lowest one, which
is marked, and kept when asked. Also models that cannot generate."""

import logging
import math
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from apps.main.config import TrainArgs
from apps.main.transformer import build
from lingua.app import Built
from lingua.base.errors import UserError
from lingua.checkpoint.folder import find
from lingua.checkpoint.retention import marks
from lingua.data import IGNORE
from lingua.data.contract import check_held_out
from lingua.data.loader import MicroBatch
from lingua.data.rows import HeldOut
from lingua.model import Losses, as_losses
from lingua.monitor import held_out as measuring
from lingua.parallel.init import init_parameters
from lingua.tools.inspect.checkpoint import summary
from tests.apps.meshes import Sizes, on_mesh, on_meshes
from tests.apps.plain import Plain, build_plain
from tests.apps.runs import Outcome, Runs, differs, digests
from tests.mistakes import refused


class FailsToMeasure:
    """A builder of the model whose second block computes a loss that is not trained on once alone,
    before the first step."""

    def __call__(self, args: TrainArgs) -> Built:
        built, tried = build(args), []

        def fail(module: Any, inputs: Any) -> None:
            if not module.training and tried:
                raise UserError(f"no measurement of {len(inputs[0])} rows")
            tried.extend([True] * (not module.training))

        built.module.layers[1].register_forward_pre_hook(fail)
        return built


@on_meshes((1, 2, 1), (1, 1, 2), soak=[(2, 1, 1)])
def test_a_measurement_that_fails_saves_the_step_before_it_ends_the_run(runs: Runs, sizes) -> None:
    """On each mesh it has all 4 windows of a source at once."""
    settings = {"validation.every": 3, "stop_at": 5, "checkpoint.dump.every": 0}
    settings |= {"data.batch_size": 2}
    run = runs.train(sizes, settings, build=FailsToMeasure(), refused=True)
    assert run.error == "no measurement of 4 rows" and run.column("step") == [1, 2, 3]
    assert [path.name for path in run.checkpoint(0).parent.glob("0*")] == ["0000000003"]
    resumed = runs.train((1, 1, 1), settings, dump_dir=run.dump_dir)
    assert differs(resumed, runs.train((1, 1, 1), settings)) == []


WINDOWS = np.random.default_rng(0).integers(9, size=(2, 13, 8))


def measured(sizes: Sizes) -> list[tuple[float, set[int], list[str]]]:
    """(Nats per token, rows of a forward, lines of progress) by batch size, on this rank."""
    model, mesh = on_mesh(Plain(9), None, sizes)
    windows, logger = HeldOut(*WINDOWS, n_bytes=99), logging.getLogger(measuring.__name__)
    results: list[tuple[float, set[int], list[str]]] = []
    for batch_size in (2, 5, 50):
        rows, lines = set(), []

        def loss(micro: MicroBatch) -> Losses:
            rows.add(len(micro.tokens))  # noqa: B023
            return as_losses(model(micro.tokens, micro.targets), 1)

        with (
            patch.object(measuring, "MIN_POSITIONS", 8 * 3),
            patch.object(measuring, "PROGRESS_S", -1),
            patch.object(logger, "info", lines.append),
        ):
            found = measuring.validate(model, loss, windows, batch_size, 1, mesh)
        results.append((found["nats_per_token"], rows, lines))
    return results


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 1)])
def test_windows_are_measured_many_at_once_and_the_result_is_that_of_all_together(ranks, sizes):
    plain = Plain(9)
    init_parameters(plain, 1, torch.device("cpu"))
    tokens, targets = map(torch.from_numpy, WINDOWS)
    nats = F.cross_entropy(
        plain(tokens).double().flatten(0, 1), targets.flatten(), reduction="none"
    )
    n = math.prod(sizes)
    for rank in ranks.run(n, measured, sizes):
        for (found, rows, lines), expected_rows in zip(rank, (3, 5, 13), strict=True):
            assert rows == {expected_rows}
            assert lines[-1].startswith(f"held-out: {(len(lines) - 1) * n * expected_rows} of 13")
            assert found == pytest.approx(nats.mean().item(), rel=1e-6)
            assert found != pytest.approx(nats[8:].mean().item(), rel=1e-4)  # of a window less


def test_windows_that_cannot_be_measured_are_refused() -> None:
    """Before the first step of a run: test_shapes.py."""
    tokens = np.zeros((3, 16), np.int64)
    windows = HeldOut(tokens, tokens, n_bytes=9, documents=tokens)
    check_held_out("one", windows, 16)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tokens": tokens.astype(np.float32)}, "held-out tokens of one: float32 [3, 16]"),
        ({"tokens": tokens[0]}, "held-out tokens of one: int64 [16]"),
        ({"targets": tokens[:2]}, "held-out targets of one: int64 [2, 16]"),
        ({"targets": None}, "held-out targets of one: "),
        ({"documents": tokens[:, :8]}, "held-out documents of one: int64 [3, 8]"),
        ({"targets": tokens + IGNORE}, "at least one target"),
        ({"n_bytes": 0}, "one byte"),
    ]
    for change, message in wrong:
        refused(partial(check_held_out, "one", replace(windows, **change), 16), message)


def build_without_logits(args: TrainArgs) -> Built:
    built = build_plain(args)
    forward = built.module.forward

    def with_targets_only(tokens: Any, targets: Any = None) -> Any:
        if targets is None:
            raise NotImplementedError("this model has no logits")
        return forward(tokens, targets)

    built.module.forward = with_targets_only
    return built


def test_a_model_that_cannot_generate_is_reported_before_step_1(runs):
    settings = {"steps": 2, "stop_at": 2, "validation.every": 2}
    run = runs.train((1, 2, 1), settings, build=build_without_logits)
    lines = run.log.splitlines()
    warning = "warning: the model of apps.main cannot generate"
    [at] = [i for i, line in enumerate(lines) if warning in line]
    first = next(i for i, line in enumerate(lines) if "step 1 loss" in line)
    assert at < first and "this model has no logits" in lines[at]
    assert run.column("step") == [1, 2] and run.checkpoint(2).is_dir()
    assert "the samples could not be written" in run.log and "done: 2 steps" in run.log

    able = runs.train((1, 2, 1), settings | {"samples.every": 1}, build=build_plain)
    assert "cannot generate" not in able.log
    assert {line["step"] for line in able.samples} == {1, 2}
    assert able.column("loss") == run.column("loss")


# The rate is far too high after its warm-up: the loss falls and then rises.
RISING = {"optim.lr": 2, "optim.warmup": 8, "optim.clip": 100, "steps": 8, "stop_at": "null"}
SAVED = RISING | {"checkpoint.dump.every": 1, "checkpoint.dump.keep": 2}
KEPT = {"checkpoint.keep_best": True}
BACKGROUND = {"checkpoint.async_save": True}


def held_out(run: Outcome) -> dict[int, float]:
    """Nats per byte over the text of both sources, by step."""
    sums: dict[int, list[float]] = {}
    for line in run.held_out:
        total = sums.setdefault(line["step"], [0.0, 0.0])
        total[0] += line["nats_per_byte"] * line["bytes"]
        total[1] += line["bytes"]
    return {step: nats / n_bytes for step, (nats, n_bytes) in sums.items()}


@pytest.mark.parametrize(
    ("sizes", "settings", "measured", "saved"),
    [
        # In two starts: the second one knows the best of the first, step 3.
        ((1, 2, 1), KEPT | BACKGROUND, range(1, 9), [3, 7, 8]),
        pytest.param((1, 1, 2), KEPT, range(1, 9), [3, 7, 8], marks=pytest.mark.soak),
        # Without `keep_best` the best is that of those that are left.
        ((1, 1, 1), {"validation.every": 1}, range(1, 9), [7, 8]),
        # A step that was not measured is never the best.
        ((1, 1, 1), {"validation.every": 5, "checkpoint.dump.keep": -1}, [5, 8], range(1, 9)),
    ],
)
def test_the_best_checkpoint_is_marked_and_kept_when_asked(runs, sizes, settings, measured, saved):
    begun = runs.train(sizes, SAVED | settings | {"stop_at": 5})
    run = runs.train((1, 1, 1), SAVED | settings, dump_dir=begun.dump_dir)
    checkpoints = sorted(find(run.checkpoint(0).parent), key=lambda checkpoint: checkpoint.step)
    losses = held_out(run)
    assert sorted(losses) == [*measured] and [c.step for c in checkpoints] == [*saved]
    best = min(losses.keys() & {*saved}, key=losses.get)
    assert [c.step for c in checkpoints if "best" in marks(c.path)] == [best]
    assert len(list(run.checkpoint(0).parent.glob("*.best"))) == 1
    for step in saved:
        stored = run.state(step)["held_out"]
        assert stored == (pytest.approx(losses[step], rel=1e-12) if step in losses else None)
    if settings.keys() >= KEPT.keys():
        assert best == min(losses, key=losses.get)
        shown = summary(checkpoints[0])
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
