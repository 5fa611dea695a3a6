"""What a run reads, without training:

    python -m lingua data show config=apps/main/configs/debug.yaml
    python -m lingua data show runs/debug step=100 row=3
    python -m lingua data show runs/debug step=100 worst=5

Without a step it shows the mixture, else one row as text, or the `worst` rows of the step: those
with the highest losses under the run's checkpoint that is nearest to it. The config is that of a
training run; keys that are not about data are ignored. Sources that are not tokenized yet are
tokenized first. Of a run, named by its dump dir, nothing is tokenized: its shards are read.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from lingua.base.errors import UserError
from lingua.base.format import printable
from lingua.config.schema import MAX_STEPS, Announced, Free, Guarded, bounds
from lingua.data.args import DataArgs
from lingua.tools.arguments import load_data, split_run


@dataclass
class ShowArgs:
    step: Free[int | None] = None  # the step, as metrics.jsonl counts them; null: the mixture
    row: Free[int] = 0  # row of the step's global batch, from 0 on
    worst: Free[int | None] = None  # rows of a run's step to show, the highest loss first
    device: Free[Literal["auto", "cpu", "cuda"]] = "auto"  # device that computes losses
    app: Free[str | None] = None  # import path of the run's app; null: the one that it names
    seed: Guarded[int] = 42  # seed of the run
    steps: Announced[int] = 1000  # steps of the whole run
    data: DataArgs = field(default_factory=DataArgs)

    def validate(self) -> Iterator[tuple[str, str]]:
        rows = self.data.global_batch_size
        if rows is None:
            need = "must be given here: a training run takes it from its number of devices, and "
            yield "data.global_batch_size", need + "writes it to <dump_dir>/config.yaml"
        else:
            for key, low, high in (("row", 0, rows - 1), ("worst", 1, rows)):
                if not low <= (getattr(self, key) or low) <= high:
                    yield key, f"must be {low} to {high}, as data.global_batch_size = {rows}"
        if self.step is None:
            for key in ("row", "worst"):
                if getattr(self, key):
                    yield key, "must be given together with step"
        elif self.row and self.worst:
            yield "row", "must not be given together with worst"
        yield from bounds(self, 1, "step", "steps", maximum=MAX_STEPS)


def main(argv: list[str]) -> None:
    run, words = split_run(argv)
    app, args = load_data(ShowArgs, words, __doc__)
    if run is None and args.worst is not None:
        raise UserError(
            f"worst = {args.worst}: needs the weights of a run; name its dump dir in place of "
            "config, such as python -m lingua data show runs/debug step=100 worst=5"
        )
    # Imported here, since --help needs neither torch nor numpy.
    from lingua.tokenizer.build import build_tokenizer
    from lingua.tools.inspect.show import describe_rows, describe_worst, open_run, prepare_rows

    tokenizer = build_tokenizer(args.data.tokenizer)
    shown = args.step, args.row, args.steps
    if run is None:
        rows = prepare_rows(args.data, args.seed, tokenizer)
        lines = describe_rows(args.data, rows, tokenizer, *shown)
    else:
        config, opened = open_run(run, app, args.data, args.seed, args.steps, tokenizer)
        if args.worst is None:
            lines = describe_rows(args.data, opened.rows, tokenizer, *shown)
        else:
            assert args.step is not None  # it is given together with worst
            lines = describe_worst(run, app, config, opened, args.step, args.worst, args.device)
    for line in lines:
        print(printable(line))
