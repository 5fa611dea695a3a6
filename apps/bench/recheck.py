"""What `distributed.check_every` costs: a step with it over one without.

Two ranks of torchrun on the CPU train with `deterministic: mesh`, with 1 and with 4 grains a rank.
One run has all sides in turn: each round takes so many of its steps with each value of the key.
Processor time is that of rank 0.
"""

from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

from apps.bench.launch import on_ranks, read_config, training, with_defaults
from apps.bench.report import Report, quotients, spread
from apps.bench.turns import BySide, Turns, take_round
from apps.main import app

RANKS, GRAINS = 2, (1, 4)  # grains of a rank
RUN = ["deterministic=mesh", "device=cpu", "data.batch_size=1", "distributed.check_every=1"]
# By name: `check_every`, and the steps of a turn, of which as many are compared in each.
SIDES = {"never": (1 << 40, 100), "1": (1, 20), "10": (10, 20), "100": (100, 100)}
WARM_UP = 10  # steps, all of them compared


def measure(keys: list[str], repeats: int) -> Report:
    rows: list[dict[str, Any]] = []
    for grains in GRAINS:
        words = with_defaults([*RUN, f"data.global_batch_size={RANKS * grains}"], keys)
        with TemporaryDirectory() as folder:
            seconds = on_ranks(RANKS, cost, f"{repeats}", *words, f"dump_dir={folder}/run")
        for side, (every, _) in list(SIDES.items())[1:]:
            row: dict[str, Any] = {"grains a rank": grains, "check_every": side}
            for name, values in seconds.items():
                row[f"{name}, never"] = spread(values["never"])
                row[f"{name} / never"] = quotients(values[side], values["never"])
            rows.append(row | {"bound": 1 + 1 / (every * grains) + 0.02})
    notes = [f"medians of {repeats} rounds; bound: one grain more, and 2 %"]
    return Report(rows, notes)


def cost(repeats: str, *keys: str) -> dict[str, dict[str, list[float]]]:
    """Seconds of a step in each turn, by clock and side. Called by every rank."""
    turns, args = BySide(Turns), read_config(keys)
    n = WARM_UP + int(repeats) * sum(n for _, n in SIDES.values())
    with training(app, args, n) as (run, steps):

        def train(every: int, n: int) -> None:
            run.args.distributed.check_every = every
            for _ in range(n):
                next(steps)

        train(1, WARM_UP)
        for _ in range(int(repeats)):
            take_round({name: partial(train, *side) for name, side in SIDES.items()}, turns)
    seconds = {"a step, s": dict[str, list[float]](), "processor time, s": {}}
    for name, (_, n) in SIDES.items():
        for clock, values in zip(
            seconds, (turns[name].seconds, turns[name].cpu_seconds), strict=True
        ):
            seconds[clock][name] = [value / n for value in values]
    return seconds
