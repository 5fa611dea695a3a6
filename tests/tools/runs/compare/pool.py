"""The recorded pool of pairs: held-out losses of real tiny runs, as tests/records/pairs.py wrote
them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

RECORD = Path(__file__).parents[3] / "records" / "pairs.json"
POOL: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))["results"]
STEPS: list[int] = POOL["steps"]
LOSSES = {arm: np.array(runs) for arm, runs in POOL["runs"].items()}  # float64 [seeds, steps]
SEEDS = len(LOSSES["base"])
DEFAULTS = ["optim.lr=4.0e-3", "optim.name=adamw"]  # of small.yaml, for what the changes change


def write_run(folder: Path, words: list, steps: list, losses: list, hashes: str = "a") -> Path:
    """A dump dir with these held-out losses, and training losses that follow from them."""
    folder.mkdir(parents=True)
    OmegaConf.save(OmegaConf.from_dotlist(words), folder / "config.yaml")
    lines = [
        {"step": s, "loss": x, "grad_norm": 1.0, "lr": 1e-3, "batch_hash": f"{hashes}{s}"}
        for s, x in zip(steps, losses, strict=True)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [
        {"step": s, "source": "text", "nats_per_byte": x, "tokens": 1000, "bytes": 1000}
        for s, x in zip(steps, losses, strict=True)
    ]
    path = folder / "metrics.validation.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_pool(folder: Path, arms: list[str], seeds: int = SEEDS) -> None:
    """Dump dirs `<arm>-<seed>` of the pool's runs."""
    for arm in arms:
        change = POOL["changes"].get(arm, [])
        for seed in range(seeds):
            words = [*DEFAULTS, *POOL["base"], *change, f"seed={seed}"]
            name = f"{arm.replace(' ', '-')}-{seed}"
            write_run(folder / name, words, STEPS, LOSSES[arm][seed].tolist())
