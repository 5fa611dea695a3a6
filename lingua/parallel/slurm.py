"""Slurm's commands, as ranks in a job and `lingua stool` call them.

A run that Slurm stops early (its time limit is near, or another job preempts it) requeues its job,
which then resumes from the checkpoint.
"""

import logging
import os
import re
import signal
import subprocess

from lingua.base.errors import UserError
from lingua.parallel.environment import detect_launch
from lingua.parallel.signals import STOPPING

# What Slurm sends ahead of a time limit (--signal) and on preemption; SIGINT comes from a person.
EARLY = ("SIGUSR2", "SIGTERM")

logger = logging.getLogger(__name__)


def run_slurm(*command: str, stdin: str | None = None, env: dict[str, str] | None = None) -> str:
    """The output of one of Slurm's commands. Raises UserError with its message."""
    try:
        done = subprocess.run(command, input=stdin, env=env, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(f"{command[0]}: no such command on the PATH") from None
    if done.returncode:
        message = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise UserError(f"{command[0]}: {'; '.join(message.splitlines())}")
    return done.stdout


def set_rendezvous(env: dict[str, str]) -> None:
    """Set the rendezvous address to the first host of the step, and a port that differs from job to
    job and is below the ephemeral ports; where both are given, Slurm is not asked."""
    if "MASTER_ADDR" in env and "MASTER_PORT" in env:
        return
    names = env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"]
    first = run_slurm("scontrol", "show", "hostnames", names).split()[0]
    node = run_slurm("scontrol", "show", "node", "--oneliner", first)
    address = re.search(r"\bNodeAddr=(\S+)", node)  # may differ from the node's name in Slurm
    job, step = int(env["SLURM_JOB_ID"]), int(env["SLURM_STEP_ID"])
    os.environ.setdefault("MASTER_ADDR", address[1] if address else first)
    os.environ.setdefault("MASTER_PORT", str(20000 + (job + 997 * step) % 12000))


def requeue(signals: list[str]) -> None:
    """Requeue the job of this process, where Slurm stopped it early by one of the `signals`; the
    last call of every rank. Raises UserError where Slurm refuses."""
    early = not set(EARLY).isdisjoint(signals)
    if not early or detect_launch().rank != 0:  # other ranks leave before Slurm ends them
        return
    for number in STOPPING:  # squeue inherits this, and gets the step's signals too
        signal.signal(number, signal.SIG_IGN)
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:  # the id of an array's last job means the whole array
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    columns = "State:20,Requeue:10,BatchFlag:10,Reason:80"
    shown = run_slurm("squeue", "--noheader", f"--jobs={job}", f"--Format={columns}")
    state, may_requeue, batch, reason = shown.split(maxsplit=3)
    # COMPLETING: cancelled, requeued by someone else, or past its time limit before it had saved.
    if state != "RUNNING" and reason.strip() != "TimeLimit":
        logger.info(f"job {job} is not requeued: it was ended from outside")
    elif batch == "0":
        logger.info(f"job {job} is not requeued: it is interactive")
    elif may_requeue == "0":
        logger.info(f"job {job} is not requeued: it was submitted with --no-requeue")
    else:
        logger.info(f"job {job} is requeued, and will resume from the checkpoint")
        run_slurm("scontrol", "requeue", job)
