"""Pairs of runs that share a seed: by how much sharing it reduces the variance of a difference.

Real runs of the training program, which stay in runs/pairs: the config as it is, and each change of
CHANGES to it, over the same seeds. Held-out losses are measured along the run. A second start takes
the runs that are there. One process after the other, forked from one that has imported torch.
"""

import json
import multiprocessing
import shlex
import sys
import sysconfig
from functools import partial
from pathlib import Path

import numpy as np

from apps.bench.report import Report
from apps.main import train
from lingua.errors import UserError
from lingua.format import align
from lingua.parallel.program import run_program

FOLDER = Path("runs/pairs")
# Text that every Python has: modules, but no tests and no installed packages.
FILES = "files: ['*.py', '[!st]*/*.py']"
TINY = [
    "steps=150",
    "data.seq_len=128",
    "data.batch_size=8",
    "data.global_batch_size=8",
    "data.workers=0",
    "data.on_bad_record=skip",
    "model.dim=64",
    "model.n_layers=2",
    "model.n_heads=2",
    "optim.warmup=15",
    "validation.every=25",
    "validation.tokens=20000",
    "checkpoint.dump.every=0",
    "device=cpu",
]
# The order of rows is a function of (seed, name of the source): the same text by another name has
# another order, and the same held-out documents. Micro-batches of 3 rows are the same mathematics.
CHANGES = {
    "learning rate": ["optim.lr=5.0e-3"],
    "width": ["model.dim=80"],
    "data order": ["data.sources={again: 1.0}", f"data.source_files={{again: {{{FILES}}}}}"],
    "optimizer": ["optim.name=muon"],
    "micro-batch": ["data.batch_size=3"],
}
BASE = ["data.sources={text: 1.0}", f"data.source_files={{text: {{{FILES}}}}}"]


def measure(keys: list[str], repeats: int = 10) -> Report:
    """`keys` is the command line of the training program; `repeats` is the number of seeds."""
    config = [key for key in keys if key.startswith(("config=", "app="))]
    given = [key for key in keys if key not in config]
    arms = {"base": BASE} | {name: [*BASE, *change] for name, change in CHANGES.items()}
    runs: dict[str, list[list[float]]] = {name: [] for name in arms}
    root = [f"data.root_dir={sysconfig.get_path('stdlib')}", f"data.cache_dir={FOLDER}/tokens"]
    steps: list[int] = []
    for seed in range(repeats):
        for name, change in arms.items():
            folder = FOLDER / f"{name.replace(' ', '-')}-{seed}"
            print(f"{folder}: run {seed * len(arms) + len(runs[name]) + 1}", file=sys.stderr)
            named = [f"name={folder.name}", f"dump_dir={folder}", f"seed={seed}"]
            _train([*config, *TINY, *root, *change, *given, *named])
            steps, losses = held_out(folder)
            runs[name].append(losses)
    results = {"base": [*TINY, *BASE, *given], "changes": CHANGES, "steps": steps, "runs": runs}
    return Report(_table(steps, runs), results)


def held_out(folder: Path) -> tuple[list[int], list[float]]:
    """Steps, and the held-out loss after each in nats per byte, of a run on one source."""
    text = (folder / "metrics.validation.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return [line["step"] for line in lines], [line["nats_per_byte"] for line in lines]


def _train(keys: list[str]) -> None:
    """One run in a process of its own: the training program sets up and leaves its process group
    once. Forked, so that imports are paid for once."""
    process = multiprocessing.get_context("fork").Process(target=_train_here, args=(keys,))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise UserError(f"apps.main.train {shlex.join(keys)}\nhas exit code {process.exitcode}")


def _train_here(keys: list[str]) -> None:
    run_program(partial(train.main, keys))


def _table(steps: list[int], runs: dict[str, list[list[float]]]) -> list[str]:
    """Of each change and step, how its paired differences vary beside unpaired ones."""
    rows = [("change", "step", "mean difference", "deviation: paired", "unpaired", "variances")]
    base = np.array(runs["base"])
    for name in CHANGES:
        arm = np.array(runs[name])
        paired = (arm - base).var(0, ddof=1)
        unpaired = arm.var(0, ddof=1) + base.var(0, ddof=1)
        for i, step in enumerate(steps):
            rows.append((
                name, f"{step}", f"{(arm - base).mean(0)[i]:+.5f}", f"{paired[i] ** 0.5:.2g}",
                f"{unpaired[i] ** 0.5:.2g}", f"{unpaired[i] / paired[i]:.2g}",
            ))  # fmt: skip
    return align(rows, left=1)
