"""What the modes of `distributed.grad_sync` and `deterministic: mesh` cost: gradient traffic of a
step, gradients that are kept between micro-steps, and time.

Each mode is a real torchrun launch of the training program, 2 replicas of 2 shards on the CPU with
4 micro-steps unless keys set other numbers; modes take turns. The loop's own profiler counts the
collectives. Processor time is that of rank 0.
"""

import gc
import json
import time
from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from apps.bench.launch import on_ranks, read_config, training, with_defaults
from apps.bench.report import Report, quotients, spread
from apps.bench.turns import clock, take_turns
from apps.main import app
from apps.main.config import TrainArgs
from lingua.base.dump_dir import COLLECTIVES, PROFILING
from lingua.base.errors import UserError

MODES = {mode: [f"distributed.grad_sync={mode}"] for mode in ("last", "replica_last", "every")}
MODES["mesh"] = ["distributed.grad_sync=every", "deterministic=mesh"]
RUN = ["distributed.dp_replicate=2", "distributed.dp_shard=2", "distributed.threads=1"]
RUN += ["data.global_batch_size=16", "data.batch_size=1", "device=cpu"]
WARM_UP, STEPS = 3, 20  # steps that are not timed, and those that are; then one is profiled
PARAMETERS = ("dp_shard", "all_gather")  # axis and kind of collectives that are not of gradients
TIMES = ("a step, s", "processor time, s")


def measure(keys: list[str], repeats: int) -> Report:
    keys = with_defaults(RUN, keys)
    args: TrainArgs = read_config(keys)
    replicas, shards = args.distributed.dp_replicate, args.distributed.dp_shard
    if replicas is None or shards is None:
        raise UserError("distributed.dp_replicate and dp_shard: must be numbers")
    mesh = replicas, shards, args.distributed.tp_size

    def train(mode: str) -> Any:
        with TemporaryDirectory() as folder:
            return on_ranks(prod(mesh), cost, *keys, *MODES[mode], f"dump_dir={folder}/run")

    modes = [mode for mode in MODES if mode != "mesh" or mesh[2] == 1]  # which it refuses else
    sides = {mode: partial(train, mode) for mode in modes}
    turns = take_turns(sides, repeats, "sync", warm_up=0)
    rows: list[dict[str, Any]] = []
    for mode in sides:
        row = {"mode": mode, **turns[mode].results[0]}
        for name in TIMES:
            values, every = ([c[name] for c in turns[m].results] for m in (mode, "every"))
            row |= {name: spread(values), f"{name[:-3]} / every": quotients(values, every)}
        rows.append(row)
    n_micro, n_rows = args.micro_steps(replicas * shards)
    notes = [
        f"collectives of gradients in one step of rank 0: dp_replicate, dp_shard, tp {mesh}; "
        f"{n_micro} micro-steps of at most {n_rows} rows; times: medians of {repeats} rounds of "
        f"{STEPS} steps; mesh: deterministic: mesh",
        "MiB: of the larger side of each collective, the gradient before it is reduced;",
        "kept: memory of gradients between micro-steps",
    ]
    return Report(rows, notes)


def cost(*keys: str) -> dict[str, float]:
    """Gradient collectives of a step that rank 0 issued, MiB of gradients that this rank keeps when
    the last micro-step begins, and seconds of a step. Called by every rank."""
    args: TrainArgs = read_config(keys)
    n = WARM_UP + STEPS
    profiling = args.profiling
    profiling.run, profiling.profile_warmup, profiling.profile_steps = True, n + 1, 1
    live: list[int] = []  # bytes of all tensors as each micro-step after the timed steps begins

    def look(model: nn.Module, inputs: Any) -> None:
        if run.progress.step == n:
            live.append(settled_bytes())

    with training(app, args, n + 2) as (run, steps):
        run.model.register_forward_pre_hook(look, prepend=True)
        times = [clock() for _ in steps]
    counts: dict[str, float] = {}
    dist.barrier()  # rank 0 has written the collectives
    path = Path(args.folder, PROFILING, COLLECTIVES.replace("*", f"{n + 1}"))
    calls = json.loads(path.read_text(encoding="utf-8"))["collectives"]
    calls = [c for c in calls if c["backward"]]  # others are of metrics, clipping and who stops
    for axis in ("dp_shard", "dp_replicate", "world"):
        sent = [c for c in calls if c["axis"] == axis and (axis, c["kind"]) != PARAMETERS]
        counts[axis] = sum(call["count"] for call in sent)
        counts[f"{axis}, MiB"] = sum(call["bytes"] for call in sent) / 2**20
    counts["kept, MiB"] = (live[-1] - live[0]) / 2**20
    seconds = (times[n - 1] - times[WARM_UP - 1]) / STEPS
    return counts | dict(zip(TIMES, seconds.tolist(), strict=True))


def settled_bytes() -> int:
    """`tensor_bytes`, once other threads have read rows ahead and freed results of collectives."""
    before, now = -1, tensor_bytes()
    while now != before:
        time.sleep(0.05)
        before, now = now, tensor_bytes()
    return now


def tensor_bytes() -> int:
    """Bytes of all tensors of this process that Python knows, shared memory counted once."""
    gc.collect()  # what only a cycle refers to is not kept
    storages = {}
    for thing in gc.get_objects():
        # By type: isinstance would ask every lazy object for its class. Neither a DTensor nor a
        # tensor on the meta device has memory of its own.
        kind = type(thing)
        if issubclass(kind, torch.Tensor) and not issubclass(kind, DTensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
