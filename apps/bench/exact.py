"""What `deterministic: mesh` costs: a step and its gradient traffic, over the same config in float.

Both are real torchrun launches, in turns: two ranks on the CPU and micro-batches of 4 rows unless
keys set other numbers. Both reduce gradients in every micro-step. Processor time is that of rank 0.
"""

from functools import partial
from typing import Any

from apps.bench.launch import collectives, read_config, train_on_ranks, training, with_defaults
from apps.bench.report import Report, quotients, spread
from apps.bench.turns import clock, take_turns
from apps.main import app
from apps.main.config import TrainArgs

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
    sides = {
        side: partial(train_on_ranks, ranks, step_cost, *keys, key) for side, key in SIDES.items()
    }
    turns = take_turns(sides, repeats, "exact", warm_up=0)
    rows: list[dict[str, Any]] = []
    for name in turns["exact"].results[0]:
        values = {side: [cost[name] for cost in turns[side].results] for side in SIDES}
        row = {"": name, **{side: spread(values[side]) for side in SIDES}}
        rows.append(row | {"exact over float": quotients(values["exact"], values["float"])})
    n_micro, n_rows = args.micro_steps(ranks)
    about = f"{ranks} ranks, {n_micro} micro-steps of {n_rows} rows, medians of {repeats} rounds of"
    return Report(rows, [f"{about} {STEPS} steps"])


def step_cost(*keys: str) -> dict[str, float]:
    """Wall and processor time of a step on this rank, and bytes of gradient collectives on rank 0.
    Called by every rank."""
    args: TrainArgs = read_config(keys)
    n = WARM_UP + STEPS
    args.profiling.run, args.profiling.profile_warmup, args.profiling.profile_steps = True, n, 1
    with training(app, args, n + 1) as (_, steps):
        times = [clock() for _ in steps]
    seconds, cpu_seconds = ((times[n - 1] - times[WARM_UP - 1]) / STEPS).tolist()
    n_bytes = sum(
        call["bytes"]
        for call in collectives(args, n)
        if call["kind"] in REDUCTIONS or call["axis"] == "dp_replicate"
    )
    cost = {"a step, s": seconds, "processor time, s": cpu_seconds}
    return cost | {"gradients, MiB": n_bytes / 2**20}
