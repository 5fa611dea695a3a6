"""Train a model, or resume its training:

    python -m lingua train config=apps/main/configs/debug.yaml
    python -m lingua train config=my.yaml name=second optim.lr=1e-3 app=my_app

Mistakes of the configuration are printed before the seconds in which torch is imported.
"""

import gc
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn, cast

from lingua.app import choose_app, main_program
from lingua.base.format import printable
from lingua.checkpoint.run_config import load_run
from lingua.config.values import read_files
from lingua.parallel.environment import detect_launch
from lingua.parallel.program import exit_stopped, run_program
from lingua.run.args import RunArgs

if TYPE_CHECKING:
    from lingua.run.loop import Loop


def main(argv: list[str] | None = None, loop: str | None = None, doc: str | None = None) -> None:
    """Train what a command line asks for.

    Args:
        loop: the module with the loop, a lingua.run.loop.Loop; None: apps.main.train.
        doc: what `--help` begins with; None: the lines above.
    """
    argv = sys.argv[1:] if argv is None else argv
    files = read_files(argv)
    app = choose_app(argv, files)
    args: RunArgs
    args, notices = load_run(app, argv, program_doc=doc or __doc__, files=files)
    if detect_launch().rank == 0:
        for line in [*notices, f"{args.name}: training {app.path} in {args.folder}"]:
            with suppress(OSError):  # a full disk, which the log will report, ends no run
                print(printable(line), flush=True)
    program = load_loop(loop)
    gc.freeze()  # what is imported stays: run_program froze only what came before
    if stopped_by := program.train(app, args):
        exit_stopped(stopped_by)


def load_loop(name: str | None = None) -> "Loop":
    """Import the loop of a module, or that of apps.main. Raises UserError where this installation
    has none."""
    return cast("Loop", import_module(name or main_program()))


def run_loop(loop: str, doc: str | None) -> NoReturn:
    """The program of a module with a loop, named by its import path."""
    run_program(lambda: main(loop=loop, doc=doc))
