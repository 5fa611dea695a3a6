"""Slurm's commands: for a job about itself, and for `stool` about jobs and partitions.

A run that Slurm stops early (its time limit is near, or another job preempts it) requeues its job,
which then resumes from the checkpoint.
"""

import logging
import os
import re

from lingua.errors import UserError
from lingua.slurm_command import run_slurm

# What Slurm sends ahead of a time limit (--signal) and on preemption; SIGINT comes from a person.
EARLY = ("SIGUSR2", "SIGTERM")
# States of a job that Slurm does not start again by itself.
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"}
ENDED |= {"OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}

logger = logging.getLogger(__name__)


# ---- in a job


def requeue(stopped_by: str | None) -> None:
    """Requeue this job where Slurm stopped it early; the last call of every rank. Does nothing
    outside of Slurm.

    Args:
        stopped_by: name of the signal that this rank received, if any.

    Raises:
        UserError: Slurm refuses.
    """
    import torch  # here, since `stool status` does not need it
    import torch.distributed as dist

    from lingua.parallel.launch import detect_launch
    from lingua.parallel.mesh import world_sum_

    if detect_launch().by != "slurm":
        return
    early = world_sum_(torch.tensor([stopped_by in EARLY]).long())
    if not early.item() or dist.get_rank() != 0:  # other ranks leave before Slurm ends them
        return
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


# ---- outside of jobs

# Variables of Slurm, MPI, torchrun and torch for the place of a process in its job, and of wandb
# for the address of its own process.
PLACE = re.compile(
    r"(SLURM|SLURMD|SRUN|PMI|PMIX|TORCHELASTIC|MASTER|GROUP|ROLE)_.*|(LOCAL_)?(RANK|WORLD_SIZE)"
    r"|(CUDA|ROCR|HIP)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK|WANDB_SERVICE"
)


def environment_of_another() -> dict[str, str]:
    """This process's environment, for a command that launches another job."""
    return {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or not PLACE.fullmatch(k)}


def job_states(ids: list[str]) -> dict[str, str]:
    """{job id: PENDING, RUNNING, FAILED, ...} of the jobs that Slurm still knows.

    The controller forgets ended jobs after minutes; accounting, where a cluster has it, does not.
    """
    states: dict[str, str] = {}
    if not ids:
        return states
    for command in (
        ["sacct", "--noheader", "--allocations", "--parsable2", "--format=JobID,State"],
        ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T"],
    ):
        try:
            shown = run_slurm(*command, f"--jobs={','.join(ids)}")
        except UserError:  # no accounting, or the controller knows none of the jobs
            continue
        for line in shown.splitlines():
            job, _, state = line.partition("|")
            states[job] = state.split()[0]  # "CANCELLED by 1000"
    return states
