"""Gradient traffic of a step under the three modes of `distributed.grad_sync`, and what it costs.

Each mode is a real torchrun launch of the training program, 2 replicas of 2 shards on the CPU with
4 micro-steps unless keys set other numbers. The loop's own profiler counts the collectives.
"""

import gc
import sys
import time
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from apps.bench.launch import collectives, read_config, train_on_ranks, training, with_defaults
from apps.bench.report import Report
from apps.main import app
from apps.main.config import TrainArgs
from lingua.base.errors import UserError

MODES = ("last", "replica_last", "every")
RUN = ["distributed.dp_replicate=2", "distributed.dp_shard=2", "device=cpu"]
RUN += ["data.global_batch_size=16", "data.batch_size=1"]
STEP = 2  # the step that is counted: in the first, FSDP and the allocator settle
REDUCTIONS = {"reduce_scatter": "dp_shard", "all_reduce": "dp_replicate"}  # kind: axis


def measure(keys: list[str]) -> Report:
    keys = with_defaults(RUN, keys)
    args: TrainArgs = read_config(keys)
    replicas, shards = args.distributed.dp_replicate, args.distributed.dp_shard
    if replicas is None or shards is None:
        raise UserError("distributed.dp_replicate and dp_shard: must be numbers")
    mesh = replicas, shards, args.distributed.tp_size
    rows: list[dict[str, Any]] = []
    for mode in MODES:
        print(f"{prod(mesh)} processes, grad_sync = {mode}", file=sys.stderr)
        counts = train_on_ranks(prod(mesh), count, *keys, f"distributed.grad_sync={mode}")
        rows.append({"grad_sync": mode, **counts})
    n_micro, n_rows = args.micro_steps(replicas * shards)
    notes = [
        f"gradients in one step of rank 0: dp_replicate {replicas}, dp_shard {shards}, "
        f"tp {mesh[2]}; {n_micro} micro-steps of at most {n_rows} rows;",
        "MiB: of the larger side of each collective, the gradient before it is reduced;",
        "kept: memory of gradients between micro-steps",
    ]
    return Report(rows, notes)


def count(*keys: str) -> dict[str, Any]:
    """Gradient collectives of a step that rank 0 issued, and bytes of gradients that this rank
    keeps when the last micro-step begins. Called by every rank."""
    args: TrainArgs = read_config(keys)
    args.profiling.run, args.profiling.profile_warmup, args.profiling.profile_steps = True, STEP, 1
    live: list[int] = []  # bytes of all tensors as each micro-step of the step begins

    def look(model: nn.Module, inputs: Any) -> None:
        if run.progress.step == STEP - 1:
            live.append(settled_bytes())

    with training(app, args, STEP + 1) as (run, steps):
        run.model.register_forward_pre_hook(look, prepend=True)
        list(steps)
    counts: dict[str, Any] = {"parameters": sum(p.numel() for p in run.model.parameters())}
    calls = collectives(args, STEP)
    for kind, axis in REDUCTIONS.items():
        reduced = [call for call in calls if (call["kind"], call["axis"]) == (kind, axis)]
        counts[f"{kind}s"] = sum(call["count"] for call in reduced)
        counts[f"their MiB, {axis}"] = sum(call["bytes"] for call in reduced) / 2**20
    return counts | {"kept, MiB": (live[-1] - live[0]) / 2**20}


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
