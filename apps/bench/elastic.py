"""Seconds from the kill of one of four torchrun agents, with its worker, to the next completed
step, by part: with the settings of docs/machines.md, and with torchrun's own.

Each repeat kills another agent of a job that runs, and starts it again before the next. Parts are
seen from outside, in the process table, and stamped by rank 0 (`startup_probe.py`).
"""

import json
import random
import sys
import time
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from apps.bench.agents import OPTIONS, PAGE, Agents, environment, wait_until
from apps.bench.launch import read_lines, with_defaults
from apps.bench.report import Report, spread
from apps.bench.startup_probe import ENDS
from lingua.base.dump_dir import METRICS

N = 4  # agents, of one rank each
SETTINGS = {"docs/machines.md": PAGE, "torchrun's own": "is_host=0"}
STEPS = 20  # between the parts of a repeat
PATIENCE_S = 300.0
# What the time goes into, and the stamps of the probe that are in a part.
PARTS = {
    "detection: the other workers have ended": (),
    "agreement: new workers have started": (),
    "import": ("Python and config", "import torch", "the other imports"),
    "load": (*ENDS, "model, optimizer, first rows"),
    "first step": (),
}
# Small, so that what is measured is the way back to a step and not the step.
DEFAULTS = [
    "device=cpu", "data.seq_len=64", "data.batch_size=8",
    "data.global_batch_size=8", "model.dim=32", "model.n_heads=2", "model.n_layers=2",
    "checkpoint.dump.every=10", "checkpoint.dump.keep=2", "validation.every=0", "data.workers=0",
]  # fmt: skip


def measure(keys: list[str], repeats: int) -> Report:
    keys = [*with_defaults(DEFAULTS, keys), "steps=1000000", "logging.freq=1"]
    columns: dict[str, dict[str, Any]] = {}
    for name, conf in SETTINGS.items():
        with TemporaryDirectory() as folder:
            columns |= recover(keys, Path(folder), name, conf, repeats)
    parts = [*PARTS, "to the next completed step"]
    rows = [
        {"seconds": part} | {name: column.get(part, "") for name, column in columns.items()}
        for part in parts
    ]
    about = f"{N} agents of one rank; medians of {repeats} kills and returns, one cold start"
    return Report(rows, [about, *(f"{name}: {conf}" for name, conf in SETTINGS.items())])


def recover(
    keys: list[str], folder: Path, name: str, conf: str, repeats: int
) -> dict[str, dict[str, Any]]:
    """The columns of a job with these settings of the rendezvous."""
    metrics = folder / "run" / METRICS
    probe = ["-m", "apps.bench.startup_probe", f"{folder}/{{pid}}.json"]
    words = [*probe, *keys, f"dump_dir={folder}/run", f"data.cache_dir={folder}/cache"]
    kills, returns = [], []
    with Agents(folder, words, N, conf=conf, options=OPTIONS) as agents:
        begin = time.time()
        agents.start(*range(N))
        starts = [next_step(agents, folder, begin, set())]
        for repeat in range(repeats):
            print(f"{name}: kill {repeat + 1} of {repeats}", file=sys.stderr)
            take_steps(metrics)
            old = set(all_workers(agents))
            time.sleep(random.random())  # not at the same moment of a keep-alive
            begin = time.time()
            agents.kill(repeat % N)
            kills.append(next_step(agents, folder, begin, old))
            take_steps(metrics)
            old, begin = set(all_workers(agents)), time.time()
            agents.start(repeat % N)
            returns.append(next_step(agents, folder, begin, old))
    columns = {"cold start": starts, "kill": kills, "return": returns}
    return {
        f"{name}: {event}": {part: spread(s[part] for s in seconds) for part in seconds[0]}
        for event, seconds in columns.items()
    }


def next_step(agents: Agents, folder: Path, begin: float, old: set[int]) -> dict[str, float]:
    """Seconds of every part from `begin` to the first step of workers that are not in `old`."""
    wait_until(lambda: not old & set(all_workers(agents)), PATIENCE_S, "the end of all workers")
    ended = time.time()

    seen: dict[int, float] = {}  # rank 0 of each start, and since when

    def first_step() -> tuple[float, Path] | None:
        """When the workers of the start were there, and its stamps; a start may be cut short."""
        ranks = {pid: environment(pid) for pid in set(all_workers(agents)) - old}
        places = {int(env["RANK"]): pid for pid, env in ranks.items() if "RANK" in env}
        if {int(env.get("WORLD_SIZE", 0)) for env in ranks.values()} != {len(places)}:
            return None
        started = seen.setdefault(places[0], time.time())
        file = folder / f"{places[0]}.json"
        return (started, file) if file.exists() else None

    started, file = wait_until(first_step, PATIENCE_S, "a first step")
    written = file.stat().st_mtime
    line = wait_until(lambda: line_after(folder / "run" / METRICS, written), PATIENCE_S, "a line")
    stamps = json.loads(file.read_text(encoding="utf-8"))
    ends = [max(map(stamps.get, names)) for names in PARTS.values() if names]
    times = [begin, ended, started, *ends, at(line)]
    parts = dict(zip(PARTS, np.diff(times).tolist(), strict=True))
    return parts | {"to the next completed step": times[-1] - begin}


def all_workers(agents: Agents) -> list[int]:
    """Of all agents that run."""
    return [pid for i in list(agents.running) for pid in agents.workers(i)]


def line_after(metrics: Path, time_s: float) -> dict[str, Any] | None:
    """The first step that was logged after this time, in seconds since the epoch."""
    lines = read_lines(metrics) if metrics.exists() else []
    return next((line for line in lines if at(line) > time_s), None)


def at(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["created_at"]).timestamp()


def take_steps(metrics: Path) -> None:
    """Wait until the job has taken STEPS more steps."""
    begin = time.time()

    def done() -> bool:
        return sum(at(line) > begin for line in read_lines(metrics)) >= STEPS

    wait_until(done, PATIENCE_S, f"{STEPS} steps")
