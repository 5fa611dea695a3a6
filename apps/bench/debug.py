"""The debug run from nothing to its end: how long it takes, and the held-out loss that it reaches.
A real process, `python -m apps.main.train`, with a dump dir and a token cache of its own."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
    figures: dict[str, Any] = {
        "wall time, s": wall_s,
        "of it training, s": trained_s,
        "of that waiting for data, %": 100 * waited_s / trained_s,
        "steps": last["step"],
        "tokens": last["tokens"],
        "tokens per second, by log line": spread(line["tokens_per_s"] for line in metrics),
        "peak memory, GiB": last["peak_mem_gib"],
    }
    for line in held_out:
        name = f"held-out {line['source']} after step {line['step']:,}, nats per byte"
        figures[name] = f"{line['nats_per_byte']:.4f}"
    rows = [{"": name, "value": value} for name, value in figures.items()]
    return Report(rows, results={"held_out": held_out})
