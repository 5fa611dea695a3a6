"""The debug run from nothing to its end: how long it takes, and the held-out loss that it reaches.
A real process, `python -m apps.main.train`, with a dump dir and a token cache of its own."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from apps.bench.launch import read_lines, run
from apps.bench.report import Report, spread
from lingua.base.dump_dir import METRICS, VALIDATION


def measure(keys: list[str]) -> Report:
    with TemporaryDirectory() as folder:
        dump_dir, begin = Path(folder, "run"), time.perf_counter()
        words = [*keys, f"data.cache_dir={folder}/cache", f"dump_dir={dump_dir}"]
        run("apps.main.train", words, show=True)
        wall_s = time.perf_counter() - begin
        metrics, held_out = read_lines(dump_dir / METRICS), read_lines(dump_dir / VALIDATION)
    last, steps = metrics[-1], np.diff([line["step"] for line in metrics], prepend=0)
    trained_s, waited_s = (
        float(steps @ [line[key] for line in metrics]) for key in ("step_time_s", "data_time_s")
    )
    tokens_per_s = spread(line["tokens_per_s"] for line in metrics)
    results = {
        "wall_s": wall_s, "training_s": trained_s, "waiting_for_data_s": waited_s,
        "steps": last["step"], "tokens": last["tokens"], "tokens_per_s": tokens_per_s,
        "peak_mem_gib": last["peak_mem_gib"], "held_out": held_out,
    }  # fmt: skip
    rows = [
        ("", "median", "range"),
        ("wall time, s", f"{wall_s:.1f}", ""),
        ("of it training, s", f"{trained_s:.1f}", ""),
        ("of that waiting for data, %", f"{100 * waited_s / trained_s:.3f}", ""),
        ("steps", f"{last['step']:,}", ""),
        ("tokens", f"{last['tokens']:,}", ""),
        ("tokens per second, by log line", *tokens_per_s.cells(",.0f")),
        ("peak memory, GiB", f"{last['peak_mem_gib']:.2f}", ""),
    ]
    for line in held_out:
        name = f"held-out {line['source']} after step {line['step']:,}, nats per byte"
        rows.append((name, f"{line['nats_per_byte']:.4f}", ""))
    return Report(rows, [], results)
