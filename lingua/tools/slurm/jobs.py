"""Slurm's jobs, as `stool` and a run that launches others see them."""

import os
import re

from lingua.base.errors import UserError
from lingua.parallel.slurm import run_slurm

# States of a job that Slurm does not start again by itself.
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"}
ENDED |= {"OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}

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
