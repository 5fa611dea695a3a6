"""Other layouts: which there are, and the formula's arithmetic against numbers made by hand."""

import json
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from apps.main.plan import read_config
from lingua.errors import UserError
from lingua.plan.__main__ import make_plan
from lingua.plan.choice import extrapolated, meshes, scaled_trace
from lingua.plan.fact import PLAN, against_plan
from lingua.plan.trace import Part, Trace

pytestmark = pytest.mark.quick

DEBUG = "config=apps/main/configs/debug.yaml"  # 4 heads, 4 key-value heads, 16 rows a step


def part(flops: int, n: int, gathered: int) -> Part:
    gather = {"kind": "all_gather", "axis": "dp_shard", "backward": False, "count": n}
    of_tp = {"kind": "all_gather", "axis": "tp", "backward": False, "count": n, "bytes": 8}
    return Part(Counter({(flops, 2, 10): n}), [gather | {"bytes": gathered}, of_tp])


MEMORY = {"parameters": 100, "optimizer": 200, "activations": 7, "head": 5, "gradients": 410}
FIRST = Trace(
    (2, 8, 2), 1000, 2, 1, 6.0, MEMORY, MEMORY, 400,
    part(30, 2, 64), part(30, 3, 96), part(60, 1, 16),
)  # fmt: skip


def test_meshes_are_those_that_the_model_and_the_nodes_allow() -> None:
    app, args = read_config([DEBUG, "data.global_batch_size=16"])
    found = [sizes for _, several in meshes(app, args, 12, 6) for sizes in several]
    of_1 = [(1, 12, 1), (2, 6, 1), (3, 4, 1), (4, 3, 1), (6, 2, 1), (12, 1, 1)]
    assert found == [*of_1, (1, 6, 2), (2, 3, 2), (3, 2, 2), (6, 1, 2)]  # 3 and 6 split no heads
    few = [tp for tp, _ in meshes(app, args, 32, 4)]  # 32 ranks have no row each
    assert few == [2, 4]


def test_numbers_are_linear_in_the_layers() -> None:
    more = MEMORY | {"activations": 10}
    second = replace(FIRST, parameters=1300, kept=500, peak=more, micro=part(30, 5, 74))
    whole = extrapolated(FIRST, second, 10)
    assert (whole.parameters, whole.kept, whole.peak["activations"]) == (4000, 1400, 37)
    assert whole.micro.kernels == {(30, 2, 10): 2 + 10 * 3}
    assert [t["bytes"] for t in whole.micro.collectives] == [64 + 10 * 10, 8]
    assert whole.update == FIRST.update


def test_rows_scale_activations_and_arithmetic_and_shards_divide_what_is_sharded() -> None:
    _, args = read_config([DEBUG, "data.global_batch_size=128", "data.batch_size=4"])
    found = scaled_trace(FIRST, args, (1, 16, 2))  # 8 rows a rank: two micro-steps of 4
    assert (found.n_micro, found.rows, found.kept) == (2, 4, 400)
    assert found.peak == {
        "parameters": 50, "optimizer": 100, "activations": 28, "head": 5, "gradients": 410
    }  # fmt: skip
    assert found.micro.kernels == {(120, 2, 40): 2}
    assert found.update.kernels == {(30, 2, 5): 1}
    assert [t["bytes"] for t in found.micro.collectives] == [64, 32]
    every = deepcopy(args)
    every.distributed.grad_sync = "every"
    assert scaled_trace(FIRST, every, (1, 16, 2)).peak["gradients"] == 10 + 400 / 2
    replicas = scaled_trace(FIRST, args, (16, 1, 2)).peak
    assert replicas["parameters"] == replicas["gathered parameters"] == 800  # copies, in float32
    args.data.batch_size = 8
    assert scaled_trace(FIRST, args, (1, 16, 2)).peak["gradients"] == 10  # one micro-step


def test_a_choice_needs_a_device() -> None:
    with pytest.raises(UserError, match=r"gpu .*must be given, since choices = 2"):
        make_plan([DEBUG, "choices=2"])


def test_a_plan_in_the_dump_dir_is_compared_with_what_was_measured(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    assert against_plan(tmp_path, (1, 2, 1), cpu, 1.0) is None
    gather = {"kind": "all_gather", "axis": "dp_shard", "bytes": 2048}
    mesh = {"dp_replicate": 1, "dp_shard": 2, "tp": 1}
    plan = {"mesh": mesh, "allocated": 1, "times": {"step": 2.0}, "collectives": [gather]}
    (tmp_path / PLAN).write_text(json.dumps(plan))
    assert against_plan(tmp_path, (1, 2, 1), cpu, 1.5) == "planned: a step 2 s, was 1.5"
    (tmp_path / "profiling").mkdir()
    counted = {"collectives": [gather, gather]}
    (tmp_path / "profiling" / "collectives_step3.json").write_text(json.dumps(counted))
    line = against_plan(tmp_path, (1, 2, 1), cpu, 1.5)
    assert line == "planned: a step 2 s, was 1.5; sent 2.00 KiB, was 4.00 KiB"
    assert "another mesh" in str(against_plan(tmp_path, (2, 1, 1), cpu, 1.5))
    (tmp_path / PLAN).write_text("[]")
    assert "cannot be compared" in str(against_plan(tmp_path, (1, 2, 1), cpu, 1.5))
