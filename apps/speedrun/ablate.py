"""The parts of apps/speedrun: all of them, all but one, and some changes of one, over common seeds,
for a quarter of the steps.

What a run gave is added to FILE as soon as it ends, and a second start of the command goes on with
the runs that FILE lacks. Intervals are those of `lingua compare` with `variance=equal`.
"""

import json
import re
import shutil
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from apps.bench.launch import read_config, read_lines, train_seed
from apps.bench.report import Report
from apps.bench.turns import clock
from apps.speedrun import app
from lingua.base.dump_dir import CHECKPOINTS, METRICS, VALIDATION
from lingua.base.errors import UserError
from lingua.base.files import write_atomically
from lingua.config.load import flatten
from lingua.tools.runs.compare.statistics import pooled

FILE, FOLDER = Path("apps/speedrun/ablations.json"), Path("runs/ablations")
PLACES = re.compile(r"name|dump_dir|data\.(root|cache)_dir|(logging|checkpoint)\..*")
BASE, LEVEL = "all parts", 0.95
CHANGES = {
    "without n-grams": ["model.ngrams=1"],
    "without n-grams of three": ["model.ngrams=2"],
    "without Muon": ["optim.name=adamw"],
    "without QK-norm": ["model.qk_norm=null"],
    "without zero-initialised projections": ["model.init_std_factor=disabled"],
    "without smear": ["model.smear=false"],
    "without value embeddings": ["model.value_embeddings=false"],
    "without residual scales": ["model.residual_scales=false"],
    "without ReLU squared": ["model.activation=swiglu"],
    "without a cap of the logits": ["model.logit_cap=null"],
    "without BPE": ["data.tokenizer={name: bytes, path: null}"],
    "with n-grams of four": ["model.ngrams=4"],
    "with twice the rate of n-grams": ["optim.lr_scale={ngrams: 2}"],
}
Runs = dict[str, list[dict[str, Any]]]  # by change, for seed 0, 1, ...: loss, cpu_s, code


def measure(keys: list[str], repeats: int) -> Report:
    if repeats < 2:
        raise UserError("--repeats: must be at least 2, since one seed says nothing about chance")
    steps = read_config(keys, app).steps // 4
    keys = [*keys, f"steps={steps}", "checkpoint.dump.every=0", "validation.every=0"]
    config, defaults = flatten(read_config(keys, app)), flatten(app.config())
    recipe = {k: v for k, v in config.items() if v != defaults.get(k) and not PLACES.fullmatch(k)}
    runs, arms = read_runs(recipe), {BASE: list[str](), **CHANGES}
    for seed, name in product(range(repeats), arms):
        if len(runs.setdefault(name, [])) == seed:
            print(f"{name}, seed {seed}", file=sys.stderr)
            folder = FOLDER / f"{name.replace(' ', '-')}-{seed}"
            runs[name].append(train([*keys, *arms[name]], folder, seed))
            FILE.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"recipe": recipe, "runs": runs}, indent=1)
            write_atomically(FILE, f"{text}\n")
    return report({name: runs[name][:repeats] for name in arms}, steps)


def read_runs(recipe: dict[str, Any]) -> Runs:
    """The runs of FILE. Raises UserError where they are of another recipe."""
    if not FILE.exists():
        return {}
    content = json.loads(FILE.read_text(encoding="utf-8"))
    old, runs = content["recipe"], dict(content["runs"])
    if apart := [key for key in {**old, **recipe} if old.get(key) != recipe.get(key)]:
        need = f"in which {', '.join(apart)} differs; move it away to begin again"
        raise UserError(f"{FILE}: has runs of a recipe {need}")
    return runs


def train(keys: list[str], folder: Path, seed: int) -> dict[str, Any]:
    begin = clock()
    train_seed(keys, folder, seed)
    cpu_s = round(float((clock() - begin)[1]), 1)
    shutil.rmtree(folder / CHECKPOINTS)
    start = json.loads((folder / METRICS).read_text(encoding="utf-8").partition("\n")[0])
    loss = read_lines(folder / VALIDATION)[-1]["nats_per_byte"]
    return {"loss": loss, "cpu_s": cpu_s, "code": start["code"]}


def report(runs: Runs, steps: int) -> Report:
    losses = [{str(seed): run["loss"] for seed, run in enumerate(arm)} for arm in runs.values()]
    cpu_s = {name: np.median([run["cpu_s"] for run in arm]) for name, arm in runs.items()}
    codes = {run["code"] for arm in runs.values() for run in arm}
    result, mean = pooled(losses, LEVEL, blocks=True), np.mean([*losses[0].values()])
    assert result is not None  # several seeds, and every arm has all of them
    rows: list[dict[str, Any]] = [{"": BASE, "held-out": f"{mean:.4f}"}]
    for name, e in zip(CHANGES, result, strict=True):
        verdict = "worse" if e.mean > 0 else "better"
        row = {"": name, "held-out": f"{mean + e.mean:.4f}", "difference": f"{e.mean:+.4f}"}
        row[f"{LEVEL:.0%} interval"] = f"{e.low:+.4f} to {e.high:+.4f}"
        rows.append(row | {"verdict": verdict if e.excludes_zero else "cannot be told apart"})
    rows = [{**row, "processor s": round(cpu_s[row[""]])} for row in rows]
    notes = [f"{steps:,} steps, {len(losses[0])} seeds; nats per byte"]
    if len(codes) > 1:
        notes.append(f"the runs are of {len(codes)} versions of the code: {', '.join(codes)}")
    return Report(rows, notes, {"steps": steps, "runs": runs, "differences": result})
