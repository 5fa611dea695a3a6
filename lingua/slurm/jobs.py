"""Slurm, asked in its own commands: by a job about itself, by `stool` about jobs and partitions.

A run that Slurm stops early (its time limit is near, or another job takes its place) asks to be
queued again; the job that then starts goes on from what was saved.
"""

import logging
import os
import re
import subprocess

import torch
import torch.distributed as dist

from lingua.errors import UserError
from lingua.parallel.launch import detect_launch
from lingua.parallel.mesh import world_sum_

# What Slurm sends ahead of a time limit (--signal), and on preemption. SIGINT is a person's.
EARLY = ("SIGUSR2", "SIGTERM")
# States of a job that Slurm will not start again by itself.
ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL")
ENDED += ("OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")

logger = logging.getLogger(__name__)


def ask(*command: str, given: str | None = None) -> str:
    """What a command of Slurm answers, on stdout. Raises UserError with its own words."""
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(
            f"{command[0]}: no such command here; Slurm must be installed and on the PATH "
            "(launcher=local runs a job without it)"
        ) from None
    if done.returncode:
        words = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise UserError(f"{command[0]}: {'; '.join(words.splitlines())}")
    return done.stdout


# ------------------------------------------------------------------------------------- in a job


def requeue(stopped_by: str | None) -> None:
    """Queue this job again where Slurm stopped it. The last thing every rank of it does.

    Args:
        stopped_by: name of the signal that this rank got, if any.

    Raises:
        UserError: Slurm refuses.
    """
    if detect_launch().by != "slurm":
        return
    early = world_sum_(torch.tensor([stopped_by in EARLY]).long())
    if early.item() and dist.get_rank() == 0:  # the others leave before Slurm ends them
        _requeue()


def _requeue() -> None:
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:  # the id of an array's last member names all of it
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    columns = "State:20,Requeue:10,BatchFlag:10,Reason:80"
    shown = ask("squeue", "--noheader", f"--jobs={job}", f"--Format={columns}")
    state, may_requeue, batch, reason = shown.split(maxsplit=3)
    # COMPLETING: cancelled, or queued again by someone else; or out of time, sooner than it saved.
    ended = state != "RUNNING" and reason.strip() != "TimeLimit"
    for kept, why in (
        (ended, "was ended from outside"),
        (batch == "0", "is interactive"),
        (may_requeue == "0", "was submitted with --no-requeue"),
    ):
        if kept:
            logger.info(f"job {job}, which {why}, does not queue itself again")
            return
    logger.info(f"job {job} is queued again, and goes on from there")
    ask("scontrol", "requeue", job)


# ------------------------------------------------------------------------------- outside of jobs

# Variables that say where in its job a process is, of Slurm, MPI, torchrun and torch, and where
# wandb's own process for it listens.
PLACE = re.compile(
    r"(SLURM|SLURMD|SRUN|PMI|PMIX|TORCHELASTIC|MASTER|GROUP|ROLE)_.*|(LOCAL_)?(RANK|WORLD_SIZE)"
    r"|(CUDA|ROCR|HIP)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK|WANDB_SERVICE"
)


def environment_of_another() -> dict[str, str]:
    """This process's environment, for a command that launches another job."""
    return {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or not PLACE.fullmatch(k)}


def partition_limit(partition: str | None) -> str:
    """The longest time a job may take in a partition, as sbatch takes it; None: the default one."""
    shown = ask("scontrol", "show", "partition", "--oneliner", *([partition] if partition else []))
    for line in shown.splitlines():
        values = dict(re.findall(r"(\w+)=(\S+)", line))
        if partition or values.get("Default") == "YES":
            return values["MaxTime"]
    raise UserError("partition must be given: this cluster has no default one")


def seconds_of(time: str) -> int | None:
    """Of a time limit in any of sbatch's forms; None where it is none, or sets no limit."""
    form = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if form is None:
        return None
    days, *parts = (int(part) if part else None for part in form.groups())
    parts = [part for part in parts if part is not None]
    # m, m:s and h:m:s; behind days also h and h:m
    first = 3600 if days is not None or len(parts) == 3 else 60
    weights = (first, first // 60, 1)
    return (days or 0) * 86400 + sum(p * w for p, w in zip(parts, weights, strict=False)) or None


def job_states(ids: list[str]) -> dict[str, str]:
    """{job id: PENDING, RUNNING, FAILED, ...} of those that Slurm still knows.

    Its controller forgets ended jobs after minutes; accounting, where a cluster has it, does not.
    """
    states: dict[str, str] = {}
    if not ids:
        return states
    for command in (
        ["sacct", "--noheader", "--allocations", "--parsable2", "--format=JobID,State"],
        ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T"],
    ):
        try:
            shown = ask(*command, f"--jobs={','.join(ids)}")
        except UserError:  # no accounting; none of these jobs is known
            continue
        for line in shown.splitlines():
            job, _, state = line.partition("|")
            states[job] = state.split()[0]  # of "CANCELLED by 1000"
    return states
