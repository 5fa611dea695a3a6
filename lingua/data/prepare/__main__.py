"""Tokenize the text of a run without training:

    python -m lingua.data.prepare config=apps/main/configs/debug.yaml
    python -m lingua.data.prepare config=my.yaml processes=16
    srun --nodes 4 --ntasks-per-node 1 python -m lingua.data.prepare config=my.yaml

It takes the config of a training run and does what training does first. Any number of processes, on
any number of machines that share the folders, may run it at the same time, also beside training:
they share the work. Each may be killed; what it had finished remains.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from lingua.config.schema import Free, bounds
from lingua.data.args import DataArgs, ValidationArgs
from lingua.data.prepare.sources import prepare_sources
from lingua.tokenizer import build_tokenizer


@dataclass
class PrepareArgs:
    processes: Free[int | None] = None  # that tokenize on this machine; null: one per core
    app: Free[str | None] = None  # import path of the app that is trained, as in training
    data: DataArgs = field(default_factory=DataArgs)
    validation: ValidationArgs = field(default_factory=ValidationArgs)

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 1, "processes", most=4096)


def main() -> None:
    # Imported here: the worker processes import this module too, and need no torch.
    from lingua.app import choose_app
    from lingua.run_config import load_run

    argv = sys.argv[1:]
    app = choose_app(argv)
    args, notices = load_run(app, argv, part=PrepareArgs(data=app.config().data))
    report = partial(print, flush=True)
    for line in notices:
        report(line)
    tokenizer = build_tokenizer(args.data.tokenizer)
    prepare_sources(args.data, tokenizer, report, args.processes, args.validation.sources)


if __name__ == "__main__":
    from lingua.parallel.program import run_program

    run_program(main)
