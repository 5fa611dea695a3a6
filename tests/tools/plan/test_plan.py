"""The command's mistakes, and the arithmetic of its times against numbers worked out by hand."""

import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lingua.tools.plan.device import Device, step_times
from lingua.tools.plan.make import make_plan
from lingua.tools.plan.report import Plan
from lingua.tools.plan.trace import StepPart, Trace

pytestmark = pytest.mark.quick

GATHER = {"kind": "all_gather", "axis": "dp_shard", "backward": False, "count": 0}


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 300}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}


@pytest.mark.parametrize("app", ["apps.main", "apps.sft", "apps.dpo"])
def test_of_a_folder_that_a_run_starts_from_the_config_is_enough(tmp_path, app):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": "llama"}))
    words = [f"app={app}", f"checkpoint.init_from={tmp_path}", "data.sources={a: 1}", "device=cpu"]
    if app != "apps.main":
        words += ["data.chat={}", "data.document_mask=ignore"]
    plan, _ = make_plan([*words, "data.seq_len=64", "data.batch_size=4", "ngpu=2"])
    block = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 2 * 32
    assert plan.as_json()["parameters"] == 2 * block + 2 * 300 * 32 + 32


@pytest.mark.parametrize(
    ("kind", "more", "numbers"),
    [
        ("NAdam", {}, 2),
        ("NAdam", {"capturable": True}, 2),
        ("NAdam", {"foreach": True}, 2),
        ("AdamW", {"fused": True}, 1),
    ],
)
def test_a_fork_with_an_optimizer_of_torchs_is_planned(monkeypatch, kind, more, numbers):
    """Both keep two numbers of a parameter, and some of a tensor, which their step may read."""
    make = getattr(torch.optim, kind)
    monkeypatch.setattr(torch.optim, "NAdam", lambda *args, **_: make(*args, **more))
    words = ["app=tests.forks.optimizer", "model.vocab_size=300", "data.sources={one: 1}"]
    plan, _ = make_plan([*words, "model.n_layers=1", "model.n_heads=4", "ngpu=2", "device=cpu"])
    found = plan.as_json()
    assert found["memory"]["optimizer"] == 2 * 4 * found["parameters"] / 2 + numbers * 4 * 12


def device(**values: Any) -> Device:
    """One that takes a second for 1e12 FLOPs, for 1e9 bytes of memory, and of a link."""
    peaks = {"memory_gb_per_s": 1, "bf16_tflops": 1, "tf32_tflops": 1, "fp32_tflops": 1}
    links = {"node_gb_per_s": 1, "network_gb_per_s": 0.25, "node_size": 4, "latency_us": 0}
    shares = {"matmul_share": 1, "memory_share": 1, "link_share": 1}
    return Device(**{"memory_gib": 10} | peaks | links | shares | values)


def traced(sizes: tuple[int, int, int], micro: StepPart, last: StepPart, n_micro: int) -> Trace:
    memory = {"parameters": 2**30, "optimizer": 2**31}
    update = StepPart(Counter({(0, 4, 1, False): 5 * 10**8}), [])
    return Trace(sizes, 10, n_micro, 1, 1.0, memory, memory, 0, micro, last, update)


def test_a_kernel_takes_the_longer_of_arithmetic_and_memory_and_sending_hides_behind_it():
    two_s = Counter({(10**12, 2, 10, False): 1, (10**6, 2, 10**9, False): 1})
    gather = {**GATHER, "bytes": 4 * 10**9}  # 3 s of a ring of 4
    trace = traced((1, 4, 1), StepPart(two_s, []), StepPart(two_s, [gather]), 3)
    times = step_times(trace, device(), False, compiled=False)
    assert (times.micro, times.last, times.update) == pytest.approx((2, 3, 0.5))
    assert (times.compute, times.hidden, times.exposed) == pytest.approx((6.5, 2, 1))
    assert times.step == pytest.approx(7.5)


@pytest.mark.parametrize(
    ("sizes", "kind", "axis", "seconds"),
    [
        ((1, 4, 1), "all_gather", "dp_shard", 3),  # within a node
        ((1, 4, 1), "all_reduce", "dp_shard", 6),
        ((1, 1, 4), "all_gather", "tp", 3),
        ((2, 4, 1), "all_reduce", "dp_replicate", 4 / 0.25),  # a ring of its own for each device
        ((1, 8, 1), "all_gather", "dp_shard", 3.5),  # four devices of a node in one
        ((1, 2, 4), "all_gather", "dp_shard", 2 / 0.25),
    ],
)
def test_the_time_of_a_collective_is_that_of_a_ring_on_its_slowest_link(sizes, kind, axis, seconds):
    total = {"kind": kind, "axis": axis, "backward": True, "count": 1, "bytes": 4 * 10**9}
    nothing = StepPart(Counter(), [])
    times = step_times(
        traced(sizes, nothing, StepPart(Counter(), [total]), 1), device(), False, False
    )
    assert times.exposed == pytest.approx(seconds)


def test_the_seconds_between_saves_are_youngs():
    args = SimpleNamespace(checkpoint=SimpleNamespace(async_save=False))
    options = SimpleNamespace(storage_gb_per_s=3 * 2**30 / 1e9, failure_hours=1000.0)
    nothing = StepPart(Counter(), [])
    plan = Plan(args, traced((5, 2, 1), nothing, nothing, 1), device(), options, False)
    save = plan.save()
    assert save["held_s"] == pytest.approx(2)  # of two shards; replicas have the same
    assert save["every_s"] == pytest.approx((2 * 2 * 360_000) ** 0.5)
    assert plan.needs_gib == pytest.approx(3 * 1.12 + 2)
    assert plan.fits
