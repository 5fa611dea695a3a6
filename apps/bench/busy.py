"""Tokens per second of a run on the CPU, alone and beside busy processes, by how long the threads
of OpenMP spin where they wait for each other (GOMP_SPINCOUNT, lingua/__init__.py).

A thread that spins keeps its core from the one that it waits for, where others need cores too. Real
processes in turns, each the training program as it is.
"""

import statistics
import subprocess
import sys
from collections import defaultdict
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from apps.bench.launch import read_lines, run
from apps.bench.report import Report, quotients, spread
from lingua import SPIN_COUNT
from lingua.base.dump_dir import METRICS

BUSY = (0, 1, 2)  # processes of one thread that compute all the time
OWN = "300000"  # libgomp's own
SPINS = (OWN, SPIN_COUNT, "0")
STEPS, LOGGED = 30, 5  # the first line of metrics is left out


def measure(keys: list[str], repeats: int) -> Report:
    rates: dict[tuple[int, str], list[float]] = defaultdict(list)
    with TemporaryDirectory() as folder:
        tokens_per_s(keys, folder, 0, SPIN_COUNT)  # prepares the text
        for i, n, spin in product(range(repeats), BUSY, SPINS):
            print(f"round {i + 1} of {repeats}: {spin} spins, {n} busy", file=sys.stderr)
            rates[n, spin].append(tokens_per_s(keys, folder, n, spin))
    rows: list[dict[str, Any]] = []
    for n, spin in product(BUSY, SPINS):
        row: dict[str, Any] = {"busy processes": n, "GOMP_SPINCOUNT": int(spin)}
        row["tokens/s"] = spread(rates[n, spin])
        rows.append(row | {"over alone with 300,000": quotients(rates[n, spin], rates[0, OWN])})
    return Report(rows, [f"medians of {repeats} turns of {STEPS} steps"])


def tokens_per_s(keys: list[str], folder: str, n: int, spin: str) -> float:
    """Median rate of a run beside n busy processes."""
    words = [*keys, f"stop_at={STEPS}", f"logging.freq={LOGGED}", "checkpoint.dump.every=0"]
    with ExitStack() as ended, TemporaryDirectory() as dump_dir:
        for _ in range(n):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            ended.callback(busy.wait)
            ended.callback(busy.kill)
        words += [f"data.cache_dir={folder}", f"dump_dir={dump_dir}/run", "validation.every=0"]
        run("apps.main.train", words, variables={"GOMP_SPINCOUNT": spin})
        lines = read_lines(Path(dump_dir, "run", METRICS))[1:]
    return statistics.median(line["tokens_per_s"] for line in lines)
