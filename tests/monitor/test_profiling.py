"""Collectives are counted as arithmetic says, and the profiler writes what it promises.

One group of four gloo processes runs every case once; the tests check the results it wrote.
"""

import gzip
import json
import logging
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
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
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from lingua.format import human_bytes
from lingua.monitor.collectives import Collective, CollectiveCounter, axis_of, table
from lingua.monitor.profiling import Profiler, ProfilingArgs

WORLD = 4
VOCAB, DIM, HIDDEN, LAYERS = 32, 16, 64, 2
ROWS, SEQ = 2, 8  # a micro-batch of one rank
FLOAT = 4  # bytes
BLOCK = DIM + 2 * DIM * HIDDEN  # parameters: norm, w1, w2
ROOT = 2 * VOCAB * DIM + DIM  # embedding, head, norm
ACTIVATION = ROWS * SEQ * DIM * FLOAT  # bytes of a residual stream, gathered over the sequence
AXES = ("dp_replicate", "dp_shard", "tp")
# case: mesh sizes, micro-steps, options
CASES = {
    "fsdp": ((1, 4, 1), 2, ()),
    "fsdp 5 micro-steps": ((1, 4, 1), 5, ()),
    "fsdp every": ((1, 4, 1), 5, ("every",)),
    "fsdp bf16": ((1, 4, 1), 2, ("bf16",)),
    "hsdp": ((2, 2, 1), 2, ()),
    "hsdp 5 micro-steps": ((2, 2, 1), 5, ()),
    "tp": ((1, 2, 2), 3, ()),
    "tp checkpoint": ((1, 2, 2), 3, ("checkpoint",)),
    "tp compile": ((1, 2, 2), 3, ("compile",)),
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


def build(mesh: DeviceMesh, options: tuple[str, ...], ran: list[str]) -> Model:
    model = Model("checkpoint" in options)
    if mesh["tp"].size() > 1:
        split_over_tp(model, mesh["tp"])
    if "compile" in options:

        def compiler(graph, _):
            def run(*inputs):
                ran.append("a compiled graph")
                return graph(*inputs)

            return make_boxed_func(run)

        for layer in model.layers:
            layer.compile(backend=aot_autograd(fw_compiler=compiler))
    shards = mesh["dp_shard"]
    if mesh["dp_replicate"].size() > 1:
        shards = mesh["dp_replicate", "dp_shard"]
    policy = MixedPrecisionPolicy()
    if "bf16" in options:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, mesh=shards, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def run_step(model: Model, n_micro: int, every: bool = False) -> None:
    for i in range(n_micro):
        model.set_requires_gradient_sync(every or i == n_micro - 1)
        tokens = torch.randint(0, VOCAB, (ROWS, SEQ))
        logits = model(tokens).flatten(0, 1)
        with loss_parallel():
            F.cross_entropy(logits.float(), tokens.flatten(), reduction="sum").backward()


def measure(case: str) -> dict:
    shape, n_micro, options = CASES[case]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES)
    ran: list[str] = []
    model = build(mesh, options, ran)
    every = "every" in options
    with CollectiveCounter(mesh) as first:  # the one that compiles
        run_step(model, n_micro, every)
    ran.clear()
    run_step(model, n_micro, every)
    ran_uncounted = len(ran)
    frames = Counter(torch._dynamo.utils.counters["frames"])
    ran.clear()
    with CollectiveCounter(mesh) as counter:
        run_step(model, n_micro, every)
    ran_counted = len(ran)
    recompiled = Counter(torch._dynamo.utils.counters["frames"]) - frames
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run_step(model, n_micro, every)
    names = (event.name for event in profiler.events() if event.name.startswith("c10d::"))
    return {
        "counted": [vars(total) for total in counter.totals()],
        "first": [vars(total) for total in first.totals()],
        "profiler": Counter(PROFILER_NAMES.get(name, name) for name in names),
        "compiled graphs run": [ran_counted, ran_uncounted],
        "recompiled": dict(recompiled),
    }


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
    return {"counted": [vars(total) for total in counter.totals()]}


