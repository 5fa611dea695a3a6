"""What a fork returns in another shape or dtype is refused before the first update, by the name of
the function, with what was expected and what came."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from apps.main import app as main
from apps.main.train import Objective, train
from lingua.app import App, Built
from lingua.base.errors import UserError
from lingua.data.loader import MicroBatch
from lingua.data.rows import OpenData
from lingua.model import Losses
from tests.apps.runs import arguments
from tests.forks.synthetic import CopyRows, CopyTask


def with_data(change: Callable[[OpenData], OpenData]) -> App:
    class Task(CopyTask):
        def open(self, args: Any, tokenizer: Any) -> OpenData:
            return change(super().open(args, tokenizer))

    return replace(main, data=Task())


def with_rows(**functions: Any) -> App:
    def change(opened: OpenData) -> OpenData:
        opened.rows.__class__ = type("Other", (CopyRows,), functions)
        return opened

    return with_data(change)


def with_length(length: int) -> App:
    def change(opened: OpenData) -> OpenData:
        opened.rows.seq_len = length
        return opened

    return with_data(change)


def with_narrow_windows(opened: OpenData) -> OpenData:
    windows = opened.held_out["copy"]
    narrow = replace(windows, targets=windows.targets.astype(np.int32))
    return replace(opened, held_out={"copy": narrow})


def with_objective(**functions: Any) -> App:
    return replace(main, objective=type("Other", (Objective,), functions))


def with_sums(sums: Tensor, **more: Any) -> App:
    def loss(self: Objective, micro: MicroBatch) -> Losses:
        return Losses(sums.requires_grad_(), **more)

    return with_objective(loss=loss)


def build_tensor(args: Any) -> Built:
    built = main.build(args)
    built.module.register_forward_hook(lambda m, x, out: out[0] if len(x) > 1 else out)
    return built


def zeros(dtype: Any, width: int) -> Any:
    return lambda self, positions: np.zeros((len(positions), width), dtype)


ONE = torch.ones(1)
WRONG: dict[str, tuple[App, list[str]]] = {
    "short rows": (with_rows(rows=zeros(int, 16)), ["Other.rows", "int64 [2, 16]", "int [2, 17]"]),
    "rows": (with_rows(rows=zeros(float, 17)), ["Other.rows", "float64 [2, 17]", "int [2, 17]"]),
    "no rows": (with_rows(rows=lambda self, positions: None), ["Other.rows", "NoneType"]),
    "targets": (
        with_rows(is_target=zeros(int, 17)),
        ["Other.is_target", "int64 [2, 17]", "bool [2, 17]"],
    ),
    "length": (with_length(8), ["data.seq_len = 16", "must be 8, that of CopyRows"]),
    "windows": (
        with_data(with_narrow_windows),
        ["held-out targets of copy: int32 [8, 16]", "must be int64 [8, 16]"],
    ),
    "a count": (
        with_objective(count=lambda self, micro: (micro.targets >= 0).sum()),
        ["int64 []", "must be int64 or float64 [any] on the CPU"],
    ),
    "counts": (
        with_objective(count=lambda self, micro: (micro.targets >= 0).float().sum((1, 2))),
        ["float32 [1] on cpu", "must be int64 or float64 [any] on the CPU"],
    ),
    "fields": (
        with_objective(fields=lambda self, micro: {"a": torch.ones(3)}),
        ["Other.fields: a is torch.float32 [3]", "must be a tensor [7, ...]"],
    ),
    "a loss": (with_objective(loss=lambda self, micro: ONE), ["Other.loss: Tensor", "Losses"]),
    "sums": (with_sums(torch.ones(2)), ["Other.loss: sums", "float32 [2]", "must be float32 [1]"]),
    "dtype": (with_sums(ONE.double()), ["Other.loss: sums", "float64 [1]", "float32 [1]"]),
    "terms": (
        with_sums(ONE, per_row={"extra": torch.ones(7, 1)}),
        ["Other.loss: per_row, extra", "float32 [7, 1]", "must be float32 [7]"],
    ),
    "metrics": (with_sums(ONE, metrics={"odd": torch.ones(3)}), ['metric "odd"', "[3]", "[7]"]),
    "forward": (replace(main, build=build_tensor), ["model's forward", "Tensor", "(sums, counts)"]),
}


def refusal_here(name: str, overrides: dict[str, Any]) -> str:
    with pytest.raises(UserError) as refusal:
        train(WRONG[name][0], arguments(overrides))
    return str(refusal.value)


def test_what_an_app_returns_is_checked_before_the_first_update(runs, tmp_path):
    for name, (_, named) in WRONG.items():
        settings = {"dump_dir": tmp_path / name, "stop_at": 1, "data.workers": 0}
        config = runs.config((1, 1, 1), settings)
        [message] = runs.ranks.run(1, refusal_here, name, config)
        assert not [words for words in named if words not in message], (name, message)
        lines = tmp_path / name / "metrics.jsonl"
        assert not lines.exists() or '"loss"' not in lines.read_text()
