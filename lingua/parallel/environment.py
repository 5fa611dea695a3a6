"""What a launcher says and hears: the place of this process among those of the run, from the
variables that it sets, and torchrun's file for an error. It needs no torch."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from lingua.base.errors import UserError


@dataclass(frozen=True)
class Launch:
    """The place of this process among the processes of the run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    by: str = "python"  # "python", "torchrun" or "slurm"


def detect_launch(env: dict[str, str] | None = None) -> Launch:
    """Read the place of this process from torchrun's variables, else from those of a Slurm step.
    Raises UserError for one that has another value than those launchers set."""
    env = dict(os.environ) if env is None else env

    def number(name: str, default: str = "", minimum: int = 0, below: int = 1 << 31) -> int:
        text = env.get(name, default)
        if not text.isdecimal() or not minimum <= int(text[:20]) < below:
            need = f"must be a number from {minimum} to {below - 1}, as torchrun and srun set it"
            raise UserError(f"the environment variable {name}: {need}", local=True)
        return int(text)

    if "RANK" in env and "WORLD_SIZE" in env:
        world_size = number("WORLD_SIZE", minimum=1)
        return Launch(
            rank=number("RANK", below=world_size),
            world_size=world_size,
            local_rank=number("LOCAL_RANK", "0", below=world_size),
            local_world_size=number("LOCAL_WORLD_SIZE", "1", minimum=1),
            by="torchrun",
        )
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:  # a task of srun, not the batch script
        tasks = number("SLURM_STEP_NUM_TASKS", minimum=1)
        return Launch(
            rank=number("SLURM_PROCID", below=tasks),
            world_size=tasks,
            local_rank=number("SLURM_LOCALID", below=tasks),
            local_world_size=-(-tasks // number("SLURM_STEP_NUM_NODES", "1", minimum=1)),
            by="slurm",
        )
    return Launch()


def restarts_in_torchrun() -> bool:
    """Whether torchrun starts this process again after a failure, and as ranks join."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    return restarts and detect_launch().by == "torchrun"


def show_in_torchrun(text: str, later: bool = False) -> None:
    """Give torchrun the error of this rank, for the report of 25 lines with which it ends: it names
    the earliest one, by seconds, as the cause; `later`: another rank failed before."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()) + later)}
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
