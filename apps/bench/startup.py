"""Seconds from the start of the program to its first completed step, and what they go into.

Real processes, each the training program as it is, stamped from outside (`startup_probe.py`). Each
repeat starts twice on a new cache folder: once with token shards to build, once with them built.
"""

import json
import sys
import time
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from apps.bench.launch import read_lines, run
from apps.bench.report import Report, spread
from lingua.base.dump_dir import METRICS

CASES = ("shards to build", "shards built")  # in this order: the first start builds them


def measure(keys: list[str], repeats: int) -> Report:
    starts: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for repeat in range(repeats):
        with TemporaryDirectory() as folder:
            for case in CASES:
                print(f"start {repeat + 1} of {repeats}, {case}", file=sys.stderr)
                starts[case].append(start_once(keys, Path(folder), case))
    rows: list[dict[str, Any]] = []
    for part in starts[CASES[0]][0]:
        cells = {case: spread(parts[part] for parts in starts[case]) for case in CASES}
        rows.append({"seconds": part, **cells})
    return Report(rows, [f"medians of {repeats} starts of each"])


def start_once(keys: list[str], folder: Path, case: str) -> dict[str, float]:
    """Seconds of every part, and of all, of one start with token shards in `folder`/cache."""
    dump_dir, stamps_file = folder / case, folder / f"{case}.json"
    places = [f"dump_dir={dump_dir}", f"data.cache_dir={folder}/cache"]
    begin = time.time()
    words = [str(stamps_file), *keys, *places, "stop_at=1", "logging.freq=1"]
    run("apps.bench.startup_probe", words)
    stamps = json.loads(stamps_file.read_text(encoding="utf-8"))
    [line] = read_lines(dump_dir / METRICS)
    stamps["first step, and its line"] = datetime.fromisoformat(line["created_at"]).timestamp()
    parts = np.diff([*stamps.values()], prepend=begin).tolist()
    return {**dict(zip(stamps, parts, strict=True)), "to the first completed step": sum(parts)}
