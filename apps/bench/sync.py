"""Gradient traffic of a step under the three modes of `distributed.grad_sync`, and what it costs.

Each mode is a real torchrun launch of the training program, 2 replicas of 2 shards on the CPU with
4 micro-steps unless keys set other numbers. The loop's own profiler counts the collectives.
"""

import gc
import json
import sys
import time
from math import prod
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from apps.bench.launch import on_ranks, read_config, watched, with_defaults
from apps.bench.report import Report
from apps.main import app
from apps.main.config import TrainArgs
from apps.main.train import train
from lingua.base.errors import UserError
from lingua.base.format import align, human_bytes

MODES = ("last", "replica_last", "every")
RUN = ["distributed.dp_replicate=2", "distributed.dp_shard=2", "device=cpu"]
RUN += ["data.global_batch_size=16", "data.batch_size=1"]
STEP = 2  # the step that is counted: in the first, FSDP and the allocator settle


def measure(keys: list[str]) -> Report:
    keys = with_defaults(RUN, keys)
    args: TrainArgs = read_config(keys)
    replicas, shards = args.distributed.dp_replicate, args.distributed.dp_shard
    if replicas is None or shards is None:
        raise UserError("distributed.dp_replicate and dp_shard: must be numbers")
    mesh = replicas, shards, args.distributed.tp_size
    n_micro, n_rows = args.micro_steps(replicas * shards)
    rows = [["grad_sync", "reduce-scatters", "bytes", "all-reduces", "bytes", "kept"]]
    modes = []
    for mode in MODES:
        print(f"{prod(mesh)} processes, grad_sync = {mode}", file=sys.stderr)
        with TemporaryDirectory() as folder:
            words = [*keys, f"distributed.grad_sync={mode}", f"dump_dir={folder}/run"]
            counts = on_ranks(prod(mesh), count, *words)
        modes.append({"mode": mode, **counts})
        reduced = (counts[kind] for kind in ("reduce_scatter", "all_reduce"))
        cells = [cell for c in reduced for cell in (f"{c['count']}", human_bytes(c["bytes"]))]
        rows.append([mode, *cells, human_bytes(counts["kept_bytes"])])
    lines = [
        *align(rows, left=1),
        "",
        f"gradients in one step of rank 0: dp_replicate {replicas}, dp_shard {shards}, "
        f"tp {mesh[2]}; {n_micro} micro-steps of at most {n_rows} rows; "
        f"{modes[0]['parameters']:,} parameters;",
        "bytes: of the larger side of each collective, the gradient before it is reduced;",
        "kept: memory of gradients between micro-steps",
    ]
    return Report(lines, {"mesh": mesh, "micro_steps": n_micro, "modes": modes})


def count(*keys: str) -> dict[str, Any]:
    """Gradient collectives of a step that this rank issued, and bytes of gradients that it keeps
    when the last micro-step begins. Every rank calls this; rank 0 returns the counts."""
    args: TrainArgs = read_config(keys)
    args.stop_at = STEP + 1
    args.profiling.run, args.profiling.profile_warmup, args.profiling.profile_steps = True, STEP, 1
    live: list[int] = []  # bytes of all tensors as each micro-step of the step begins

    def look(step: int, left: int, tokens: Tensor, targets: Tensor) -> None:
        if step == STEP and dist.get_rank() == 0:
            live.append(settled_bytes())

    train(watched(app, look), args)
    if dist.get_rank() != 0:
        return {}
    path = args.folder / "profiling" / f"collectives_step{STEP}.json"
    collectives = json.loads(path.read_text(encoding="utf-8"))["collectives"]
    n_parameters = sum(p.numel() for p in app.build(args).module.parameters())
    counts: dict[str, Any] = {"parameters": n_parameters, "kept_bytes": live[-1] - live[0]}
    for kind, axis in (("reduce_scatter", "dp_shard"), ("all_reduce", "dp_replicate")):
        # Those of the backward pass: others are of metrics, of clipping and of who stops.
        calls = [c for c in collectives if c["backward"] and (c["kind"], c["axis"]) == (kind, axis)]
        counts[kind] = {key: sum(c[key] for c in calls) for key in ("count", "bytes")}
    return counts


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
