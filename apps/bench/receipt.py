"""What can be audited of a run, and what it costs: the link of each line of metrics.jsonl, the hash
of tensors in each checkpoint, and the receipt at the end, over a step.

Each round trains a short run, which gives the time of a step; then the three are timed on what the
run has written, and divided by the steps between two of them in the whole run.
"""

from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from apps.bench.launch import read_config, read_lines
from apps.bench.report import Report, spread
from apps.bench.turns import Side, take_turns
from apps.main.train import train
from lingua.app import App, choose_app
from lingua.base.dump_dir import METRICS
from lingua.base.errors import UserError
from lingua.checkpoint.digest import digest
from lingua.checkpoint.folder import find
from lingua.checkpoint.source import open_checkpoint
from lingua.monitor.metrics import Chain
from lingua.parallel.alone import temporary_process_group
from lingua.run.receipt import write_receipt

LINES = 1000  # links to time


def measure(keys: list[str], repeats: int) -> Report:
    app = choose_app(keys)
    args = read_config(keys, app)
    every = {
        "a link of a line": args.logging.freq,
        "the hash of tensors": args.checkpoint.dump.every or args.steps,
        "the receipt": args.steps,
    }
    sides = {"run": partial(seconds_of_parts, app, keys)}
    parts = take_turns(sides, repeats, "receipt", warm_up=0)["run"].results
    seconds = {name: np.array([each[name] for each in parts]) for name in parts[0]}
    shares = {name: 100 * seconds[name] / seconds["a step"] / n for name, n in every.items()}
    rows: list[dict[str, Any]] = []
    for name in seconds:
        rows.append({"": name, "ms": spread(1000 * seconds[name])})
        if name in every:
            rows[-1] |= {"steps": every[name], "% of a step": spread(shares[name])}
    rows.append({"": "all of them", "% of a step": spread(sum(shares.values()))})
    return Report(rows, [f"medians of {repeats} rounds; steps: between two of them"])


def seconds_of_parts(app: App, keys: list[str]) -> dict[str, float]:
    """Seconds of a step (mean of those before the last line) and of each part of the record, in one
    short run. Raises UserError where a signal stops it."""
    args = read_config(keys, app)
    with TemporaryDirectory() as folder, temporary_process_group():
        args.dump_dir, args.checkpoint.path = folder, None
        args.steps, args.stop_at = 2 * args.logging.freq, None
        args.optim.warmup = min(args.optim.warmup, args.steps)
        args.validation.every = args.samples.every = 0
        with Path(folder, "console.txt").open("w") as console, redirect_stdout(console):
            if train(app, args):
                raise UserError("the run was stopped before its end")
        last = read_lines(Path(folder, METRICS))[-1]
        source = open_checkpoint(find(args.checkpoint_folder)[-1])
        tensors = source.whole(source.tensors)
        sides: dict[str, Side] = {
            "a link of a line": lambda: [Chain().link(last) for _ in range(LINES)],
            "the hash of tensors": lambda: digest(tensors),
            "the receipt": lambda: write_receipt(Path(folder)),
        }
        turns = take_turns(sides, 1, "receipt", warm_up=0)
    seconds = {side: turns[side].seconds[0] for side in sides}
    seconds["a link of a line"] /= LINES
    return {"a step": last["step_time_s"], **seconds}
