"""Rows of a config or of a run, and those of a step with the highest losses."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lingua.app import App
from lingua.base.dump_dir import CHECKPOINTS, CONFIG
from lingua.base.errors import UserError
from lingua.base.format import counted
from lingua.checkpoint.folder import Checkpoint, find, read_state
from lingua.checkpoint.state import Progress
from lingua.config.saved import load_saved
from lingua.data.args import DataArgs
from lingua.data.chat import ChatRows
from lingua.data.rows import OpenData, Rows, document_marks
from lingua.data.sources import TextData, prepare_sources
from lingua.parallel.args import DistributedArgs
from lingua.parallel.launch import Launch, pick_device, start
from lingua.run.args import RunArgs
from lingua.run.records import Record
from lingua.tokenizer.interface import Tokenizer
from lingua.tools.exchange.trained import open_trained
from lingua.tools.inference.row_losses import RowLosses, nearest_checkpoint, row_losses
from lingua.tools.inspect.describe import describe_mixture, describe_row, stream_of


def prepare_rows(data: DataArgs, seed: int, tokenizer: Tokenizer) -> Rows:
    """The rows of a config. Its sources are tokenized where they are not. Raises UserError."""
    stream = data.row_stream(prepare_sources(data, tokenizer, report), seed)
    if data.chat is None:
        return stream
    return ChatRows(stream, data.seq_len, data.n_views, tokenizer.vocab_size)


def open_run(
    run: Path, app: App, data: DataArgs, seed: int, steps: int, tokenizer: Tokenizer
) -> tuple[RunArgs, OpenData]:
    """(configuration, data) of the run in a dump dir, of any app, with other `data`,
    `seed` and `steps`. Nothing is tokenized. Raises UserError."""
    config: RunArgs = load_saved(app.config, run / CONFIG)
    config.data, config.seed, config.steps = data, seed, steps
    return config, (app.data or TextData()).open(config, tokenizer)


def describe_rows(
    data: DataArgs, rows: Rows, tokenizer: Tokenizer, step: int | None, row: int, steps: int
) -> Iterator[str]:
    """The mixture of `steps` steps, or one row of a step."""
    if step is not None:
        position = (step - 1) * data.step_rows + row
        yield from describe_row(data, rows, tokenizer, step, row, position)
    elif (stream := stream_of(rows)) is not None:
        yield from describe_mixture(data, stream, steps)
    else:
        raise UserError("step: must be given, since the rows of this app are no mixture of sources")


def describe_worst(
    run: Path, app: App, config: RunArgs, data: OpenData, step: int, worst: int, device: str
) -> Iterator[str]:
    """The `worst` rows of a step, the highest loss first, under the checkpoint nearest to it.
    `run` is a dump dir; `config` and `data` are what open_run returns. Raises UserError."""
    size = config.data.step_rows
    folder = Path(config.checkpoint.path or run / CHECKPOINTS)
    checkpoints, metrics = find(folder, report), Record(run).metrics
    logged = dict(zip(metrics.step.tolist(), metrics.numbers("loss").tolist(), strict=True))
    check_step(step, config.steps, max([*logged, *(c.step for c in checkpoints)], default=0))
    if not checkpoints:
        raise UserError(f"{folder}: has no whole checkpoint, on whose weights the losses depend")
    checkpoint = nearest_checkpoint(checkpoints, step)
    state = read_state(checkpoint)
    progress = state.progress or Progress()
    for key, content in data.fingerprints.items():
        if state.data.get(key, content) != content:
            raise UserError(f"{key}: is not what the run read up to {checkpoint.path}")
    trained = open_trained("run", str(checkpoint.path), app, config.data.tokenizer.path)
    tokenizer = trained.build_tokenizer()
    position = progress.position + (step - 1 - checkpoint.step) * size

    trained_with = trained.args.distributed
    settings = DistributedArgs(
        model_dtype=trained_with.model_dtype, matmul_allow_tf32=trained_with.matmul_allow_tf32
    )
    model = trained.load(settings, start(pick_device(device, Launch()), Launch(), settings))
    marks = document_marks(config.data, tokenizer)
    losses = row_losses(model, config, data.rows, marks, step, position, data.documents)
    yield from describe_losses(step, checkpoint, losses, logged.get(step))
    if app.objective is not None:
        yield f"{app.path} has an objective of its own; these are the losses of its targets alone"
    row_means = losses.row_means()
    highest = np.argsort(-np.nan_to_num(row_means, nan=np.inf), kind="stable")
    for row in highest[:worst].tolist():
        n = int(losses.counts[row, 0])
        yield f"=== loss {row_means[row]:.4f} over {counted(n, 'target')}"
        yield from describe_row(config.data, data.rows, tokenizer, step, row, position + row)


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
    behind, row_means = step - 1 - checkpoint.step, losses.row_means()
    which = f"from {counted(behind, 'step')} before" if behind else "with which the step began"
    if behind < 0:
        which = "which have trained on these rows already"
    yield f"step {step} under the weights of {checkpoint.path}, {which}:"
    then = "" if logged is None else f" (logged: {logged:.4f})"
    low, middle, high = np.percentile(row_means, (0, 50, 100))
    yield (
        f"loss {losses.step_loss():.4f}{then}; its {counted(len(row_means), 'row')} from {low:.4f} "
        f"to {high:.4f}, median {middle:.4f}"
    )


def report(line: str) -> None:
    """Print a line on stderr: stdout is for the rows."""
    print(line, file=sys.stderr, flush=True)
