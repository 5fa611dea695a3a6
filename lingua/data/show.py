"""What a run reads, without training:

    python -m lingua.data.show config=apps/main/configs/debug.yaml
    python -m lingua.data.show runs/debug step=100 row=3
    python -m lingua.data.show runs/debug step=100 worst=5

Without a step it shows the mixture, else one row as text, or the `worst` rows of the step: those
with the highest losses under the run's checkpoint that is nearest to it. The config is that of a
training run; keys that are not about data are ignored. Sources that are not tokenized yet are
tokenized first. Of a run, named by its dump dir, nothing is tokenized: its shards are read.
"""

# A program, which no module imports: it may import packages above this one.

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lingua.app import App, choose_app
from lingua.checkpoint.folder import Checkpoint, Progress, find, read_state
from lingua.command import split_folders
from lingua.config.load import load, read_saved
from lingua.config.schema import MOST_STEPS, Announced, Free, Guarded, bounds
from lingua.data.args import DataArgs
from lingua.data.chat import ChatRows
from lingua.data.describe import describe_mixture, describe_row, stream_of
from lingua.data.documents import document_marks
from lingua.data.prepare.sources import prepare_sources
from lingua.data.rows import OpenData, Rows
from lingua.data.text import TextData
from lingua.errors import UserError
from lingua.format import counted, printable
from lingua.inference.row_losses import RowLosses, nearest, row_losses
from lingua.inference.trained import open_trained
from lingua.parallel.launch import Launch, pick_device, start
from lingua.parallel.mesh import DistributedArgs
from lingua.parallel.program import run_program
from lingua.records import Record
from lingua.run_config import load_run
from lingua.tokenizer import Tokenizer, build_tokenizer


@dataclass
class ShowArgs:
    step: Free[int | None] = None  # the step, as metrics.jsonl counts them; null: the mixture
    row: Free[int] = 0  # of the step's global batch, the first is 0
    worst: Free[int | None] = None  # of a run: so many rows of the step, the highest loss first
    device: Free[Literal["auto", "cpu", "cuda"]] = "auto"  # that computes losses
    app: Free[str | None] = None  # import path of the run's app; null: the one that it names
    seed: Guarded[int] = 42  # of the run
    steps: Announced[int] = 1000  # of the whole run
    data: DataArgs = field(default_factory=DataArgs)

    def validate(self) -> Iterator[tuple[str, str]]:
        rows = self.data.global_batch_size
        if rows is None:
            need = "must be given here: a training run takes it from its number of devices, and "
            yield "data.global_batch_size", need + "writes it to <dump_dir>/config.yaml"
        else:
            for key, least, most in (("row", 0, rows - 1), ("worst", 1, rows)):
                if not least <= (getattr(self, key) or least) <= most:
                    yield key, f"must be {least} to {most}, as data.global_batch_size = {rows}"
        if self.step is None:
            for key in ("row", "worst"):
                if getattr(self, key):
                    yield key, "must be given together with step"
        elif self.row and self.worst:
            yield "row", "must not be given together with worst"
        yield from bounds(self, 1, "step", "steps", most=MOST_STEPS)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        load(ShowArgs, argv)
    runs, words = split_folders(argv)
    if len(runs) > 1 or (runs and any(word.startswith("config=") for word in words)):
        raise UserError(f"{', '.join(runs)}: must be one dump dir of a run, or else config=FILE")
    for line in show_run(Path(runs[0]), words) if runs else show_config(words):
        print(printable(line))


def show_config(words: list[str]) -> Iterator[str]:
    """What a config describes. Its sources are tokenized where they are not."""
    args = read_arguments(choose_app(words), words)
    if args.worst is not None:
        raise UserError(
            f"worst = {args.worst}: needs the weights of a run; name its dump dir in place of "
            "config, such as python -m lingua.data.show runs/debug step=100 worst=5"
        )
    tokenizer = build_tokenizer(args.data.tokenizer)
    sources = prepare_sources(args.data, tokenizer, report)
    stream, data = args.data.row_stream(sources, args.seed), args.data
    chat = ChatRows(stream, data.seq_len, data.n_views, tokenizer.vocab_size)
    yield from describe(args, stream if data.chat is None else chat, tokenizer)


