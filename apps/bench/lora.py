"""Time and memory of a step of apps.lora over full tuning of the same model, on the same rows.

Each turn is a run of its own process, which starts from the model of a run of one step. Keys are
those of both, and `lora.*`. Memory of a CUDA device is what tensors had at most; on a CPU it is the
largest resident set of the process, less that before the run.
"""

import resource
from functools import partial
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import Any

import torch

from apps.bench.launch import on_ranks, read_config, run, training
from apps.bench.report import Report, quotients, spread
from apps.bench.turns import clock, take_turns
from apps.lora import app as lora_app
from apps.main import app as main_app

WARM_UP, STEPS = 3, 10  # steps that are not timed, and those that are
APPS = {"full tuning": main_app, "apps.lora": lora_app}
COSTS = ("a step, s", "GiB")


def measure(keys: list[str], repeats: int) -> Report:
    common = [key for key in keys if not key.startswith("lora.")]
    with TemporaryDirectory() as folder:
        base = f"{folder}/base"
        short = ["steps=1", "optim.warmup=0", "validation.tokens=1000"]
        run("apps.main.train", [*common, f"dump_dir={base}", "name=base", *short])

        def train(name: str) -> Any:
            words = keys if name == "apps.lora" else common
            words = [*words, f"checkpoint.init_from={base}", f"dump_dir={folder}/run"]
            return on_ranks(1, cost, name, *words)

        sides = {name: partial(train, name) for name in APPS}
        turns = take_turns(sides, repeats, "lora", warm_up=0)
    rows: list[dict[str, Any]] = []
    for name in APPS:
        results = turns[name].results
        row: dict[str, Any] = {"": name, "trained": results[0]["trained"]}
        for key in COSTS:
            values, full = ([c[key] for c in turns[n].results] for n in (name, "full tuning"))
            row |= {key: spread(values), f"{key.split(',')[0]} / full": quotients(values, full)}
        rows.append(row)
    return Report(rows, [f"medians of {repeats} turns of {STEPS} steps; trained: parameters"])


def cost(name: str, *keys: str) -> dict[str, Any]:
    """Of a run: the seconds of a step, the most memory, and the parameters that are trained. Raises
    KeyboardInterrupt where a signal stops it."""
    before, app, seconds = peak_bytes(), APPS[name], [0.0]
    args = read_config(keys, app)
    with training(app, args, WARM_UP + STEPS) as (started, steps):
        for _ in steps:
            seconds.append(clock(started.device)[0])
        most = peak_bytes()
        if started.device.type == "cuda":
            before, most = 0, torch.cuda.max_memory_allocated()
        trained = sum(p.numel() for p in started.model.parameters() if p.requires_grad)
    times = sorted(b - a for a, b in pairwise(seconds[-STEPS - 1 :]))
    return {
        "a step, s": times[len(times) // 2],
        "GiB": (most - before) / 2**30,
        "trained": trained,
    }


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
