"""Pairs of runs that share a seed: by how much sharing it reduces the variance of a difference.

python -m tests.records.pairs --json tests/records/pairs.json

Real runs of the training program, which stay in runs/pairs: a second start uses those that exist.
"""

import argparse
import shlex
import sys
import sysconfig
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from apps.bench.__main__ import CONFIG
from apps.bench.launch import read_lines, train_seed, with_defaults
from apps.bench.report import Report, show
from lingua.base.dump_dir import VALIDATION
from lingua.parallel.program import run_program

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
# A change without a mathematical effect: the backward recomputes the forward.
SAME = {"recomputation": ["distributed.activation_checkpointing=full"]}
# Half as many pairs of longer runs.
LONG_STEPS, LONG = 600, {"learning rate": CHANGES["learning rate"]}
BASE = ["data.sources={text: 1.0}", f"data.source_files={{text: {{{FILES}}}}}"]


def measure(keys: list[str], repeats: int) -> Report:
    given = [key for key in keys if not key.startswith(("config=", "app="))]
    steps, runs = measure_arms(CHANGES | SAME, keys, repeats)
    long = [f"steps={LONG_STEPS}", f"validation.every={LONG_STEPS // 6}"]
    long_steps, long_runs = measure_arms(LONG, [*long, *keys], (repeats + 1) // 2, "long-")
    rows: list[dict[str, Any]] = []
    for at, (base, *arms) in ((steps, runs.items()), (long_steps, long_runs.items())):
        for name, losses in arms:
            difference = np.subtract(losses, base[1])
            paired = difference.var(0, ddof=1)
            unpaired = np.var(losses, 0, ddof=1) + np.var(base[1], 0, ddof=1)
            for numbers in zip(at, difference.mean(0), paired, unpaired, strict=True):
                step, mean, variance, sum_of_variances = numbers
                row = {"change": name, "step": step, "mean difference": f"{mean:+.5f}"}
                row |= {"deviation: paired": variance**0.5, "unpaired": sum_of_variances**0.5}
                rows.append(
                    row | {"variances": sum_of_variances / variance if variance else np.inf}
                )
    same = {name: runs.pop(name) for name in SAME}
    results = {
        "base": [*TINY, *BASE, *given], "changes": CHANGES, "steps": steps, "runs": runs,
        "same": {"changes": SAME, "steps": steps, "runs": {"base": runs["base"], **same}},
        "long": {"changes": LONG, "steps": long_steps, "runs": long_runs},
    }  # fmt: skip
    return Report(rows, [], results)


def measure_arms(
    changes: dict[str, list[str]], keys: list[str], repeats: int, prefix: str = ""
) -> tuple[list[int], dict[str, list[list[float]]]]:
    """(steps, losses at them of each seed, by arm) of BASE and of each change to it."""
    arms = {"base": list[str](), **changes}
    runs: dict[str, list[list[float]]] = {name: [] for name in arms}
    root = [f"data.root_dir={sysconfig.get_path('stdlib')}", f"data.cache_dir={FOLDER}/tokens"]
    for seed, name in product(range(repeats), arms):
        folder = FOLDER / f"{prefix}{name.replace(' ', '-')}-{seed}"
        print(folder, file=sys.stderr)
        train_seed(with_defaults([*TINY, *root, *BASE, *arms[name]], keys), folder, seed)
        lines = read_lines(folder / VALIDATION)  # from one source
        runs[name].append([line["nats_per_byte"] for line in lines])
    return [line["step"] for line in lines], runs


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.records.pairs")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="changes the configuration")
    parser.add_argument("--repeats", type=int, default=10, help="pairs of each change")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the losses here")
    options = parser.parse_intermixed_args()
    if options.repeats < 1:
        parser.error("--repeats: must be at least 1")
    command = shlex.join(["python", "-m", "tests.records.pairs", *sys.argv[1:]])
    keys = with_defaults([f"config={CONFIG}"], options.keys)
    show(measure(keys, options.repeats), command, options.json)


if __name__ == "__main__":
    run_program(main)
