"""Benchmarks while a run trains (`eval.*`): in its own processes, or each as a job of its own,
which the run launches and does not wait for. `apps.main.eval` is the program of those jobs."""

import json
import logging
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from lingua.base.dump_dir import EVALS, JOB_ID, LOGS, RESULTS, step_folder
from lingua.base.errors import UserError
from lingua.checkpoint.retention import mark_file, marks
from lingua.checkpoint.save import publish
from lingua.config.load import to_yaml
from lingua.monitor.args import WAITING, HarnessArgs, WandbArgs
from lingua.parallel.mesh import on_rank_0, world_sum_
from lingua.parallel.signals import StopRequest
from lingua.run.args import RunArgs
from lingua.run.run import Run
from lingua.tools.inference.harness import Evaluator, find_tasks, load_tasks
from lingua.tools.slurm.command_line import split_arguments
from lingua.tools.slurm.launch import check_launch
from lingua.tools.slurm.status import environment_of_another, status

LAUNCH_S = 600.0  # Slurm's commands wait for minutes for a controller that does not answer

logger = logging.getLogger(__name__)


def check_benchmarks(args: RunArgs) -> None:
    """Raise UserError where an evaluation would; of its tasks only the names are checked. By one
    process, of a config whose every value is resolved."""
    if args.eval is None:
        return
    if args.eval.launcher == "process":
        find_tasks(args.eval)
        return
    # The job's own program checks it, for a checkpoint such as this run will save, without Slurm.
    with TemporaryDirectory() as folder:
        checkpoint = publish_config(Path(folder), to_yaml(args))
        job, eval_arguments, sweep = split_arguments(job_arguments(args, checkpoint, 0))
        if job.launcher != "slurm" or sweep:
            raise UserError("eval.job: must not have the keys launcher and sweep")
        try:
            check_launch(replace(job, time=job.time or "UNLIMITED"), eval_arguments)
        except UserError as error:
            why = str(error).replace(f"{checkpoint}/", "this run's ")
            raise UserError(f"eval.job.script = {job.script} would refuse its job: {why}") from None


def publish_config(root: Path, config: str) -> Path:
    """A checkpoint of step 0 without tensors, in an empty folder: the configuration of a model that
    is not trained yet. By one process."""
    folder, final = root / "config", root / step_folder(0)
    folder.mkdir()
    publish(folder, final, 0, {}, {}, config)
    return final


class Benchmarks:
    """The benchmarks of a run. Made and called by every rank."""

    def __init__(self, args: RunArgs) -> None:
        """Load the tasks and their data, before the run trains. Raises UserError as load_tasks."""
        assert args.eval is not None
        self.tasks = load_tasks(args.eval, args.data.seq_len)
        self._logged: set[str] = set()  # failed jobs

    def evaluate(self, run: Run, stop: StopRequest) -> bool:
        """Evaluate the model as it is, or launch a job for its checkpoint. A failure is logged and
        training continues; an evaluation stops where the run is asked to stop. Returns whether any
        rank was asked to."""
        args, data, step = run.args, run.args.data, run.progress.step
        with run.report.paused():
            try:
                if args.eval.launcher == "slurm":
                    run.saver.wait()
                    on_rank_0(lambda: self._launch(run))
                else:
                    model = (run.model, run.tokenizer, run.mesh, data.add_bos, data.seq_len)
                    evaluator = Evaluator(args.eval, *model, lambda: stop.signal is not None)
                    folder = results_folder(args, step)
                    evaluator.evaluate(self.tasks, folder, step, run.report.evaluation)
            except UserError as error:  # on every rank
                logger.error(f"step {step} is not evaluated: {error}")
        return bool(world_sum_(torch.tensor([stop.signal is not None])))

    def evaluate_missed(self, run: Run, stop: StopRequest) -> None:
        """Run the missed evaluation of the step that a run resumes from, if one was due."""
        step = run.progress.step
        if step == 0 or not run.args.evaluation_due(step):
            return
        folder = results_folder(run.args, step)
        # with JOB_ID, a job was launched for it
        if on_rank_0(lambda: not any((*folder.glob(RESULTS), *folder.glob(JOB_ID)))):
            self.evaluate(run, stop)

    def _launch(self, run: Run) -> None:
        """Launch the evaluation of the checkpoint just saved; on rank 0. Raises UserError."""
        self._log_failed_jobs(run.args)
        step = run.progress.step
        checkpoint = (run.saver.root / step_folder(step)).absolute()
        if not checkpoint.is_dir():
            raise UserError(f"{checkpoint} was not saved")
        # In a process of its own, without this job's place in Slurm and its loaded libraries.
        command = [sys.executable, "-m", "lingua.stool", *job_arguments(run.args, checkpoint, step)]
        env, failure = environment_of_another(), ""
        waited_for = WAITING in marks(checkpoint)  # by the job of an earlier process
        try:
            # It is kept until it is evaluated: the job may start much later.
            mark_file(checkpoint, WAITING).touch()
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=LAUNCH_S
            )
            failure = done.stderr.strip() if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            failure = str(error)
        if failure:
            if not waited_for:
                mark_file(checkpoint, WAITING).unlink(missing_ok=True)
            raise UserError(f"its job was not launched: {failure}")
        logger.info(f"step {step} is evaluated by a job: {done.stdout.splitlines()[0]}")

    def _log_failed_jobs(self, args: RunArgs) -> None:
        """Log each failed job once; on rank 0."""
        jobs = results_folder(args, 0).parent
        for job in status(jobs) if any(jobs.glob(f"*/{JOB_ID}")) else ():
            if job.failed and job.job_id not in self._logged:
                self._logged.add(job.job_id)
                why = "; ".join(job.errors) or f"see {job.row.folder / LOGS}"
                step = job.row.folder.name
                logger.error(f"job {job.job_id}, which evaluates {step}, is {job.state}: {why}")


def results_folder(args: RunArgs, step: int) -> Path:
    return Path(args.dump_dir or "").absolute() / EVALS / step_folder(step)


def job_arguments(args: RunArgs, checkpoint: Path, step: int) -> list[str]:
    """The arguments of lingua stool for the job that evaluates a checkpoint. Keys of `eval.job`
    come last, so they win."""
    assert args.eval is not None
    values = {f.name: getattr(args.eval, f.name) for f in fields(HarnessArgs)}
    values |= {"script": "apps.main.eval", "app": args.app}
    if "wandb" in args.logging.trackers:
        wandb = args.logging.wandb or WandbArgs()
        # A wandb run of its own in the training run's group: two processes cannot write into one.
        job_wandb = replace(wandb, name=None, group=wandb.group or args.name, job_type="eval")
        values |= {f"wandb.{key}": value for key, value in asdict(job_wandb).items()}
    values |= args.eval.job
    app = values.pop("app")  # not quoted: it is read before the command line is parsed
    words = [f"name={args.name}-eval-{step}", f"dump_dir={results_folder(args, step)}"]
    words += ["dirs_exists_ok=true", f"ckpt={checkpoint}", f"app={app}"]
    return [*words, *(f"{key}={json.dumps(value)}" for key, value in values.items())]