def show_run(run: Path, words: list[str]) -> Iterator[str]:
    """What a run has read or will read, of any app."""
    config = run / "config.yaml"
    if not config.is_file():
        raise UserError(f"{run}: must be the dump dir of a run, with its config.yaml")
    words = [f"config={config}", *words]
    app = choose_app(words)
    args = read_arguments(app, words)
    of_run: Any = read_saved(app.config, config)
    of_run.data, of_run.seed = args.data, args.seed
    tokenizer = build_tokenizer(args.data.tokenizer)
    data: OpenData = (app.data or TextData()).open(of_run, tokenizer)
    if args.worst is None:
        yield from describe(args, data.rows, tokenizer)
    else:
        yield from describe_worst(run, app, args, of_run, data)


def read_arguments(app: App, words: list[str]) -> ShowArgs:
    args, notices = load_run(app, words, part=ShowArgs(data=app.config().data))
    for line in notices:
        report(line)
    return args


def describe(args: ShowArgs, rows: Rows, tokenizer: Tokenizer) -> Iterator[str]:
    """The mixture, or one row."""
    if args.step is not None:
        position = (args.step - 1) * args.data.step_rows + args.row
        yield from describe_row(args.data, rows, tokenizer, args.step, args.row, position)
    elif (stream := stream_of(rows)) is not None:
        yield from describe_mixture(args.data, stream, args.steps)
    else:
        raise UserError("step: must be given, since the rows of this app are no mixture of sources")


def describe_worst(
    run: Path, app: App, args: ShowArgs, of_run: Any, data: OpenData
) -> Iterator[str]:
    """The rows of a step with the highest losses under the checkpoint nearest to it."""
    step, size = args.step or 0, args.data.step_rows
    folder = Path(of_run.checkpoint.path or run / "checkpoints")
    found, metrics = find(folder, report), Record(run).metrics
    logged = dict(zip(metrics.step.tolist(), metrics["loss"].tolist(), strict=True))
    check_step(step, args.steps, max([*logged, *(c.step for c in found)], default=0))
    if not found:
        raise UserError(f"{folder}: has no whole checkpoint, on whose weights the losses depend")
    checkpoint = nearest(found, step)
    state = read_state(checkpoint)
    progress = state.progress or Progress()
    for key, content in data.fingerprints.items():
        if state.data.get(key, content) != content:
            raise UserError(f"{key}: is not what the run read up to {checkpoint.path}")
    trained = open_trained("run", str(checkpoint.path), app)
    tokenizer = trained.build_tokenizer(args.data.tokenizer.path)
    position = progress.position + (step - 1 - checkpoint.step) * size

    of_model = trained.args.distributed
    settings = DistributedArgs(
        model_dtype=of_model.model_dtype, matmul_allow_tf32=of_model.matmul_allow_tf32
    )
    model = trained.load(settings, start(pick_device(args.device, Launch()), Launch(), settings))
    marks = document_marks(args.data, tokenizer)
    losses = row_losses(model, of_run, data.rows, marks, step, position, data.documents)
    yield from describe_losses(step, checkpoint, losses, logged.get(step))
    if app.objective is not None:
        yield f"{app.path} has an objective of its own; these are the losses of its targets alone"
    of_rows = losses.of_rows()
    for row in np.argsort(-np.nan_to_num(of_rows, nan=np.inf), kind="stable")[
        : args.worst
    ].tolist():
        n = int(losses.counts[row, 0])
        yield f"=== loss {of_rows[row]:.4f} over {counted(n, 'target')}"
        yield from describe_row(args.data, data.rows, tokenizer, step, row, position + row)


def check_step(step: int, steps: int, newest: int) -> None:
    """Raises UserError where the run has not read the step."""
    if step > steps:
        raise UserError(f"step = {step}: must be at most {steps:,}, the steps of the run")
    if step > newest:
        raise UserError(
            f"step = {step}: the run has not read it; its newest line and checkpoint are of step "
            f"{newest:,} at most"
        )


def describe_losses(
    step: int, checkpoint: Checkpoint, losses: RowLosses, logged: float | None
) -> Iterator[str]:
    """Under which weights the losses are, and how the step's compares with them."""
    behind, of_rows = step - 1 - checkpoint.step, losses.of_rows()
    which = f"from {counted(behind, 'step')} before" if behind else "with which the step began"
    if behind < 0:
        which = "which have trained on these rows already"
    yield f"step {step} under the weights of {checkpoint.path}, {which}:"
    then = "" if logged is None else f" (logged: {logged:.4f})"
    low, middle, high = np.percentile(of_rows, (0, 50, 100))
    yield (
        f"loss {losses.of_step():.4f}{then}; its {counted(len(of_rows), 'row')} from {low:.4f} to "
        f"{high:.4f}, median {middle:.4f}"
    )


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_program(main)
