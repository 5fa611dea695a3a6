"""Evaluate a checkpoint on tasks of lm-evaluation-harness, or on your own tasks:

    python -m apps.main.eval ckpt=runs/debug tasks=[arc_easy,hellaswag] num_fewshot=5
    python -m apps.main.eval ckpt=runs/debug tasks=[mine] task_dir=my_tasks limit=100
    torchrun --nproc-per-node 2 -m apps.main.eval ckpt=runs/debug tasks=[arc_easy]
    python -m lingua.stool script=apps.main.eval ckpt=runs/debug tasks=[arc_easy] ngpu=8

Scores are the same on every topology. Results and samples are written to the run's evals/<step>/, a
line for each task to its metrics.eval.jsonl. Needs the package lm_eval.
"""

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from lingua.app import named_app
from lingua.checkpoint.folder import Checkpoint
from lingua.checkpoint.retention import unmark
from lingua.config.load import flatten, load
from lingua.config.schema import Free
from lingua.errors import UserError
from lingua.inference.harness import (
    METRICS,
    WAITING,
    Evaluator,
    HarnessArgs,
    find_tasks,
    load_tasks,
)
from lingua.inference.trained import OpenArgs, open_model, open_trained
from lingua.monitor.metrics import WandbArgs, append_line, start_wandb, wandb_values
from lingua.parallel.mesh import mesh_sizes, on_rank_0
from lingua.parallel.parallelize import check_layout
from lingua.parallel.program import run_program
from lingua.signals import take_signals

logger = logging.getLogger(__name__)


@dataclass
class EvalArgs(HarnessArgs, OpenArgs):
    name: Free[str] = "eval"  # name of the job, and of the wandb run
    dump_dir: Free[str | None] = None  # folder of all results; null: evals/<step> of the run
    wandb: Free[WandbArgs | None] = None  # Weights & Biases, when given: a run of its own

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from HarnessArgs.validate(self)
        yield from OpenArgs.validate(self)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    take_signals()
    args, _ = load(EvalArgs, argv)
    opened = open_model(args, argv)
    checkpoint = opened.trained.checkpoint
    folder, metrics = results_paths(args.dump_dir, checkpoint)
    wandb_run: Any = None  # on rank 0

    def prepare() -> None:
        nonlocal wandb_run
        try:
            folder.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
        if args.wandb is not None:
            wandb_run = start_wandb(args.wandb, args.name, flatten(args), folder)

    def report(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            append_line(metrics, line)
        if wandb_run is not None:
            for line in lines:
                wandb_run.log({"step": line["step"], **wandb_values(METRICS, line)})
            wandb_run.finish()

    tasks = load_tasks(args, opened.context)
    on_rank_0(prepare)  # finds mistakes before the model is loaded
    model = opened.trained.load(args.distributed, opened.mesh)
    of_model = (model, opened.tokenizer, opened.mesh, opened.add_bos, opened.context)
    Evaluator(args, *of_model).evaluate(tasks, folder, checkpoint.step, report)
    logger.info(f"step {checkpoint.step}: results and samples are in {folder}")
    on_rank_0(lambda: unmark(checkpoint.path, WAITING))


def check(argv: list[str], world_size: int) -> tuple[EvalArgs, list[str]]:
    """The configuration of an evaluation to be launched with `world_size` processes, and its
    notices, for lingua.stool.

    Raises:
        UserError: `main` would refuse it before it reads data.
    """
    args, notices = load(EvalArgs, argv)
    trained = open_trained("ckpt", args.ckpt, named_app(argv))
    trained.build_tokenizer(args.tokenizer_path)
    _, _, tp = mesh_sizes(args.distributed, world_size)
    check_layout(*trained.build(), tp)
    find_tasks(args)
    args.dump_dir = str(results_paths(args.dump_dir, trained.checkpoint)[0])
    return args, notices


def results_paths(dump_dir: str | None, checkpoint: Checkpoint) -> tuple[Path, Path]:
    """The folder of the results, and the file that collects them over the steps: in the run's
    folder where the results are in its evals/, else in the results' own."""
    run = checkpoint.path.parent
    run = run.parent if run.name == "checkpoints" else run
    folder = run / "evals" / checkpoint.path.name if dump_dir is None else Path(dump_dir)
    collected = folder.parent.parent if folder.parent.name == "evals" else folder
    return folder, collected / f"{METRICS}.jsonl"


if __name__ == "__main__":
    run_program(main)
