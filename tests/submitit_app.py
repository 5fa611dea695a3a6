"""An app whose first starts are stopped, as a job of submitit is. Its environment says how:

SIGNALS: what the last rank sends itself in the second step of a start; ERROR: what it raises.
STOPS: the number of starts that are stopped (1).
"""

import os
import signal
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from apps.main import app as main_app
from lingua.run import samples

samples.SAMPLE_TOKENS = 8  # of the text that a finished run shows
steps: list[int] = []


def probe(run: Any) -> None:
    steps.append(run.progress.step)
    stopped = run.report.start <= int(os.environ.get("STOPS", 1))
    if len(steps) == 2 and stopped and dist.get_rank() == dist.get_world_size() - 1:
        for name in os.environ.get("SIGNALS", "").split():
            if name == "ERROR":
                raise RuntimeError("as SIGNALS asks")
            os.kill(os.getpid(), signal.Signals[name])


app = replace(main_app, path="tests.submitit_app", probe=probe)
