"""What dividing the positions of rows between two ranks costs: a step of the same tokens with
`distributed.cp_size: 2`, with rows divided (`dp_shard: 2` alone) and with heads divided (`tp_size:
2`), in turns. Each side is a real torchrun launch of the training program on the CPU.
"""

from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

from apps.bench.launch import on_ranks, read_config, training, with_defaults
from apps.bench.report import Report, quotients, spread
from apps.bench.turns import clock, take_turns
from apps.main import app

RUN = ["distributed.threads=1", "device=cpu", "data.seq_len=1024", "data.batch_size=4"]
RUN += ["data.global_batch_size=4"]
SIDES = {
    "rows": ["distributed.dp_shard=2"],
    "positions": ["distributed.dp_shard=2", "distributed.cp_size=2"],
    "heads": ["distributed.dp_shard=1", "distributed.tp_size=2"],
}
WARM_UP, STEPS = 2, 5  # steps that are not timed, and those that are
TIMES = ("a step, s", "processor time, s")


def measure(keys: list[str], repeats: int) -> Report:
    keys = with_defaults(RUN, keys)

    def train(side: str) -> Any:
        with TemporaryDirectory() as folder:
            return on_ranks(2, cost, *keys, *SIDES[side], f"dump_dir={folder}/run")

    turns = take_turns(
        {side: partial(train, side) for side in SIDES}, repeats, "context", warm_up=0
    )
    rows: list[dict[str, Any]] = []
    for side in SIDES:
        row: dict[str, Any] = {"divided": side}
        for name in TIMES:
            values, by_rows = ([r[name] for r in turns[s].results] for s in (side, "rows"))
            row |= {name: spread(values), f"{name[:-3]} / rows": quotients(values, by_rows)}
        rows.append(row)
    args = read_config(keys)
    size = f"{args.data.step_rows} rows of {args.data.seq_len} tokens"
    notes = [f"{size} a step on two ranks; medians of {repeats} rounds of {STEPS} steps"]
    return Report(rows, notes)


def cost(*keys: str) -> dict[str, float]:
    """Seconds of a step of rank 0. Called by every rank."""
    with training(app, read_config(keys), WARM_UP + STEPS) as (_, steps):
        times = [clock() for _ in steps]
    seconds = (times[-1] - times[WARM_UP - 1]) / STEPS
    return dict(zip(TIMES, seconds.tolist(), strict=True))
