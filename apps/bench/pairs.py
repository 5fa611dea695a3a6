"""Pairs of runs that share a seed: by how much sharing it reduces the variance of a difference.

Real runs of the training program, which stay in runs/pairs: the config as it is, and each change of
CHANGES to it, over the same seeds. Held-out losses are measured along the run. A second start uses
the runs that exist.
"""

import sys
import sysconfig
from pathlib import Path

import numpy as np

from apps.bench.launch import read_lines, run, with_defaults
from apps.bench.report import Report
from lingua.base.format import align

FOLDER = Path("runs/pairs")
# Text that every Python has: modules, but no tests and no installed packages.
FILES = "files: ['*.py', '[!st]*/*.py']"
TINY = [
    "steps=150", "data.seq_len=128", "data.batch_size=8", "data.global_batch_size=8",
    "data.workers=0", "data.on_bad_record=skip", "model.dim=64", "model.n_layers=2",
    "model.n_heads=2", "optim.warmup=15", "validation.every=25", "validation.tokens=20000",
    "checkpoint.dump.every=0", "device=cpu",
]  # fmt: skip
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


def measure(keys: list[str], repeats: int) -> Report:
    given = [key for key in keys if not key.startswith(("config=", "app="))]
    arms = {"base": BASE} | {name: [*BASE, *change] for name, change in CHANGES.items()}
    runs: dict[str, list[list[float]]] = {name: [] for name in arms}
    root = [f"data.root_dir={sysconfig.get_path('stdlib')}", f"data.cache_dir={FOLDER}/tokens"]
    steps: list[int] = []
    for seed in range(repeats):
        for name, change in arms.items():
            folder = FOLDER / f"{name.replace(' ', '-')}-{seed}"
            print(f"{folder}: run {seed * len(arms) + len(runs[name]) + 1}", file=sys.stderr)
            named = [f"name={folder.name}", f"dump_dir={folder}", f"seed={seed}"]
            run("apps.main.train", [*with_defaults([*TINY, *root, *change], keys), *named])
            lines = read_lines(folder / "metrics.validation.jsonl")  # of one source
            steps = [line["step"] for line in lines]
            runs[name].append([line["nats_per_byte"] for line in lines])
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
    results = {"base": [*TINY, *BASE, *given], "changes": CHANGES, "steps": steps, "runs": runs}
    return Report(align(rows, left=1), results)
