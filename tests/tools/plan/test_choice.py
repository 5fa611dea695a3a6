"""Other layouts: which there are, and how near the formula is to the trace."""

import json
from copy import deepcopy

import pytest
import torch

from apps.main.plan import read_config
from lingua.base.dump_dir import PLAN
from lingua.tools.plan.choice import Sizes, meshes, scaled_trace, small_trace
from lingua.tools.plan.device import find_device, step_times
from lingua.tools.plan.fact import against_plan
from lingua.tools.plan.trace import Trace, trace

pytestmark = pytest.mark.quick

DEBUG = "config=apps/main/configs/debug.yaml"  # 4 heads, 4 key-value heads, 16 rows a step


# Weights with rows that 64 shards divide.
MODEL = [DEBUG, "device=cuda", "distributed.model_dtype=bf16", "data.seq_len=512"]
MODEL += ["model.n_layers=5", "model.multiple_of=64", "model.vocab_size=256"]
MODEL += ["data.global_batch_size=1024"]
VARIANTS: dict[str, list[str]] = {
    "none": [],
    "selective": ["distributed.activation_checkpointing=selective"],
    "full": ["distributed.activation_checkpointing=full"],
    "replica_last": ["distributed.grad_sync=replica_last"],
    "every": ["distributed.grad_sync=every"],
    "muon": ["optim.name=muon"],
    "tied": ["model.weight_tying=true"],
    "documents": ["data.document_mask=ignore"],
    "fp32": ["distributed.model_dtype=fp32"],
    "mtp": ["app=apps.mtp", "data.n_views=3"],
}


def check_formula(variant: str, layouts: list[tuple[Sizes, int]]) -> None:
    """Each layout is a mesh, and the rows of a micro-batch."""
    app, args = read_config([*MODEL, *VARIANTS[variant]])
    found = {tp: small_trace(app, args, tp, "cuda") for tp in {sizes[2] for sizes, _ in layouts}}
    for sizes, rows in layouts:
        args.data.batch_size = rows
        formula = scaled_trace(found[sizes[2]], args, sizes)
        whole = trace(app, deepcopy(args), sizes, "cuda")
        assert formula.allocated == pytest.approx(whole.allocated, rel=0.05), (sizes, rows)
        assert formula.parameters == whole.parameters
        times = [step_times(t, find_device("h100"), False, False) for t in (formula, whole)]
        # The host is what this small model waits for, and FSDP launches more where it shards not.
        share = 0.15 if variant == "replica_last" or sizes[1] == 1 else 0.1
        assert times[0].step == pytest.approx(times[1].step, rel=share), (sizes, rows)
        bytes_sent, expected = sent(formula), sent(whole)
        if variant == "muon":  # tensor parallelism pads what it gathers for it
            expected = {key: pytest.approx(n, rel=0.03) for key, n in expected.items()}
        assert bytes_sent == expected, (sizes, rows)


def sent(found: Trace) -> dict[tuple[str, str, bool], tuple[int, int]]:
    """Counts and bytes, but for the few numbers that tensor parallelism sums."""
    totals = {(t["kind"], t["axis"], t["backward"]): t for t in found.collectives}
    totals = {key: t for key, t in totals.items() if key[:2] != ("all_reduce", "tp")}
    return {key: (t["count"], t["bytes"]) for key, t in totals.items()}


def test_meshes_are_those_that_the_model_and_the_nodes_allow():
    app, args = read_config([DEBUG, "data.global_batch_size=16"])
    found = [sizes for _, several in meshes(app, args, 12, 6) for sizes in several]
    of_1 = [(1, 12, 1), (2, 6, 1), (3, 4, 1), (4, 3, 1), (6, 2, 1), (12, 1, 1)]
    assert found == [*of_1, (1, 6, 2), (2, 3, 2), (3, 2, 2), (6, 1, 2)]  # 3 and 6 split no heads
    few = [tp for tp, _ in meshes(app, args, 32, 4)]  # 32 ranks have no row each
    assert few == [2, 4]


def test_the_formula_is_near_the_trace():
    check_formula("none", [((1, 16, 1), 2), ((2, 1, 1), 8)])


@pytest.mark.soak
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_formula_is_near_the_trace_of_many_layouts(variant):
    meshes = [(1, 2, 1), (2, 4, 1), (1, 64, 1), (8, 1, 1), (1, 8, 2), (4, 1, 2), (2, 2, 4)]
    check_formula(variant, [(sizes, rows) for sizes in meshes for rows in (1, 8)])


def test_a_plan_in_the_dump_dir_is_compared_with_what_was_measured(tmp_path):
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
