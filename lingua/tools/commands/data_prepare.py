"""Tokenize the text of a run without training:

    python -m lingua data prepare config=apps/main/configs/debug.yaml
    python -m lingua data prepare config=my.yaml processes=16

It takes the config of a training run and does what training does first, on one machine. It may be
killed and run again: what it had finished remains. A second one waits for the first.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from lingua.config.schema import Free, bounds
from lingua.data.args import DataArgs, ValidationArgs
from lingua.tools.arguments import load_data


@dataclass
class PrepareArgs:
    processes: Free[int | None] = None  # processes on this machine; null: one per core
    app: Free[str | None] = None  # import path of the app that is trained, as in training
    data: DataArgs = field(default_factory=DataArgs)
    validation: ValidationArgs = field(default_factory=ValidationArgs)

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 1, "processes", maximum=4096)


def main(argv: list[str]) -> None:
    _, args = load_data(PrepareArgs, argv, __doc__)
    # Imported here, since --help needs no numpy.
    from lingua.data.sources import prepare_sources
    from lingua.tokenizer.build import build_tokenizer

    tokenizer, report = build_tokenizer(args.data.tokenizer), partial(print, flush=True)
    prepare_sources(args.data, tokenizer, report, args.processes, args.validation.sources)
