"""The recipe of apps/speedrun with each of its parts taken out, and with each of the others put in,
over common seeds, for a quarter of its steps.

Real runs of the training program. What each gave is added to FILE as soon as it ends, and a second
start of the command goes on with the runs that FILE lacks. Intervals are those of `lingua compare`
for several arms: one variance of losses by arm and seed, and all of them hold together.
"""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from apps.bench.launch import read_config, read_lines, run
from apps.bench.report import Report
from apps.bench.turns import clock
from apps.speedrun import app
from lingua.base.dump_dir import CHECKPOINTS, METRICS, VALIDATION
from lingua.base.errors import UserError
from lingua.base.files import write_atomically
from lingua.base.format import align
from lingua.config.load import flatten
from lingua.tools.runs.compare.statistics import Estimate, pooled

FILE, FOLDER = Path("apps/speedrun/ablations.json"), Path("runs/ablations")
BASE, LEVEL = "the recipe", 0.95
PLACES = re.compile(r"name|dump_dir|data\.(root|cache)_dir|logging\..*|checkpoint\..*")
CHANGES = {
    "without n-grams": ["model.ngrams=1"],
    "without n-grams of three": ["model.ngrams=2"],
    "without Muon": ["optim.name=adamw"],
    "without QK-norm": ["model.qk_norm=null"],
    "without zero-initialised projections": ["model.init_std_factor=disabled"],
    "without smear": ["model.smear=false"],
    "without value embeddings": ["model.value_embeddings=false"],
    "with residual scales": ["model.residual_scales=true"],
    "with ReLU squared": ["model.activation=relu2"],
    "with a cap of the logits": ["model.logit_cap=15"],
}
Runs = dict[str, dict[str, dict[str, Any]]]  # by change and seed: loss, cpu_s, code


def measure(keys: list[str], repeats: int) -> Report:
    if repeats < 2:
        raise UserError("--repeats: must be at least 2, since one seed says nothing about chance")
    steps = read_config(keys, app).steps // 4
    keys = [*keys, f"steps={steps}", "checkpoint.dump.every=0", "validation.every=0"]
    config, defaults = flatten(read_config(keys, app)), flatten(app.config())
    recipe = {k: v for k, v in config.items() if v != defaults.get(k) and not PLACES.fullmatch(k)}
    runs = read_runs(recipe)
    arms = {BASE: list[str]()} | CHANGES
    for seed in map(str, range(repeats)):
        for name, change in arms.items():
            if seed not in runs.setdefault(name, {}):
                print(f"{name}, seed {seed}", file=sys.stderr)
                runs[name][seed] = train([*keys, *change], f"{name.replace(' ', '-')}-{seed}", seed)
                FILE.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(
                    FILE, json.dumps({"recipe": recipe, "runs": runs}, indent=1) + "\n"
                )
    seeds = [str(seed) for seed in range(repeats)]
    return report({name: [runs[name][seed] for seed in seeds] for name in arms}, steps)


def read_runs(recipe: dict[str, Any]) -> Runs:
    """The runs of FILE. Raises UserError where they are of another recipe."""
    if not FILE.exists():
        return {}
    content = json.loads(FILE.read_text(encoding="utf-8"))
    old, runs = content["recipe"], content["runs"]
    if old != json.loads(json.dumps(recipe)):
        apart = [key for key in {**old, **recipe} if old.get(key) != recipe.get(key)]
        need = f"differs in {', '.join(apart)}; move the file away to begin again"
        raise UserError(f"{FILE}: has runs of a recipe that {need}")
    return {name: dict(by_seed) for name, by_seed in runs.items()}


def train(keys: list[str], name: str, seed: str) -> dict[str, Any]:
    folder = FOLDER / name
    begin = clock()
    run("apps.main.train", [*keys, f"name={name}", f"dump_dir={folder}", f"seed={seed}"])
    cpu_s = round(float((clock() - begin)[1]), 1)
    shutil.rmtree(folder / CHECKPOINTS)
    text = (folder / METRICS).read_text(encoding="utf-8")
    [*_, start] = (line for line in map(json.loads, text.splitlines()) if "topology" in line)
    loss = read_lines(folder / VALIDATION)[-1]["nats_per_byte"]
    return {"loss": loss, "cpu_s": cpu_s, "code": start["code"]}


def report(runs: dict[str, list[dict[str, Any]]], steps: int) -> Report:
    losses = [{str(i): one["loss"] for i, one in enumerate(arm)} for arm in runs.values()]
    cpu_s = {name: float(np.median([one["cpu_s"] for one in arm])) for name, arm in runs.items()}
    result, codes = (
        pooled(losses, LEVEL, blocks=True),
        {o["code"] for a in runs.values() for o in a},
    )
    assert result is not None  # several seeds, all with every arm
    mean = float(np.mean(list(losses[0].values())))
    rows = [("", "held-out", "difference", f"{LEVEL:.0%} interval", "verdict", "processor s")]
    rows.append((BASE, f"{mean:.4f}", "", "", "", f"{cpu_s[BASE]:.0f}"))
    for name, e in zip(CHANGES, result.estimates, strict=True):
        interval = f"{e.low:+.4f} to {e.high:+.4f}"
        cells = f"{mean + e.mean:.4f}", f"{e.mean:+.4f}", interval, verdict(e)
        rows.append((name, *cells, f"{cpu_s[name]:.0f}"))
    lines = align(rows, left=1)
    lines += ["", f"after {steps:,} steps, {len(losses[0])} seeds; nats per byte, lower is better"]
    if len(codes) > 1:
        lines.append(f"the runs are of {len(codes)} versions of the code: {', '.join(codes)}")
    return Report(lines, {"steps": steps, "runs": runs, "differences": result.estimates})


def verdict(e: Estimate) -> str:
    return "cannot be told apart" if not e.excludes_zero else "worse" if e.mean > 0 else "better"
