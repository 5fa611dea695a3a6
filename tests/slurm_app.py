"""apps.main.train as tests on Slurm need it. A job's environment sets what happens to its ranks:

STEP_S: seconds that a step takes until the job is requeued, so that a test can meet it on its way.
FAIL_RANK: the rank that fails in step 3.
KILL_RANK: the rank that is killed in step 3 until the job is requeued.
MISTAKE: a text that all ranks refuse before they meet.
"""

import itertools
import os
import signal
import time
from dataclasses import replace
from typing import Any

from apps.main import app
from apps.main.config import TrainArgs
from apps.main.train import train
from lingua.app import Built
from lingua.base.errors import UserError
from lingua.config.load import load
from lingua.parallel.launch import detect_launch
from lingua.parallel.program import run_program
from lingua.run import samples
from lingua.run.start import check as check  # what lingua stool calls

samples.SAMPLE_TOKENS = 8  # of the text a finished run shows: it takes longer than the training


def build(args: TrainArgs) -> Built:
    built = app.build(args)
    first_start = "SLURM_RESTART_COUNT" not in os.environ
    step_s = float(os.environ.get("STEP_S", 0)) if first_start else 0.0
    rank = str(detect_launch().rank)
    fails = os.environ.get("FAIL_RANK") == rank
    is_killed = first_start and os.environ.get("KILL_RANK") == rank
    if mistake := os.environ.get("MISTAKE"):
        raise UserError(mistake)
    steps = itertools.count(1)

    def forward_pre(module: Any, inputs: Any) -> None:
        if not module.training:  # validation, or text
            return
        time.sleep(step_s)
        step = next(steps)
        if step == 3 and is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 3 and fails:
            raise RuntimeError("this rank fails, as FAIL_RANK asks")

    built.module.register_forward_pre_hook(forward_pre)
    return built


def main() -> None:
    train(replace(app, build=build), load(TrainArgs)[0])


if __name__ == "__main__":
    run_program(main)
