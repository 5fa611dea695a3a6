"""Seconds from the start of the program to its first completed step, and what they go into.

Real processes, each the training program as it is, stamped from outside (`startup_probe.py`). Each
repeat starts twice on a new cache folder: once with token shards to build, once with them built.
"""

import json
import sys
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from apps.bench.launch import read_lines, run
from apps.bench.report import Report, spread
from lingua.base.dump_dir import METRICS

# What each part ends with is a stamp of the probe, the last one the line of step 1.
PARTS = {
    "torch": "Python and import torch",
    "imports": "the other imports",
    "config": "config",
    "process group": "process group and mesh",
    "data": "data: shards, held-out rows",
    "model": "model, optimizer, first rows",
    "first step": "first step, and its line",
}
CASES = {"built": "shards built", "to build": "shards to build"}


def measure(keys: list[str], repeats: int) -> Report:
    starts: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for repeat in range(repeats):
        with TemporaryDirectory() as folder:
            for case in ("to build", "built"):
                print(f"start {repeat + 1} of {repeats}, {CASES[case]}", file=sys.stderr)
                starts[case].append(start_once(keys, Path(folder), case))
    rows: list[dict[str, Any]] = []
    for part, name in {**PARTS, "all": "to the first completed step"}.items():
        cells = {CASES[c]: spread(seconds[part] for seconds in starts[c]) for c in CASES}
        rows.append({"seconds": name, **cells})
    return Report(rows, [f"medians of {repeats} starts of each"])


def start_once(keys: list[str], folder: Path, case: str) -> dict[str, float]:
    """Seconds of every part, and of all, of one start with token shards in `folder`/cache."""
    dump_dir = folder / case.replace(" ", "_")
    stamps_file = dump_dir.with_suffix(".json")
    places = [f"dump_dir={dump_dir}", f"data.cache_dir={folder}/cache"]
    begin = time.time()
    words = [str(stamps_file), *keys, *places, "stop_at=1", "logging.freq=1"]
    run("apps.bench.startup_probe", words)
    stamps = json.loads(stamps_file.read_text(encoding="utf-8"))
    [line] = read_lines(dump_dir / METRICS)
    stamps["first step"] = datetime.fromisoformat(line["created_at"]).timestamp()
    ends = [begin, *(stamps[part] for part in PARTS)]
    parts = {part: end - since for part, (since, end) in zip(PARTS, pairwise(ends), strict=True)}
    return {**parts, "all": ends[-1] - begin}
