"""One rank of the training program, which counts its second step; see sync.py.

torchrun --nproc-per-node 4 -m apps.bench.sync_rank COUNTS.json config=... key=value ...
"""

import gc
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from apps.main import app
from apps.main.config import TrainArgs
from apps.main.train import train
from apps.main.transformer import build
from lingua.app import Built
from lingua.config.load import load
from lingua.config.meta_lingua import META_LINGUA
from lingua.parallel.program import run_program

STEP = 2  # the one that is counted: in the first, FSDP and the allocator settle


def count(args: TrainArgs) -> dict[str, Any]:
    """Gradient collectives of a step as this rank issued them, and the bytes of gradients that it
    holds when the last micro-step begins. Called by every rank; rank 0's counts are returned."""
    args.stop_at = STEP + 1
    args.profiling.run, args.profiling.profile_warmup, args.profiling.profile_steps = True, STEP, 1
    live: list[int] = []  # bytes of all tensors as each micro-step of the step begins
    parameters = 0

    def look(module: nn.Module, inputs: Any) -> None:
        if module.training:  # not while text is generated
            live.append(settled())

    def watched(args: TrainArgs) -> Built:
        nonlocal parameters
        built = build(args)
        parameters = sum(p.numel() for p in built.module.parameters())
        if dist.get_rank() == 0:
            built.module.register_forward_pre_hook(look)
        return built

    train(replace(app, build=watched), args)
    if dist.get_rank() != 0:
        return {}
    n_micro = len(live) // args.stop_at
    live = live[(STEP - 1) * n_micro : STEP * n_micro]
    path = Path(args.dump_dir or "") / "profiling" / f"collectives_step{STEP}.json"
    collectives = json.loads(path.read_text(encoding="utf-8"))["collectives"]
    counts: dict[str, Any] = {"mode": args.distributed.grad_sync, "parameters": parameters}
    for kind, axis in (("reduce_scatter", "dp_shard"), ("all_reduce", "dp_replicate")):
        # Those of the backward pass: others are of metrics, of clipping and of who stops.
        found = [c for c in collectives if c["backward"] and (c["kind"], c["axis"]) == (kind, axis)]
        counts[kind] = {key: sum(c[key] for c in found) for key in ("count", "bytes")}
    return {**counts, "kept_bytes": live[-1] - live[0]}


def settled() -> int:
    """`tensor_bytes`, when other threads hold what they will: rows that are being read ahead,
    results of collectives that are being let go of."""
    before, now = -1, tensor_bytes()
    while now != before:
        time.sleep(0.05)
        before, now = now, tensor_bytes()
    return now


def tensor_bytes() -> int:
    """Bytes of all tensors of this process that Python knows, shared memory counted once."""
    gc.collect()  # what is only kept by a cycle is not kept
    storages = {}
    for thing in gc.get_objects():
        # By type: isinstance would ask every lazy object for its class. Neither a DTensor nor a
        # tensor on the meta device has memory of its own.
        kind = type(thing)
        if issubclass(kind, torch.Tensor) and not issubclass(kind, DTensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def main() -> None:
    path, *keys = sys.argv[1:]
    args, _ = load(TrainArgs, keys, foreign=META_LINGUA)
    counts = count(args)
    if counts:
        Path(path).write_text(json.dumps(counts), encoding="utf-8")


if __name__ == "__main__":
    run_program(main)
