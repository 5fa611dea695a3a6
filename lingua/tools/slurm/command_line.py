"""Launch runs on Slurm or on this machine, one or a sweep, and show their status:

    python -m lingua stool config=apps/main/configs/debug.yaml launcher=local ngpu=2
    python -m lingua stool config=my.yaml nodes=2 ngpu=8 time=1-0 optim.lr=1e-3
    python -m lingua stool config=my.yaml sweep.optim.lr=1e-3,3e-4 at_once=2
    python -m lingua stool status runs/my

A launch validates the whole config, copies it and the code to the dump dir, and submits a job that
runs from there. Keys that are not listed here are those of the run.
"""

import shlex
import signal
import sys
from dataclasses import fields

import yaml

from lingua.base.dump_dir import TRAIN_LOG
from lingua.base.errors import UserError
from lingua.config.help import asks_help, first_example, print_help_if_asked
from lingua.config.load import load
from lingua.tools.slurm.job import JobArgs
from lingua.tools.slurm.launch import import_script, launch
from lingua.tools.slurm.status import status, status_table


def main(argv: list[str]) -> None:
    if not argv:
        raise UserError(f"no run is given; an example: {first_example(__doc__)}")
    if asks_help(argv):
        show_help(argv)
    if argv[0] != "status":
        launch_command(argv)
    elif len(argv) == 2:
        print(status_table(status(argv[1])))
    else:
        raise UserError("usage: python -m lingua stool status DIR")


def split_values(key: str, text: str) -> list[str]:
    """The values of `sweep.key=a,b`, as written: a comma in brackets or quotes is part of one."""
    flow = f"[{text}]"
    try:
        nodes = yaml.compose(flow).value
    except (yaml.YAMLError, RecursionError):
        nodes = []
    if not nodes:
        raise UserError(f"sweep.{key} = {text}: must be values separated by commas")
    return [flow[node.start_mark.index : node.end_mark.index] for node in nodes]


def split_arguments(argv: list[str]) -> tuple[JobArgs, list[str], dict[str, list[str]]]:
    """A command line: the arguments of the job, those of the run, and the values of a sweep."""
    job_keys = {f.name for f in fields(JobArgs)}
    job_words, run_words, sweep = [], [], {}
    for word in argv:
        key, _, value = word.partition("=")
        if key.startswith("sweep."):
            key = key.removeprefix("sweep.")
            if key in sweep:
                raise UserError(f"sweep.{key} is given twice; its values are separated by commas")
            sweep[key] = split_values(key, value)
        elif key.partition(".")[0] in job_keys:
            job_words.append(word)
        else:
            run_words.append(word)
    return load(JobArgs, job_words)[0], run_words, sweep


def show_help(argv: list[str]) -> None:
    """Help about the keys of a job; `--help GROUP` also about those of its run. Exits."""
    groups = [word for word in argv if "=" not in word and not word.startswith("-")]
    if {group.partition(".")[0] for group in groups} <= {f.name for f in fields(JobArgs)}:
        print_help_if_asked(JobArgs, argv, __doc__)
    job, _, _ = split_arguments([word for word in argv if "=" in word])
    import_script(job).check(argv, 1)


def launch_command(argv: list[str]) -> None:
    """Launch what a command line asks for, and print where its runs are. Exits with the code of a
    run on this machine. Raises UserError."""

    def leave(number: int, frame: object) -> None:
        print(f"stopped by {signal.Signals(number).name}", file=sys.stderr)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)  # commands that run now end, half a copy is removed
    job, arguments, sweep = split_arguments(argv)
    launched = launch(job, arguments, sweep)
    if isinstance(launched, str):
        print(launched, end="")
        print("it is not submitted; its first lines show how to", file=sys.stderr)
    elif launched[0].job_id is None:
        sys.exit(max(run.exit_code or 0 for run in launched))
    else:
        root = launched[0].dump_dir.parent if sweep else launched[0].dump_dir
        job_id = launched[0].job_id.partition("_")[0]
        runs = f": {len(launched)} runs" if len(launched) > 1 else ""
        print(f"job {job_id} was submitted{runs}")
        print(f"  folder  {root}")
        print(f"  watch   python -m lingua stool status {shlex.quote(str(root))}")
        if not sweep:
            print(f"          tail -F {shlex.quote(str(root / TRAIN_LOG))}")
        print(f"  cancel  scancel {job_id}")