def measure_profiler(folder: Path) -> dict:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=AXES)
    model = build(mesh, (), [])
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logger = logging.getLogger("lingua.monitor.profiling")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    results = {}
    for name, n_steps, args in (
        ("whole", 7, ProfilingArgs(run=True, profile_warmup=2, profile_steps=2)),
        ("short", 2, ProfilingArgs(run=True, profile_warmup=5)),
        ("counted", 2, ProfilingArgs(run=True, profile_warmup=2, profile_steps=3)),
        ("partial", 2, ProfilingArgs(run=True, profile_warmup=0, profile_steps=3)),
        ("off", 2, ProfilingArgs()),
    ):
        logged.clear()
        profiler = Profiler(args, folder / name, mesh)
        for step in range(10, 10 + n_steps):
            with profiler.step(step + 1):
                run_step(model, 1)
        profiler.close()
        dist.barrier()
        results[name] = list(logged)
    return results


def worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    # No group of four ranks joins two axes and leaves one out: eight are made up for that.
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=AXES)
    joined = axis_of(mesh["dp_replicate", "dp_shard"]._flatten("dp").get_group(), mesh)
    dist.destroy_process_group()

    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    results = {case: measure(case) for case in CASES}
    results["axes"] = measure_axes()
    results["joined"] = joined
    results["profiler"] = measure_profiler(folder)
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


# -------------------------------------------------------------------------------------- in the test


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        mp.spawn(worker, (Path(name),), nprocs=WORLD)
        yield Path(name)


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD)]


def summary(result: dict, key: str = "counted") -> dict[tuple, tuple[int, int]]:
    """{(kind, axis, dtype, in backward): (count, bytes)}"""
    totals = [Collective(**total) for total in result[key]]
    assert totals == sorted(totals, key=lambda total: -total.bytes)
    return {(t.kind, t.axis, t.dtype, t.backward): (t.count, t.bytes) for t in totals}


def gathered(n_micro: int, itemsize: int = FLOAT, tp: int = 1) -> dict:
    """Every unit is gathered for the forward; for the backward all but the root, which stays."""
    block, root = local_parameters(tp)
    return {
        False: (3 * n_micro, n_micro * (LAYERS * block + root) * itemsize),
        True: (2 * n_micro, n_micro * LAYERS * block * itemsize),
    }


def local_parameters(tp: int) -> tuple[int, int]:
    """Of a block and of the root on one tp rank: matrices are split, norms are not."""
    return (BLOCK - DIM) // tp + DIM, (ROOT - DIM) // tp + DIM


@pytest.mark.parametrize("case", ["fsdp", "fsdp 5 micro-steps"])
def test_under_fsdp_gradients_are_reduced_once_however_many_micro_steps(results, case):
    n_micro = CASES[case][1]
    gathers = gathered(n_micro)
    for result in results:
        assert summary(result[case]) == {
            ("all_gather", "dp_shard", "float32", False): gathers[False],
            ("all_gather", "dp_shard", "float32", True): gathers[True],
            ("reduce_scatter", "dp_shard", "float32", True): (3, (LAYERS * BLOCK + ROOT) * FLOAT),
        }


def test_sync_at_every_micro_step_costs_that_many_reductions(results):
    for result in results:
        found = summary(result["fsdp every"])
        expected = (5 * 3, 5 * (LAYERS * BLOCK + ROOT) * FLOAT)
        assert found["reduce_scatter", "dp_shard", "float32", True] == expected


def test_bytes_are_those_of_the_dtype_that_is_sent(results):
    gathers = gathered(2, itemsize=2)
    for result in results:
        assert summary(result["fsdp bf16"]) == {
            ("all_gather", "dp_shard", "bfloat16", False): gathers[False],
            ("all_gather", "dp_shard", "bfloat16", True): gathers[True],
            ("reduce_scatter", "dp_shard", "float32", True): (3, (LAYERS * BLOCK + ROOT) * FLOAT),
        }


