"""Benchmark a checkpoint with the tasks of lm-evaluation-harness, or with tasks of our own:

    python -m apps.main.eval ckpt=runs/debug tasks=[arc_easy,hellaswag] num_fewshot=5
    python -m apps.main.eval ckpt=runs/debug tasks=[mine] task_dir=my_tasks limit=100
    torchrun --nproc-per-node 2 -m apps.main.eval ... distributed.tp_size=2
    python -m lingua.stool script=apps.main.eval ckpt=... tasks=[...] ngpu=8        a job on Slurm

Scores are the same on every topology. Results and samples go to the run's evals/<step>/, a line for
each task to its metrics.eval.jsonl. Needs the package lm_eval.
"""

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from omegaconf import MISSING

from lingua.app import named_app
from lingua.checkpoint.folder import Checkpoint
from lingua.checkpoint.retention import unmark
from lingua.config.load import flatten, load
from lingua.config.schema import Free
from lingua.errors import UserError
from lingua.inference.harness import (
    METRICS,
    WAITING,
    HarnessArgs,
    evaluate,
    find_tasks,
    make_folder,
    metrics_lines,
    open_tasks,
    table,
    write_results,
)
from lingua.inference.trained import locate, open_trained, read_trained
from lingua.monitor.logger import init_logger
from lingua.monitor.metrics import MetricsFile, WandbArgs, start_wandb, wandb_values
from lingua.parallel.launch import detect_launch, pick_device, start
from lingua.parallel.mesh import DistributedArgs, mesh_sizes, on_rank_0
from lingua.parallel.parallelize import check_layout
from lingua.parallel.program import run_program
from lingua.signals import take_signals

logger = logging.getLogger(__name__)


@dataclass
class EvalArgs(HarnessArgs):
    ckpt: Free[str] = MISSING  # a checkpoint's folder, or a run's: its newest checkpoint
    app: Free[str | None] = None  # import path of its app; null: the one that it names
    name: Free[str] = "eval"  # name of the job, where it is one
    # folder of everything that is written; null: evals/<step> of the run
    dump_dir: Free[str | None] = None
    context: Free[int | None] = None  # tokens the model sees at once; null: data.seq_len of the run
    wandb: Free[WandbArgs | None] = None  # Weights & Biases, when given: a run of its own
    tokenizer_path: Free[str | None] = None  # where the tokenizer lies now; null: where it lay
    device: Free[Literal["auto", "cpu", "cuda"]] = "auto"  # auto: cuda where there is one
    distributed: DistributedArgs = field(
        default_factory=lambda: DistributedArgs(model_dtype="fp32")
    )

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from super().validate()
        if self.context is not None and self.context < 1:
            yield "context", "must be at least 1, or null"


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    take_signals()
    args, _ = load(EvalArgs, argv)
    launch = detect_launch()
    device = pick_device(args.device, launch)
    mesh = start(device, launch, args.distributed, deterministic=False)
    init_logger(None, dist.get_rank())

    # ---- what can be wrong, before the model is loaded
    trained = open_trained("ckpt", args.ckpt, named_app(argv))
    tokenizer = trained.build_tokenizer(args.tokenizer_path)
    data = trained.args.data
    context = args.context or data.seq_len
    folder, metrics = places(args.dump_dir, trained.checkpoint)
    tasks: dict[str, Any] = {}  # of rank 0
    wandb_runs: list[Any] = []

    def prepare() -> None:
        make_folder(folder)
        tasks.update(open_tasks(args, context))
        if args.wandb is not None:
            wandb_runs.append(start_wandb(args.wandb, args.name, flatten(args), folder))

    on_rank_0(prepare)

    model = trained.load(args.distributed, mesh, device)
    results = evaluate(args, tasks, model, tokenizer, mesh, data.add_bos, context)

    def show() -> None:
        step = trained.checkpoint.step
        path = write_results(folder, results, step, flatten(args))
        write_lines(metrics, results, step)
        for wandb_run in wandb_runs:
            for line in metrics_lines(results, step):
                wandb_run.log(wandb_values("metrics.eval", line))
            wandb_run.finish()
        print(table(results))
        logger.info(f"step {step}: results and samples are in {path.parent}")
        unmark(trained.checkpoint.path, WAITING)

    on_rank_0(show)


def check(argv: list[str], world_size: int) -> tuple[EvalArgs, list[str]]:
    """The configuration of an evaluation to be launched with `world_size` processes, for
    lingua.stool. Raises UserError where `main` would refuse it before it looks at data."""
    args, notices = load(EvalArgs, argv)
    trained = read_trained("ckpt", locate("ckpt", args.ckpt), named_app(argv))
    trained.build_tokenizer(args.tokenizer_path)
    _, _, tp = mesh_sizes(args.distributed, world_size)
    check_layout(*trained.build(), tp)
    find_tasks(args)
    args.dump_dir = str(places(args.dump_dir, trained.checkpoint)[0])
    return args, notices


def places(dump_dir: str | None, checkpoint: Checkpoint) -> tuple[Path, Path]:
    """The folder of the results, and the file that collects them over the steps: the run's, where
    it is a folder of the run's evals/."""
    run = checkpoint.path.parent
    run = run.parent if run.name == "checkpoints" else run
    folder = run / "evals" / checkpoint.path.name if dump_dir is None else Path(dump_dir)
    collected = folder.parent.parent if folder.parent.name == "evals" else folder
    return folder, collected / f"{METRICS}.jsonl"


def write_lines(path: Path, results: dict[str, Any], step: int) -> None:
    try:
        file = MetricsFile(path)
        for line in metrics_lines(results, step):
            file.write(line)
        file.close()
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


if __name__ == "__main__":
    run_program(main)
