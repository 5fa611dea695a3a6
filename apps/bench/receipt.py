"""What can be audited of a run, and what it costs: the link of each line of metrics.jsonl, the hash
of tensors in each checkpoint, and the receipt at the end, over a step.

Each round trains a short run, which gives the time of a step; then the three are timed on what the
run has written, and divided by the steps between two of them in the whole run. All of them are work
of rank 0 where something is written; between two log lines there is none.
"""

import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from apps.bench.launch import one_process, read_config, read_lines
from apps.bench.report import Report, spread
from apps.main.train import train
from lingua.app import App, choose_app
from lingua.base.dump_dir import METRICS
from lingua.base.errors import UserError
from lingua.base.format import align
from lingua.checkpoint.digest import digest
from lingua.checkpoint.folder import find
from lingua.checkpoint.source import open_checkpoint
from lingua.monitor.metrics import link
from lingua.tools.audit.receipt import write_receipt
from lingua.tools.in_process import temporary_process_group

LINES = 1000  # links to time


def measure(keys: list[str], repeats: int) -> Report:
    app = choose_app(keys)
    one_process("the receipt")
    args = read_config(keys, app)
    every = {
        "a link of a line": args.logging.freq,
        "the hash of tensors": args.checkpoint.dump.every or args.steps,
        "the receipt": args.steps,
    }
    rounds = []
    for i in range(repeats):
        print(f"round {i + 1} of {repeats}", file=sys.stderr)
        rounds.append(seconds_of(app, read_config(keys, app)))
    shares = [{n: 100 * r[n] / r["a step"] / steps for n, steps in every.items()} for r in rounds]
    rows: list[tuple[str, ...]] = [("", "ms", "range", "each", "% of a step", "range")]
    results: dict[str, Any] = {}
    for name in rounds[0]:
        results[name] = s = spread(1000 * r[name] for r in rounds)
        cells: tuple[str, ...] = (name, *s.cells(".3f"))
        if name in every:
            results[f"{name}, percent"] = share = spread(r[name] for r in shares)
            cells += (f"{every[name]} steps", *share.cells(".4f"))
        rows.append((*cells, *[""] * (len(rows[0]) - len(cells))))
    results["percent"] = total = spread(sum(r.values()) for r in shares)
    rows.append(("all of them", "", "", "", *total.cells(".4f")))
    return Report([*align(rows, left=1), "", f"medians of {repeats} rounds"], results)


def seconds_of(app: App, args: Any) -> dict[str, float]:
    """Seconds of a step (mean of those before the last line) and of each part of the record, in one
    short run. Raises UserError where a signal stops it."""
    with TemporaryDirectory() as folder, temporary_process_group():
        args.dump_dir, args.checkpoint.path = folder, None
        args.steps, args.stop_at = 2 * args.logging.freq, None
        args.optim.warmup = min(args.optim.warmup, args.steps)
        args.validation.every = args.samples.every = 0
        with Path(folder, "console.txt").open("w") as console, redirect_stdout(console):
            if train(app, args):
                raise UserError("the run was stopped before its end")
        lines = read_lines(Path(folder, METRICS))
        [*_, checkpoint] = find(args.checkpoint_folder)
        source = open_checkpoint(checkpoint)
        tensors = source.whole(source.tensors)
        return {
            "a step": lines[-1]["step_time_s"],
            "a link of a line": seconds(lambda: [link("", lines[-1]) for _ in range(LINES)])
            / LINES,
            "the hash of tensors": seconds(lambda: digest(tensors)),
            "the receipt": seconds(lambda: write_receipt(Path(folder))),
        }


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