@pytest.mark.parametrize("case", ["hsdp", "hsdp 5 micro-steps"])
def test_under_hsdp_replicas_all_reduce_their_shards(results, case):
    gathers = gathered(CASES[case][1])
    whole = (LAYERS * BLOCK + ROOT) * FLOAT
    for result in results:
        assert summary(result[case]) == {
            ("all_gather", "dp_shard", "float32", False): gathers[False],
            ("all_gather", "dp_shard", "float32", True): gathers[True],
            ("reduce_scatter", "dp_shard", "float32", True): (3, whole),
            ("all_reduce", "dp_replicate", "float32", True): (3, whole // 2),
        }


def tp_summary(n_micro: int, recomputed_gathers: int = 0) -> dict:
    gathers = gathered(n_micro, tp=2)
    block, root = local_parameters(2)
    # w1 and the head gather the sequence, whose backward scatters it; w2 and the embedding the
    # other way round.
    n_gather, n_scatter = LAYERS + 1, LAYERS + 1
    return {
        ("all_gather", "dp_shard", "float32", False): gathers[False],
        ("all_gather", "dp_shard", "float32", True): gathers[True],
        ("reduce_scatter", "dp_shard", "float32", True): (3, (LAYERS * block + root) * FLOAT),
        **{
            (kind, "tp", "float32", backward): (n * n_micro, n * n_micro * ACTIVATION)
            for kind, backward, n in (
                ("all_gather", False, n_gather),
                ("all_gather", True, n_scatter + recomputed_gathers),
                ("reduce_scatter", False, n_scatter),
                ("reduce_scatter", True, n_gather),
            )
        },
        # The loss: maximum, sum of exponentials and the target's term of each token.
        ("all_reduce", "tp", "float32", False): (3 * n_micro, 3 * n_micro * ROWS * SEQ * FLOAT),
        # The gradient of each norm, which every tp rank has for its part of the sequence.
        ("all_reduce", "tp", "float32", True): (LAYERS + 1, (LAYERS + 1) * DIM * FLOAT),
    }


def test_tensor_parallel_traffic_is_counted_on_its_axis_loss_included(results):
    for result in results:
        assert summary(result["tp"]) == tp_summary(3)


def test_recomputation_in_a_checkpointed_closure_is_counted(results):
    # It gathers w1's input again; w2's output is not needed and so not scattered again.
    for result in results:
        assert summary(result["tp checkpoint"]) == tp_summary(3, recomputed_gathers=LAYERS)


def test_compiled_blocks_stay_compiled_and_are_counted_alike(results):
    for result in results:
        assert summary(result["tp compile"]) == tp_summary(3)
        assert result["tp compile"]["recompiled"] == {}
        counted, uncounted = result["tp compile"]["compiled graphs run"]
        # At least the forward and the backward of each block.
        assert counted == uncounted >= 2 * LAYERS * 3


@pytest.mark.parametrize("case", CASES)
def test_counts_agree_with_those_of_the_dispatcher(results, case):
    for result in results:
        kinds: Counter[str] = Counter()
        for (kind, *_), (count, _) in summary(result[case]).items():
            kinds[kind] += count
        assert kinds == result[case]["profiler"]


@pytest.mark.parametrize("case", CASES)
def test_a_step_that_compiles_counts_what_it_runs_not_what_it_traces(results, case):
    for result in results:
        assert summary(result[case], "first") == summary(result[case])


def test_groups_are_named_by_the_axes_they_join(results):
    everyone, first_pair, diagonal = {0, 1, 2, 3}, {0, 1}, {0, 3}
    sent = [
        (everyone, ("all_reduce", "world", "float32"), 3 * FLOAT),
        (everyone, ("broadcast", "world", "int64"), 5 * 8),
        (everyone, ("barrier", "world", "uint8"), 1),
        (first_pair, ("all_reduce", "dp_shard", "float32"), 2 * FLOAT),
        (diagonal, ("all_reduce", "other (2 ranks)", "float32"), 1 * FLOAT),
        (everyone, ("all_to_all", "dp_replicate", "float32"), 8 * FLOAT),
    ]
    for rank, result in enumerate(results):
        assert summary(result["axes"]) == {
            (*key, False): (1, n_bytes) for ranks, key, n_bytes in sent if rank in ranks
        }
        assert result["joined"] == "dp_replicate+dp_shard"


def test_the_table_gives_counts_and_sizes_a_person_can_read():
    totals = [
        Collective("reduce_scatter", "dp_shard", "float32", True, count=2, bytes=3072),
        Collective("all_reduce", "world", "int64", False, count=1, bytes=8),
    ]
    assert [line.split() for line in table(totals).splitlines()] == [
        ["kind", "axis", "dtype", "pass", "count", "bytes"],
        ["reduce_scatter", "dp_shard", "float32", "backward", "2", "3.00", "KiB"],
        ["all_reduce", "world", "int64", "other", "1", "8", "B"],
        ["all", "3", "3.01", "KiB"],
    ]
    assert table([]) == "no collectives"
    assert [human_bytes(n) for n in (0, 1023, 1024, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "3.00 TiB",
    ]


def test_every_rank_traces_the_chosen_steps(folder, results):
    # Steps 11 to 17 ran: two to warm up, the second of them counted, then two traced.
    for rank in range(WORLD):
        path = folder / f"whole/profiling/trace_step13_14_rank{rank}.json.gz"
        with gzip.open(path, "rt") as file:
            names = Counter(event.get("name") for event in json.load(file)["traceEvents"])
        steps = {name for name in names if name and name.startswith("step ")}
        assert steps == {"step 13", "step 14"}
        assert names["c10d::_reduce_scatter_base_"] == 2 * 3
    files = {path.name for path in (folder / "whole/profiling").iterdir()}
    traces = {f"trace_step13_14_rank{rank}.json.gz" for rank in range(WORLD)}
    assert files == {"collectives_step12.txt", "collectives_step12.json"} | traces


def test_the_collectives_of_one_step_are_logged_and_saved_by_rank_0(folder, results):
    text = (folder / "whole/profiling/collectives_step12.txt").read_text()
    table, trace = results[0]["profiler"]["whole"]
    assert table + "\n" == text
    assert text.startswith("collectives of step 12 on rank 0 (dp_replicate 2, dp_shard 2, tp 1):\n")
    assert max(map(len, text.splitlines())) <= 71  # 80 columns with the time
    assert trace.endswith("whole/profiling/trace_step13_14_rank0.json.gz")
    saved = json.loads((folder / "whole/profiling/collectives_step12.json").read_text())
    assert saved["step"] == 12
    assert saved["mesh"] == {"dp_replicate": 2, "dp_shard": 2, "tp": 1}
    [reduced] = [row for row in saved["collectives"] if row["kind"] == "all_reduce"]
    assert reduced == {
        "kind": "all_reduce",
        "axis": "dp_replicate",
        "dtype": "float32",
        "backward": True,
        "count": 3,
        "bytes": (LAYERS * BLOCK + ROOT) * FLOAT // 2,
    }
    assert all(result["profiler"]["whole"] == [] for result in results[1:])


def test_a_run_too_short_to_be_traced_warns(folder, results):
    assert results[0]["profiler"]["short"] == [
        "profiling incomplete: 2 of 7 steps ran; lower its warmup"
    ]
    assert list((folder / "short/profiling").iterdir()) == []


def test_a_run_that_ends_before_its_first_traced_step_writes_no_trace(folder, results):
    files = {path.name for path in (folder / "counted/profiling").iterdir()}
    assert files == {"collectives_step12.txt", "collectives_step12.json"}


def test_a_run_that_ends_while_it_is_traced_writes_the_steps_so_far(folder, results):
    files = {path.name for path in (folder / "partial/profiling").iterdir()}
    assert {f"trace_step12_12_rank{rank}.json.gz" for rank in range(WORLD)} <= files
    warning = results[0]["profiler"]["partial"][-1]
    assert warning.startswith("profiling incomplete: 2 of 4 steps ran")


def test_switched_off_it_writes_nothing(folder, results):
    assert not (folder / "off").exists()
    assert results[0]["profiler"]["off"] == []


def test_negative_windows_are_refused_by_name():
    args = ProfilingArgs(mem_steps=-1, profile_warmup=-2)
    assert [name for name, _ in args.validate()] == ["mem_steps", "profile_warmup"]
