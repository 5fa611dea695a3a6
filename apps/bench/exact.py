"""What `deterministic: mesh` costs: a step and its gradient traffic, over the same config in float.

Both are real torchrun launches, in turns: two ranks on the CPU and micro-batches of 4 rows unless
keys set other numbers. Both reduce gradients in every micro-step (`grad_sync: every`), with as many
threads. The time of a round is that of its steps after the first ones; processor time, which other
work on the machine changes less, is that of rank 0.
"""

import json
import sys
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from apps.bench.launch import on_ranks, read_config, watched, with_defaults
from apps.bench.report import Report, quotients, spread
from apps.bench.turns import clock
from apps.main import app
from apps.main.config import TrainArgs
from apps.main.train import train
from lingua.base.format import align, human_bytes
from lingua.parallel.mesh import mesh_sizes

RANKS, WARM_UP, STEPS = 2, 3, 20  # steps that are not measured, and those that are
RUN = ["data.batch_size=4", "device=cpu", "distributed.grad_sync=every", "distributed.threads=1"]
SIDES = {"float": "deterministic=false", "exact": "deterministic=mesh"}
# Of gradients in the backward pass; parameters are gathered over dp_shard.
REDUCTIONS = {"reduce_scatter", "all_reduce", "all_to_all"}


def measure(keys: list[str], repeats: int) -> Report:
    keys = with_defaults(RUN, keys)
    args: TrainArgs = read_config(keys)
    known = (args.distributed.dp_replicate or 1) * (args.distributed.dp_shard or 1)
    ranks = max(RANKS, known)
    rounds: list[dict[str, dict[str, Any]]] = []
    for i in range(repeats):
        print(f"round {i + 1} of {repeats}", file=sys.stderr)
        order = list(SIDES)[:: 1 if i % 2 else -1]
        rounds.append({side: launch(ranks, [*keys, SIDES[side]]) for side in order})
    rows = [("", *SIDES, "exact over float", "range")]
    results: dict[str, Any] = {"mesh": mesh_sizes(args.distributed, ranks)}
    for name, title in (("seconds", "a step, s"), ("cpu_seconds", "processor time, s")):
        sides = {side: [r[side][name] for r in rounds] for side in SIDES}
        ratio = quotients(sides["exact"], sides["float"])
        results[name] = {side: spread(values) for side, values in sides.items()} | {"ratio": ratio}
        shown = (f"{spread(values).median:.3f}" for values in sides.values())
        rows.append((title, *shown, *ratio.cells()))
    n_bytes = {side: rounds[0][side]["bytes"] for side in SIDES}
    results["bytes"] = n_bytes
    ratio_bytes = f"{n_bytes['exact'] / n_bytes['float']:.2f}"
    rows.append(("bytes of gradients", *map(human_bytes, n_bytes.values()), ratio_bytes, ""))
    n_micro, n_rows = args.micro_steps(ranks)
    about = (
        f"{ranks} ranks, {n_micro} micro-steps of {n_rows} rows, medians of {repeats} rounds of "
    )
    return Report([*align(rows, left=1), "", f"{about}{STEPS} steps"], results)


def launch(ranks: int, keys: list[str]) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        return on_ranks(ranks, step_cost, *keys, f"dump_dir={folder}/run")


def step_cost(*keys: str) -> dict[str, Any]:
    """Wall and processor time of a step, and bytes of its gradient collectives on this rank. Every
    rank calls this; rank 0 returns the numbers."""
    args: TrainArgs = read_config(keys)
    n = WARM_UP + STEPS
    args.stop_at, args.steps = n + 2, max(args.steps, n + 3)
    args.checkpoint.dump.every = args.checkpoint.eval.every = args.validation.every = 0
    args.profiling.run, args.profiling.profile_warmup, args.profiling.profile_steps = True, n, 1
    times: list[np.ndarray] = []

    def look(step: int, left: int, tokens: Tensor, targets: Tensor) -> None:
        if step == len(times) + 1 and step <= n + 1:
            times.append(clock())

    train(watched(app, look), args)
    if dist.get_rank() != 0:
        return {}
    path = args.folder / "profiling" / f"collectives_step{n}.json"
    calls = json.loads(path.read_text(encoding="utf-8"))["collectives"]
    reduced = [
        c["bytes"]
        for c in calls
        if c["backward"] and (c["kind"] in REDUCTIONS or c["axis"] == "dp_replicate")
    ]
    seconds, cpu_seconds = ((times[-1] - times[WARM_UP]) / STEPS).tolist()
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "bytes": sum(reduced)}
