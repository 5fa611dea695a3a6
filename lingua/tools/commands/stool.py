"""Launch runs on Slurm or on this machine, one or a sweep, and show their status:

    python -m lingua stool config=apps/main/configs/debug.yaml launcher=local ngpu=2
    python -m lingua stool config=my.yaml nodes=2 ngpu=8 time=1-0 optim.lr=1e-3
    python -m lingua stool config=my.yaml sweep.optim.lr=1e-3,3e-4 at_once=2
    python -m lingua stool status runs/my

A launch validates the whole config, copies it and the code to the dump dir, and submits a job that
runs from there. Keys that are not listed here are those of the run.
"""

from lingua.base.errors import UserError
from lingua.config.help import asks_help, first_example


def main(argv: list[str]) -> None:
    if argv[:1] == ["status"] and not asks_help(argv):
        show_status(argv[1:])
        return
    if not argv:
        raise UserError(f"no run is given; an example: {first_example(__doc__)}")
    # Imported here, since it imports torch, which a status does not need.
    from lingua.tools.slurm.command_line import launch_command, show_help

    if asks_help(argv):
        show_help(argv, __doc__)
    launch_command(argv)


def show_status(folders: list[str]) -> None:
    from lingua.tools.slurm.status import status, status_table

    if len(folders) != 1:
        raise UserError("usage: python -m lingua stool status DIR")
    print(status_table(status(folders[0])))
