"""Benchmarks while a run trains (`eval.*`): in its own processes, or each as a job of its own that
the run launches and does not wait for. `apps.main.eval` is the program of those jobs."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from lingua.checkpoint.retention import mark, marks, unmark
from lingua.checkpoint.save import publish_config
from lingua.config.load import flatten, to_yaml
from lingua.config.schema import Free
from lingua.errors import UserError
from lingua.inference.harness import (
    WAITING,
    HarnessArgs,
    evaluate,
    find_tasks,
    metrics_lines,
    open_tasks,
    table,
    write_results,
)
from lingua.parallel.mesh import on_rank_0
from lingua.signals import StopRequest
from lingua.slurm import launch as stool
from lingua.slurm.jobs import environment_of_another
from lingua.slurm.launch import split_arguments
from lingua.slurm.status import status

if TYPE_CHECKING:  # they import this module
    from apps.main.config import TrainArgs
    from apps.main.setup import Run

LAUNCH_S = 600.0  # Slurm's commands wait for minutes for a controller that does not answer

logger = logging.getLogger(__name__)


@dataclass
class EvaluationArgs(HarnessArgs):
    every: Free[int] = 1000  # steps between two evaluations; the last step is evaluated too
    # in the processes of the run, which waits (process), or each as a job of its own (slurm)
    launcher: Free[Literal["process", "slurm"]] = "process"
    # of such a job: keys of lingua.stool and of apps.main.eval, {nodes: 1, ngpu: 8, time: 60}
    job: Free[dict[str, Any]] = field(default_factory=dict)

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from super().validate()
        if self.every < 1:
            yield "every", "must be at least 1"

    def due(self, step: int, steps: int) -> bool:
        return step % self.every == 0 or step == steps


def check_evaluation(args: "TrainArgs") -> None:
    """Raises UserError where an evaluation would: of its tasks it looks at the names alone. By one
    process, of a config whose every value is resolved."""
    if args.eval is None:
        return
    try:
        if args.eval.launcher == "slurm":
            check_job(args)
        else:
            find_tasks(args.eval)
    except UserError as error:
        raise UserError(f"eval: {error}") from None


def check_job(args: "TrainArgs") -> None:
    """Have the job's own program judge it, of a checkpoint such as this run will save. Raises
    UserError where a launch would, but asks nothing of Slurm."""
    with TemporaryDirectory() as folder:
        checkpoint = publish_config(Path(folder), to_yaml(args))
        job, of_eval, sweep = split_arguments(job_words(args, checkpoint, 0))
        if job.launcher != "slurm":
            raise UserError(f"job.launcher = {job.launcher}: must be slurm, or left out")
        if sweep:
            raise UserError(f"job.sweep.{next(iter(sweep))}: must be left out, it is one job")
        try:
            stool.launch(replace(job, launcher="print", time=job.time or "UNLIMITED"), of_eval)
        except UserError as error:
            said = str(error).replace(f"{checkpoint}/", "this run's ")
            raise UserError(f"job.script = {job.script} would refuse its job: {said}") from None


def open_evaluation(args: "TrainArgs") -> dict[str, Any]:
    """The tasks with their data, on rank 0 (others get an empty dict). Called by every rank, before
    the run trains; raises UserError for whatever an evaluation could not do."""
    tasks: dict[str, Any] = {}

    def work() -> None:
        check_evaluation(args)
        try:
            tasks.update(open_tasks(args.eval, args.data.seq_len))
        except UserError as error:
            raise UserError(f"eval: {error}") from None

    if args.eval is not None:
        on_rank_0(work)
    return tasks


def evaluate_step(args: "TrainArgs", run: "Run", stop: StopRequest) -> None:
    """Evaluate the model as it is, or have its checkpoint evaluated. What fails is told, and
    training goes on; an evaluation is left where the run is asked to stop."""
    with run.report.paused():
        try:
            if args.eval.launcher == "slurm":
                run.saver.wait()
                on_rank_0(lambda: launch(args, run))
            else:
                evaluate_here(args, run, stop)
        except UserError as error:  # on every rank
            logger.error(f"step {run.progress.step} is not evaluated: {error}")


def run_missed_evaluation(args: "TrainArgs", run: "Run", stop: StopRequest) -> None:
    """Evaluate the step that a run goes on from, if a former start was stopped before it did."""
    step = run.progress.step
    if args.eval is None or step == 0 or not args.eval.due(step, args.steps):
        return
    folder = folder_of(args, step)
    # Or it was left to a job.
    if on_rank_0(lambda: not any((*folder.glob("results_*"), *folder.glob("job_id")))):
        evaluate_step(args, run, stop)


def folder_of(args: "TrainArgs", step: int) -> Path:
    return Path(args.dump_dir).absolute() / "evals" / f"{step:010d}"


def evaluate_here(args: "TrainArgs", run: "Run", stop: StopRequest) -> None:
    step, data = run.progress.step, args.data
    results = evaluate(
        args.eval,
        run.tasks,
        run.model,
        run.tokenizer,
        run.mesh,
        data.add_bos,
        data.seq_len,
        lambda: stop.signal is not None,
    )

    def tell() -> None:
        run.report.evaluation(metrics_lines(results, step))
        logger.info(f"step {step} on benchmarks:\n{table(results).strip()}")
        write_results(folder_of(args, step), results, step, flatten(args.eval))

    on_rank_0(tell)


# ------------------------------------------------------------------------------------------- jobs


def job_words(args: "TrainArgs", checkpoint: Path, step: int) -> list[str]:
    """The command line of lingua.stool for the job that evaluates a checkpoint; `eval.job` has the
    last word."""
    given = {f.name: getattr(args.eval, f.name) for f in fields(HarnessArgs)}
    given = {"script": "apps.main.eval"} | given | args.eval.job
    words = [f"name={args.name}-eval-{step}", f"dump_dir={folder_of(args, step)}"]
    words += ["dirs_exists_ok=true", f"ckpt={checkpoint}", *wandb_words(args)]
    return [*words, *(f"{key}={json.dumps(value)}" for key, value in given.items())]


def wandb_words(args: "TrainArgs") -> list[str]:
    """An evaluation is a wandb run of its own, in the same group as the run that it evaluates: two
    processes cannot write into one."""
    wandb = args.logging.wandb
    if wandb is None:
        return []
    given = asdict(replace(wandb, name=None, group=wandb.group or args.name, job_type="eval"))
    return [f"wandb.{key}={json.dumps(value)}" for key, value in given.items()]


def launch(args: "TrainArgs", run: "Run") -> None:
    """Launch the evaluation of the checkpoint just saved; on rank 0. Raises UserError."""
    log_failed_jobs(args, run)
    step = run.progress.step
    checkpoint = (run.saver.root / f"{step:010d}").absolute()
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint} was not saved")
    # In a process of its own: neither this one's place in its job nor its libraries are the job's.
    command = [sys.executable, "-m", "lingua.stool", *job_words(args, checkpoint, step)]
    waited_for = WAITING in marks(checkpoint)  # by a job of a former start
    try:
        mark(checkpoint, WAITING)  # until it is evaluated: the job may start after many a save
        done = subprocess.run(
            command, env=environment_of_another(), capture_output=True, text=True, timeout=LAUNCH_S
        )
        failure = done.stderr.strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    if failure:
        if not waited_for:
            unmark(checkpoint, WAITING)
        raise UserError(f"its job was not launched: {failure}")
    logger.info(f"step {step} is evaluated by a job: {done.stdout.splitlines()[0]}")


def log_failed_jobs(args: "TrainArgs", run: "Run") -> None:
    """Say, once, which jobs have failed; on rank 0."""
    jobs = folder_of(args, 0).parent
    if not any(jobs.glob("*/job_id")):
        return
    for job in status(jobs):
        if job.failed and job.job_id not in run.told:
            run.told.add(job.job_id)
            why = "; ".join(job.errors) or f"see {jobs / job.name / 'logs'}"
            logger.error(f"job {job.job_id}, which evaluates {job.name}, is {job.state}: {why}")
