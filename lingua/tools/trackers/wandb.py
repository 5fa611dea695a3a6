"""Weights & Biases as a tracker of a run."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lingua.base.dump_dir import WANDB_ID
from lingua.monitor.args import WandbArgs

FINISH_S = 25.0  # for what is not sent yet; the process waits for it once more when it ends


class Wandb:
    """The wandb run of a dump dir: a new one, or the run that `<dump_dir>/wandb_id` names, resumed.

    `step` is a metric and the x-axis of the others: wandb's own step cannot go back, which a
    resumed run does.
    """

    def __init__(
        self, args: WandbArgs, name: str, config: dict[str, Any], folder: Path, step: int
    ) -> None:
        import wandb

        # Without a network its end would wait for ever, here or when the process ends.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(FINISH_S))
        os.environ.setdefault("WANDB_FINISH_TIMEOUT_RAISES", "true")
        id_file = folder / WANDB_ID
        settings = asdict(args) | {"name": args.name or name, "dir": args.dir or str(folder)}
        run_id = id_file.read_text().strip() if id_file.exists() else None
        self.table = wandb.Table
        self.run = wandb.init(
            **settings, config=config, allow_val_change=True, id=run_id, resume="allow"
        )
        id_file.write_text(self.run.id + "\n")
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.run.log({"step": step, **values})

    def samples(self, step: int, source: str, pairs: Sequence[tuple[str, str]]) -> None:
        table = self.table(columns=["prompt", "text"], data=[list(pair) for pair in pairs])
        self.log(step, {f"samples/{source}": table})

    def finish(self) -> None:
        self.run.finish()
