"""A plan against real ranks: the same collectives and bytes, and the memory of their tensors."""

from math import prod
from typing import Any

import pytest
import torch

from lingua.monitor.collectives import CollectiveCounter
from lingua.parallel.init import init_parameters
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.parallelize import parallelize_model
from lingua.parallel.tensors import local
from lingua.tools.plan.step import Step, build, degree_of, read_config
from lingua.tools.plan.trace import trace
from tests.apps.meshes import Sizes, mesh, on_meshes
from tests.apps.runs import SMALL
from tests.ranks import Ranks

N_MICRO = 3
MODEL = SMALL | {"data.batch_size": 1, "data.seq_len": 128, "model.dim": 64, "model.head_dim": 16}
MODEL |= {"model.ffn_dim_multiplier": 1.0, "model.multiple_of": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "last": {},
    "replica_last": {"distributed.grad_sync": "replica_last"},
    "every": {"distributed.grad_sync": "every"},
    "parameters stay gathered": {"distributed.reshard": "step"},
    "one micro-step": {"data.batch_size": N_MICRO},
    "tied": {"model.weight_tying": True},
    "muon": {"optim.name": "muon"},
    "adafactor": {"app": "tests.forks.adafactor"},
    "soap": {"app": "tests.forks.soap"},
    "full": {"distributed.activation_checkpointing": "full"},
    "selective": {"distributed.activation_checkpointing": "selective"},
    "bf16": {"distributed.model_dtype": "bf16"},
    "documents": {"data.document_mask": "ignore"},
    "sft": {"app": "apps.sft", "data.document_mask": "keep"},
    "mtp": {"app": "apps.mtp", "data.n_views": 4, "model.n_layers": 3},
}
# For time, (2, 2, 1) and (2, 1, 2) have only these: what is sent between replicas depends on them.
WITH_REPLICAS = (
    "last", "replica_last", "every", "parameters stay gathered", "one micro-step", "muon",
)  # fmt: skip
Counts = dict[tuple[str, str, bool], tuple[int, int]]


def command(sizes: Sizes, variant: dict[str, Any]) -> list[str]:
    rows = {"data.global_batch_size": N_MICRO * degree_of(sizes)}
    return [f"{key}={value}" for key, value in (MODEL | mesh(sizes) | rows | variant).items()]


def summary(totals: list[dict[str, Any]]) -> Counts:
    return {(t["kind"], t["axis"], t["backward"]): (t["count"], t["bytes"]) for t in totals}


def real(sizes: Sizes, variants: dict[str, dict[str, Any]]) -> dict[str, tuple[Counts, int]]:
    """What a step of each variant sends, and the bytes of tensors at its peak: those that it begins
    with, and what torch's profiler sees allocated."""
    found = {}
    device = torch.device("cpu")
    _, first = read_config(command(sizes, {}))
    ranks = start(device, detect_launch(), first.distributed)
    for name, variant in variants.items():
        app, args = read_config(command(sizes, variant))
        built = build(app, args, degree_of(sizes))
        model = parallelize_model(built.module, ranks, built.plan, args.distributed)
        init_parameters(model, args.seed, device)
        step = Step(app, args, built, ranks, model)
        n_micro, _ = args.micro_steps(degree_of(sizes))
        step.take(n_micro)
        left, peak = min(peak_of_step(step, n_micro) for _ in range(3))
        with CollectiveCounter(ranks) as counter:
            step.take(n_micro)
        states = [t for state in step.run.optimizer.state.values() for t in state.values()]
        held = sum(local(t).nbytes for t in [*model.parameters(), *states])
        found[name] = summary(counter.totals), held + peak - left
    return found


def peak_of_step(step: Step, n_micro: int) -> tuple[int, int]:
    """Bytes that are left at the end of a step and those at its peak, as torch's profiler sees
    them. It misses what gloo's threads free: that is left, in the quietest step the least."""
    with torch.profiler.profile(profile_memory=True) as profile:
        step.take(n_micro)
    live = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return live, peak


def planned(sizes: Sizes, variants: dict[str, dict[str, Any]]) -> dict[str, tuple[Counts, int]]:
    found = {}
    for name, variant in variants.items():
        app, args = read_config(command(sizes, variant))
        traced = trace(app, args, sizes, "cpu")
        found[name] = summary(traced.collectives), sum(traced.peak.values())
    return found


@pytest.mark.soak
@on_meshes((1, 1, 1), (1, 2, 2), (2, 2, 1), (2, 1, 2))
def test_a_plan_sends_and_keeps_what_real_ranks_do(ranks, sizes):
    names = WITH_REPLICAS if sizes in ((2, 2, 1), (2, 1, 2)) else VARIANTS
    check_plan(ranks, sizes, {name: VARIANTS[name] for name in names})


def test_a_plan_sends_and_keeps_on_one_mesh_what_real_ranks_do(ranks):
    check_plan(ranks, (1, 2, 1), {"last": VARIANTS["last"]})


@on_meshes((1, 2, 1, 2), (1, 2, 2, 2), soak=[(2, 2, 1, 2), (1, 4, 1, 4)])
def test_a_plan_of_divided_positions_sends_and_keeps_what_real_ranks_do(ranks, sizes):
    """Key-value heads are fewer than the ranks that share them, and are repeated."""
    grouped = {"model.n_kv_heads": sizes[2]}
    names = ("last", "full", "documents", "sft", "one micro-step", "mtp", "bf16")
    check_plan(ranks, sizes, {name: VARIANTS[name] | grouped for name in names})


def check_plan(ranks: Ranks, sizes: Sizes, variants: dict[str, dict[str, Any]]) -> None:
    measured = ranks.run(prod(sizes[:3]), real, sizes, variants)[0]
    [plan] = ranks.run(1, planned, sizes, variants)
    assert {k: found for k, (found, _) in plan.items()} == {k: v for k, (v, _) in measured.items()}
    peaks = {name: peak for name, (_, peak) in measured.items()}
    assert {name: peak for name, (_, peak) in plan.items()} == pytest.approx(peaks, rel=0.1)
