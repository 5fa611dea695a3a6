"""A model that cannot generate trains all the same, and this is known before the first step."""

from typing import Any

from apps.main.config import TrainArgs
from lingua.app import Built
from tests.apps.plain import build_plain


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
