"""`python -m lingua.stool`: the command `python -m lingua stool`."""

import sys

from lingua.parallel.program import run_program

if __name__ == "__main__":
    from lingua.tools.slurm.command_line import main

    run_program(lambda: main(sys.argv[1:]))
