"""apps.main.train as tests on Slurm need it. A job's environment says what is done to its ranks:

STEP_S: seconds that a step takes until the job is requeued, so that a test can meet it on its way.
FAIL_RANK: the rank that fails in step 3.
"""

import itertools
import os
import time
from typing import Any

from apps.main import train as app
from apps.main.train import Built, TrainArgs
from lingua.parallel.launch import detect_launch
from lingua.parallel.program import run_program

app.SAMPLE_TOKENS = 8  # of the text a finished run shows: it takes longer than the training


def build(args: TrainArgs) -> Built:
    built = app.build(args)
    first_start = "SLURM_RESTART_COUNT" not in os.environ
    step_s = float(os.environ.get("STEP_S", 0)) if first_start else 0.0
    fails = os.environ.get("FAIL_RANK") == str(detect_launch().rank)
    steps = itertools.count(1)

    def forward_pre(module: Any, inputs: Any) -> None:
        step = next(steps)
        if step <= args.steps:  # what comes after is validation and text
            time.sleep(step_s)
        if step == 3 and fails:
            raise RuntimeError("this rank was told to fail")

    built.module.register_forward_pre_hook(forward_pre)
    return built


def check(argv: list[str], world_size: int) -> tuple[TrainArgs, list[str]]:
    return app.check(argv, world_size)


if __name__ == "__main__":
    run_program(lambda: app.main(TrainArgs, build))
