"""`python -m lingua.stool --help`: runs on Slurm. The code is in lingua.slurm.launch."""

from lingua.parallel.program import run_program
from lingua.slurm.launch import JobArgs, launch, main

__all__ = ["JobArgs", "launch"]

if __name__ == "__main__":
    run_program(main)
