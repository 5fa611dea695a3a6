"""Evaluate a checkpoint on tasks of lm-evaluation-harness, or on your own tasks:

    python -m apps.main.eval ckpt=runs/debug tasks=[arc_easy,hellaswag] num_fewshot=5
    python -m apps.main.eval ckpt=runs/debug tasks=[mine] task_dir=my_tasks limit=100
    torchrun --nproc-per-node 2 -m apps.main.eval ckpt=runs/debug tasks=[arc_easy]
    python -m lingua stool script=apps.main.eval ckpt=runs/debug tasks=[arc_easy] ngpu=8

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
from lingua.base.dump_dir import CHECKPOINTS, EVALS, EVALUATION
from lingua.base.errors import UserError
from lingua.checkpoint.retention import mark_file
from lingua.checkpoint.source import TensorSource
from lingua.config.load import flatten, load
from lingua.config.schema import Free
from lingua.monitor.args import WAITING, HarnessArgs, LoggingArgs, WandbArgs
from lingua.monitor.metrics import append_line
from lingua.parallel.args import mesh_sizes
from lingua.parallel.mesh import on_rank_0
from lingua.parallel.plan import check_layout
from lingua.parallel.program import run_program
from lingua.parallel.signals import take_signals
from lingua.tools.exchange.trained import OpenArgs, open_model, open_trained
from lingua.tools.inference.harness import Evaluator, find_tasks, load_tasks
from lingua.tools.trackers import Trackers, check_packages

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
    args, _ = load(EvalArgs, argv, program_doc=__doc__)
    opened = open_model(args, argv)
    source = opened.trained.source
    step = source.step or 0
    folder, metrics = results_paths(args.dump_dir, source)
    trackers: list[Trackers] = []  # on rank 0

    def prepare() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
        to = LoggingArgs(wandb=args.wandb)
        check_packages(to)
        trackers.append(Trackers(to, args.name, flatten(args), folder))

    def report(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            append_line(metrics, line)
            trackers[0].log(EVALUATION, line)
        trackers[0].finish()

    tasks = load_tasks(args, opened.context)
    on_rank_0(prepare)  # finds mistakes before the model is loaded
    model = opened.trained.load(args.distributed, opened.mesh)
    opened_model = (model, opened.tokenizer, opened.mesh, opened.add_bos, opened.context)
    Evaluator(args, *opened_model).evaluate(tasks, folder, step, report)
    logger.info(f"step {step}: results and samples are in {folder}")
    if source.checkpoint is not None:
        on_rank_0(lambda: mark_file(source.path, WAITING).unlink(missing_ok=True))


def check(argv: list[str], world_size: int) -> tuple[EvalArgs, list[str]]:
    """The configuration of an evaluation to be launched with `world_size` processes, and its
    notices, for lingua stool.

    Raises:
        UserError: `main` would refuse it before it reads data.
    """
    args, notices = load(EvalArgs, argv)
    app, tokenizer_path = named_app(argv), args.tokenizer_path
    trained = open_trained("ckpt", args.ckpt, app, tokenizer_path, alone=True, base=args.base_model)
    trained.build_tokenizer()
    _, _, tp = mesh_sizes(args.distributed, world_size)
    check_layout(*trained.build(), tp)
    find_tasks(args)
    args.dump_dir = str(results_paths(args.dump_dir, trained.source)[0])
    return args, notices


def results_paths(dump_dir: str | None, source: TensorSource) -> tuple[Path, Path]:
    """The folder of the results, and the file that collects them over the steps: in the run's
    folder where the results are in its evals/, else in the results' own. Raises UserError."""
    if dump_dir is None and source.checkpoint is None:
        raise UserError(f"dump_dir: must be given, since {source.path} is no checkpoint of a run")
    run = source.path.parent
    run = run.parent if run.name == CHECKPOINTS else run
    folder = run / EVALS / source.path.name if dump_dir is None else Path(dump_dir)
    collected = folder.parent.parent if folder.parent.name == EVALS else folder
    return folder, collected / EVALUATION


if __name__ == "__main__":
    run_program(main)
