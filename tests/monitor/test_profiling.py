"""Collectives are counted as arithmetic says, and the profiler writes what it promises.

Four ranks run each case once; the tests check the results that they return.
"""

import gzip
import json
import logging
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apps.main.config import ModelArgs
from apps.main.transformer import build_transformer, parallel_plan
from lingua.monitor.args import ProfilingArgs
from lingua.monitor.collectives import CollectiveCounter
from lingua.monitor.profiling import open_profiler
from lingua.parallel.args import DistributedArgs
from lingua.parallel.gradients import set_gradient_sync
from lingua.parallel.launch import detect_launch, start
from tests.apps.meshes import on_mesh
from tests.ranks import Ranks

CPU = torch.device("cpu")
WORLD = 4
ARGS = ModelArgs(dim=16, n_layers=1, n_heads=4, vocab_size=32, multiple_of=16)
ROWS, SEQ = 2, 8  # a micro-batch of one rank
MICRO = 2  # micro-steps, of which the last reduces gradients
FLOAT = 4  # bytes
EMBEDDING = ARGS.vocab_size * ARGS.dim  # parameters
HEAD = EMBEDDING + ARGS.dim  # with the norm
BLOCKS = ARGS.n_layers * (4 * ARGS.dim**2 + 3 * ARGS.dim * ARGS.hidden_dim() + 2 * ARGS.dim)
WHOLE = BLOCKS + EMBEDDING + HEAD
UNITS = ARGS.n_layers + 2
# case: mesh sizes, settings
CASES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "replicas in bf16": ((2, 2, 1), {"model_dtype": "bf16"}),
    "gathered once": ((1, 4, 1), {"reshard": "step"}),
    "tp": ((1, 2, 2), {}),
    "tp checkpoint": ((1, 2, 2), {"activation_checkpointing": "full"}),
    "tp compile": ((1, 2, 2), {"compile": True}),
}
# Their names in a torch.profiler trace: an independent answer.
PROFILER_NAMES = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
}


def run_step(model: nn.Module, n_micro: int = MICRO) -> None:
    for i in range(n_micro):
        set_gradient_sync(model, "last", i == n_micro - 1)
        tokens = torch.randint(0, ARGS.vocab_size, (ROWS, SEQ))
        model(tokens, tokens[None]).sums.sum().backward()


def measure(case: str) -> dict:
    sizes, settings = CASES[case]
    model, mesh = on_mesh(build_transformer(ARGS), parallel_plan(ARGS, SEQ), sizes, **settings)
    if "compile" in settings:
        run_step(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run_step(model)
    names = (event.name for event in profiler.events() if event.name.startswith("c10d::"))
    with CollectiveCounter(mesh) as counter:
        run_step(model)
    kinds = Counter(PROFILER_NAMES.get(name, name) for name in names)
    return {"counted": counter.totals, "profiler": kinds}


def measure_axes() -> dict:
    mesh = start(CPU, detect_launch(), DistributedArgs(2, 2, 1))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    diagonal = dist.new_group([0, 3])
    dist.barrier()
    with CollectiveCounter(mesh) as counter:
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(5, dtype=torch.int64), src=0)
        dist.barrier()
        if dist.get_rank() in (0, 1):
            dist.all_reduce(torch.ones(2), group=pairs[0])
        if dist.get_rank() in (0, 3):
            dist.all_reduce(torch.ones(1), group=diagonal)
        received = torch.empty(8)
        dist.all_to_all_single(received, torch.ones(8), group=mesh.get_group("dp_replicate"))
    return {"counted": counter.totals}


def measure_profiler(folder: Path) -> dict[str, list[str]]:
    """What is logged by a profiler of each kind."""
    model, mesh = on_mesh(build_transformer(ARGS), parallel_plan(ARGS, SEQ), (2, 2, 1))
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logger = logging.getLogger("lingua.monitor.profiler")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    results = {}
    for name, n_steps, args in (
        ("whole", 7, ProfilingArgs(run=True, profile_warmup=2, profile_steps=2)),
        ("short", 2, ProfilingArgs(run=True, profile_warmup=5)),
        ("partial", 2, ProfilingArgs(run=True, profile_warmup=0, profile_steps=3)),
        ("off", 2, ProfilingArgs()),
    ):
        profiler = open_profiler(args, folder / name, mesh)
        for step in range(10, 10 + n_steps):
            with profiler.step(step + 1):
                run_step(model, 1)
        profiler.close()
        dist.barrier()
        results[name] = list(logged)
        logged.clear()
    logger.removeHandler(handler)
    return results


def measure_here(case: str, folder: Path) -> dict[str, Any]:
    if case == "axes":
        return measure_axes()
    return measure_profiler(folder) if case == "profiler" else measure(case)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiled")


@pytest.fixture(scope="module")
def results(ranks: Ranks, folder: Path) -> Callable[[str], list[dict[str, Any]]]:
    """What the ranks return for a case."""
    return cache(lambda case: ranks.run(WORLD, measure_here, case, folder))


