"""The loss of sources without documents to hold out, and of files that are for validation alone;
models that cannot be measured, or cannot generate."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from apps.main import app
from apps.main.config import TrainArgs
from apps.main.transformer import build
from lingua.app import Built
from lingua.base.errors import UserError
from lingua.data import IGNORE
from lingua.data.rows import HeldOut, OpenData
from lingua.data.sources import TextData
from lingua.tokenizer import Tokenizer
from tests.apps.plain import build_plain
from tests.apps.runs import Runs, differs
from tests.mistakes import refused


class FailsToMeasure:
    """A builder of the model whose second block cannot compute a loss that is not trained on."""

    def __call__(self, args: TrainArgs) -> Built:
        built = build(args)

        def fail(module: Any, inputs: Any) -> None:
            if not module.training:
                raise UserError("no measurement")

        built.module.layers[1].register_forward_pre_hook(fail)
        return built


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 1, 1), (1, 1, 2)])
def test_a_measurement_that_fails_saves_the_step_before_it_ends_the_run(runs: Runs, sizes) -> None:
    settings = {"validation.every": 3, "stop_at": 5, "checkpoint.dump.every": 0}
    run = runs.train(sizes, settings, build=FailsToMeasure(), refused=True)
    assert run.error == "no measurement" and run.column("step") == [1, 2, 3]
    assert [path.name for path in run.checkpoint(0).parent.glob("0*")] == ["0000000003"]
    resumed = runs.train((1, 1, 1), settings, dump_dir=run.dump_dir)
    assert differs(resumed, runs.train((1, 1, 1), settings)) == []


class NarrowWindows(TextData):
    def open(self, args: Any, tokenizer: Tokenizer) -> OpenData:
        opened = super().open(args, tokenizer)
        windows = opened.held_out["one"]
        narrow = replace(windows, targets=windows.targets.astype(np.int32))
        return replace(opened, held_out={"one": narrow})


def test_windows_that_cannot_be_measured_are_refused_before_the_first_step(runs: Runs) -> None:
    fork = replace(app, data=NarrowWindows())
    run = runs.train((1, 2, 1), {"validation.every": 3}, app=fork, refused=True)
    assert run.error.startswith("held-out targets of one: int32 [")
    assert run.error.endswith("]; must be int64 [windows, 16]") and run.lines == []
    tokens = np.zeros((3, 16), np.int64)
    windows = HeldOut(tokens, tokens, n_bytes=9, documents=tokens)
    windows.check("one", 16)
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
        refused(lambda: replace(windows, **change).check("one", 16), message)  # noqa: B023


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
