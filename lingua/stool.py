"""Launch runs on Slurm or on this machine, one or a sweep, and show their status:

    python -m lingua.stool config=apps/main/configs/debug.yaml launcher=local ngpu=2
    python -m lingua.stool config=my.yaml nodes=2 ngpu=8 time=1-0 optim.lr=1e-3
    python -m lingua.stool config=my.yaml sweep.optim.lr=1e-3,3e-4 at_once=2
    python -m lingua.stool status runs/my

A launch validates the whole config, copies it and the code to the dump dir, and submits a job that
runs from there. Keys that are not listed here are those of the run.
"""

import sys

from lingua.command import run_command
from lingua.slurm.status import main as show_status

if __name__ == "__main__":
    if sys.argv[1:2] == ["status"]:
        run_command(show_status)
    # Here, since importing torch takes seconds that a status does not need.
    from lingua.parallel.program import run_program
    from lingua.slurm.launch import main

    run_program(main)
