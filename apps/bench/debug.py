"""The debug run from nothing to its end: how long it takes, and the held-out loss it reaches.

A real process, `python -m apps.main.train`, with a dump dir and a token cache of its own.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from apps.bench.report import Report, spread
from lingua.errors import UserError
from lingua.format import align


def measure(keys: list[str]) -> Report:
    """`keys` is the command line of the training program."""
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        ours = [f"data.cache_dir={folder}/cache", f"dump_dir={run}"]
        command = [sys.executable, "-m", "apps.main.train", *keys, *ours]
        start = time.perf_counter()
        code = subprocess.run(command, stdout=sys.stderr).returncode
        wall_s = time.perf_counter() - start
        if code != 0:
            raise UserError(f"{' '.join(command)}\nleft with exit code {code}")
        metrics = [line for line in _lines(run / "metrics.jsonl") if "loss" in line]
        held_out = _lines(run / "metrics.validation.jsonl")
    last = metrics[-1]
    since = [0, *(line["step"] for line in metrics)]
    trained_s, waited_s = (
        sum(
            line[key] * (line["step"] - before)
            for line, before in zip(metrics, since, strict=False)
        )
        for key in ("step_time_s", "data_time_s")
    )
    tokens_per_s = spread([line["tokens_per_s"] for line in metrics])
    results = {
        "wall_s": wall_s,
        "training_s": trained_s,
        "waiting_for_data_s": waited_s,
        "steps": last["step"],
        "tokens": last["tokens"],
        "tokens_per_s": tokens_per_s,
        "peak_mem_gib": last["peak_mem_gib"],
        "held_out": held_out,
    }
    rows = [
        ("", "median", "range"),
        ("wall time, s", f"{wall_s:.1f}", ""),
        ("of it training, s", f"{trained_s:.1f}", ""),
        ("of that waiting for data, %", f"{100 * waited_s / trained_s:.3f}", ""),
        ("steps", f"{last['step']:,}", ""),
        ("tokens", f"{last['tokens']:,}", ""),
        (
            "tokens per second, by log line",
            f"{tokens_per_s.median:,.0f}",
            f"{tokens_per_s.low:,.0f} to {tokens_per_s.high:,.0f}",
        ),
        ("most memory, GiB", f"{last['peak_mem_gib']:.2f}", ""),
    ]
    for line in held_out:
        name = f"held-out {line['source']} after step {line['step']:,}, nats per byte"
        rows.append((name, f"{line['nats_per_byte']:.4f}", ""))
    return Report(align(rows, left=1), results)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