def summary(result: dict) -> dict[tuple, tuple[int, int]]:
    """{(kind, axis, in backward): (count, bytes)}"""
    totals = result["counted"]
    assert totals == sorted(totals, key=lambda total: -total["bytes"])
    return {(t["kind"], t["axis"], t["backward"]): (t["count"], t["bytes"]) for t in totals}


SOAK = ("tp", "tp compile")  # of which the checkpointed one has all, and that takes a minute
EACH = [pytest.param(c, marks=[pytest.mark.soak] * (c in SOAK)) for c in CASES]


@pytest.mark.parametrize("case", EACH)
def test_collectives_are_those_of_the_dispatcher_and_bytes_those_of_the_dtype_sent(results, case):
    """Every unit is gathered for the forward; for the backward all but the head, which stays.
    Gradients are reduced once."""
    itemsize = FLOAT // 2
    expected = {
        ("all_gather", "dp_shard", False): (UNITS * MICRO, MICRO * WHOLE * itemsize),
        ("all_gather", "dp_shard", True): ((UNITS - 1) * MICRO, MICRO * (WHOLE - HEAD) * itemsize),
        ("reduce_scatter", "dp_shard", True): (UNITS, WHOLE * FLOAT),
    }
    if case == "replicas in bf16":  # they reduce their shards
        expected["all_reduce", "dp_replicate", True] = (UNITS, WHOLE * FLOAT // 2)
    if case == "gathered once":
        expected["all_gather", "dp_shard", False] = (UNITS, WHOLE * FLOAT)
        del expected["all_gather", "dp_shard", True]
    for result in results(case):
        kinds: Counter[str] = Counter()
        for (kind, *_), (count, _) in summary(result).items():
            kinds[kind] += count
        assert kinds == result["profiler"]
        assert case.startswith("tp") or summary(result) == expected


def test_groups_are_named_by_the_axes_they_join(results):
    everyone, first_pair, diagonal = {0, 1, 2, 3}, {0, 1}, {0, 3}
    sent = [
        (everyone, ("all_reduce", "world"), 3 * FLOAT),
        (everyone, ("broadcast", "world"), 5 * 8),
        (everyone, ("barrier", "world"), 1),
        (first_pair, ("all_reduce", "dp_shard"), 2 * FLOAT),
        (diagonal, ("all_reduce", "other (2 ranks)"), 1 * FLOAT),
        (everyone, ("all_to_all", "dp_replicate"), 8 * FLOAT),
    ]
    for rank, result in enumerate(results("axes")):
        expected = {(*key, False): (1, n_bytes) for ranks, key, n_bytes in sent if rank in ranks}
        assert summary(result) == expected


def files_of(folder: Path) -> list[str]:
    """With the time in a trace's name left out."""
    names = (path.name.split(".") for path in (folder / "profiling").iterdir())
    return sorted(".".join(word for word in name if not word.isdecimal()) for name in names)


TRACES = [f"rank{rank}.pt.trace.json.gz" for rank in range(WORLD)]


def test_every_rank_traces_the_chosen_steps(results, folder):
    text, where = results("profiler")[0]["whole"]
    # Steps 11 to 17 ran: two to warm up, the second of them counted, then two traced.
    assert files_of(folder / "whole") == ["collectives_step12.json", *TRACES]
    for path in (folder / "whole/profiling").glob("rank*"):
        with gzip.open(path, "rt") as file:
            names = Counter(event.get("name") for event in json.load(file)["traceEvents"])
        steps = {name for name in names if name and name.startswith("step ")}
        assert steps == {"step 13", "step 14"}
        assert names["c10d::_reduce_scatter_base_"] == 2 * UNITS
    assert text.startswith("collectives of step 12 on rank 0 (dp_replicate 2, dp_shard 2, tp 1):\n")
    assert max(map(len, text.splitlines())) <= 71  # 80 columns with the time
    assert str(folder / "whole/profiling") in where
    saved = json.loads((folder / "whole/profiling/collectives_step12.json").read_text())
    mesh = {"dp_replicate": 2, "dp_shard": 2, "tp": 1}
    assert (saved["step"], saved["mesh"]) == (12, mesh)
    [reduced] = [row for row in saved["collectives"] if row["kind"] == "all_reduce"]
    counted = {"backward": True, "count": UNITS, "bytes": WHOLE * FLOAT // 2}
    assert reduced == {"kind": "all_reduce", "axis": "dp_replicate"} | counted


def test_a_run_too_short_to_be_traced_warns(results, folder):
    [logged, *_] = results("profiler")
    [warning] = logged["short"]
    assert "2 steps ran" in warning and "warmup" in warning
    assert files_of(folder / "short") == []
    assert logged["partial"][-1] == warning
    assert files_of(folder / "partial") == ["collectives_step11.json", *TRACES]
    assert logged["off"] == [] and not (folder / "off").exists()
