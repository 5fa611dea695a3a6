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
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from lingua.monitor.collectives import CollectiveCounter
from lingua.monitor.profiling import ProfilingArgs, open_profiler
from tests.ranks import Ranks

WORLD = 4
VOCAB, DIM, HIDDEN, LAYERS = 32, 16, 64, 2
ROWS, SEQ = 2, 8  # a micro-batch of one rank
MICRO = 3  # micro-steps, of which the last reduces gradients
FLOAT = 4  # bytes
BLOCK = DIM + 2 * DIM * HIDDEN  # parameters: norm, w1, w2
ROOT = 2 * VOCAB * DIM + DIM  # embedding, head, norm
AXES = ("dp_replicate", "dp_shard", "tp")
# case: mesh sizes, option
CASES = {
    "fsdp": ((1, 4, 1), ""),
    "bf16": ((1, 4, 1), "bf16"),
    "hsdp": ((2, 2, 1), ""),
    "tp": ((1, 2, 2), ""),
    "tp checkpoint": ((1, 2, 2), "checkpoint"),
    "tp compile": ((1, 2, 2), "compile"),
}
# Their names in a torch.profiler trace: an independent answer.
PROFILER_NAMES = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
}


# ------------------------------------------------------------------------- in each of the processes


class Block(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.norm = nn.RMSNorm(DIM)
        self.w1 = nn.Linear(DIM, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        def body(x):
            return x + self.w2(F.silu(self.w1(self.norm(x))))

        return checkpoint(body, x, use_reentrant=False) if self.checkpointed else body(x)


class Model(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block(checkpointed) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        h = self.embeddings(tokens).clone()
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


def split_over_tp(model: Model, mesh: DeviceMesh) -> None:
    plan = {
        "embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    for i in range(LAYERS):
        plan[f"layers.{i}.norm"] = SequenceParallel()
        plan[f"layers.{i}.w1"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"layers.{i}.w2"] = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(model, mesh, plan)


def build(mesh: DeviceMesh, option: str) -> Model:
    model = Model(option == "checkpoint")
    if mesh["tp"].size() > 1:
        split_over_tp(model, mesh["tp"])
    if option == "compile":
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    shards = mesh["dp_shard"]
    if mesh["dp_replicate"].size() > 1:
        shards = mesh["dp_replicate", "dp_shard"]
    policy = MixedPrecisionPolicy()
    if option == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, mesh=shards, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def run_step(model: Model, n_micro: int = MICRO) -> None:
    for i in range(n_micro):
        model.set_requires_gradient_sync(i == n_micro - 1)
        tokens = torch.randint(0, VOCAB, (ROWS, SEQ))
        logits = model(tokens).flatten(0, 1)
        with loss_parallel():
            F.cross_entropy(logits.float(), tokens.flatten(), reduction="sum").backward()


def measure(case: str) -> dict:
    shape, option = CASES[case]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES)
    model = build(mesh, option)
    run_step(model)  # the one that compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run_step(model)
    names = (event.name for event in profiler.events() if event.name.startswith("c10d::"))
    with CollectiveCounter(mesh) as counter:
        run_step(model)
    kinds = Counter(PROFILER_NAMES.get(name, name) for name in names)
    return {"counted": counter.totals, "profiler": kinds}


def measure_axes() -> dict:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=AXES)
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
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=AXES)
    model = build(mesh, "")
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
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    if case == "axes":
        return measure_axes()
    return measure_profiler(folder) if case == "profiler" else measure(case)


# -------------------------------------------------------------------------------------- in the test


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiled")


@pytest.fixture(scope="module")
def results(ranks: Ranks, folder: Path) -> Callable[[str], list[dict[str, Any]]]:
    """What the ranks return for a case."""
    return cache(lambda case: ranks.run(WORLD, measure_here, case, folder))


compiled = pytest.mark.soak  # compiling in four ranks takes half a minute
EACH = [pytest.param(c, marks=compiled if c == "tp compile" else ()) for c in CASES]


def summary(result: dict) -> dict[tuple, tuple[int, int]]:
    """{(kind, axis, in backward): (count, bytes)}"""
    totals = result["counted"]
    assert totals == sorted(totals, key=lambda total: -total["bytes"])
    return {(t["kind"], t["axis"], t["backward"]): (t["count"], t["bytes"]) for t in totals}


def gathered(itemsize: int = FLOAT) -> dict:
    """Every unit is gathered for the forward; for the backward all but the root, which stays."""
    forward = (3 * MICRO, MICRO * (LAYERS * BLOCK + ROOT) * itemsize)
    backward = (2 * MICRO, MICRO * LAYERS * BLOCK * itemsize)
    return {("all_gather", "dp_shard", False): forward, ("all_gather", "dp_shard", True): backward}


@pytest.mark.parametrize("case", ["fsdp", "bf16", "hsdp"])
def test_gradients_are_reduced_once_and_bytes_are_those_of_the_dtype_sent(results, case):
    whole = (LAYERS * BLOCK + ROOT) * FLOAT
    expected = gathered(itemsize=2 if case == "bf16" else FLOAT)
    expected["reduce_scatter", "dp_shard", True] = (3, whole)
    if case == "hsdp":  # replicas reduce their shards
        expected["all_reduce", "dp_replicate", True] = (3, whole // 2)
    for result in results(case):
        assert summary(result) == expected


@pytest.mark.parametrize("case", EACH)
def test_counts_agree_with_those_of_the_dispatcher(results, case):
    for result in results(case):
        kinds: Counter[str] = Counter()
        for (kind, *_), (count, _) in summary(result).items():
            kinds[kind] += count
        assert kinds == result["profiler"]


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


def test_every_rank_traces_the_chosen_steps(folder, results):
    results("profiler")
    # Steps 11 to 17 ran: two to warm up, the second of them counted, then two traced.
    assert files_of(folder / "whole") == ["collectives_step12.json", *TRACES]
    for path in (folder / "whole/profiling").glob("rank*"):
        with gzip.open(path, "rt") as file:
            names = Counter(event.get("name") for event in json.load(file)["traceEvents"])
        steps = {name for name in names if name and name.startswith("step ")}
        assert steps == {"step 13", "step 14"}
        assert names["c10d::_reduce_scatter_base_"] == 2 * 3


def test_the_collectives_of_one_step_are_logged_and_saved_by_rank_0(folder, results):
    text, where = results("profiler")[0]["whole"]
    assert text.startswith("collectives of step 12 on rank 0 (dp_replicate 2, dp_shard 2, tp 1):\n")
    assert max(map(len, text.splitlines())) <= 71  # 80 columns with the time
    assert where == f"profiling: traces are in {folder / 'whole/profiling'}"
    saved = json.loads((folder / "whole/profiling/collectives_step12.json").read_text())
    assert saved["step"] == 12
    assert saved["mesh"] == {"dp_replicate": 2, "dp_shard": 2, "tp": 1}
    [reduced] = [row for row in saved["collectives"] if row["kind"] == "all_reduce"]
    assert reduced == {
        "kind": "all_reduce",
        "axis": "dp_replicate",
        "backward": True,
        "count": 3,
        "bytes": (LAYERS * BLOCK + ROOT) * FLOAT // 2,
    }


def test_a_run_too_short_to_be_traced_warns(folder, results):
    warning = "profiling incomplete: 2 steps ran; lower its warmup"
    assert results("profiler")[0]["short"] == [warning]
    assert files_of(folder / "short") == []
    assert results("profiler")[0]["partial"][-1] == warning
    assert files_of(folder / "partial") == ["collectives_step11.json", *TRACES]


def test_switched_off_it_writes_nothing(folder, results):
    assert results("profiler")[0]["off"] == []
    assert not (folder / "off").exists()
