"""What can be wrong with a run, found before it trains, and by lingua stool before a launch."""

import inspect
import logging
import math
import os
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from apps.main.config import TrainArgs
from lingua.app import App, Built, choose_app
from lingua.base.dump_dir import CONFIG, FILES, FOLDERS
from lingua.base.errors import UserError, check_array, import_tool
from lingua.base.format import counted
from lingua.checkpoint.folder import check_run_id
from lingua.checkpoint.resume import Saved, find_start, flat_config
from lingua.checkpoint.run_config import load_run
from lingua.config.load import flatten, resume_classes
from lingua.data.rows import Data
from lingua.data.sources import TextData
from lingua.model import Losses
from lingua.model.attention import choose_attention
from lingua.parallel.mesh import mesh_sizes, on_rank_0
from lingua.parallel.parallelize import check_layout
from lingua.tokenizer import Tokenizer, build_tokenizer

if TYPE_CHECKING:
    from lingua.checkpoint.changes import Change
    from lingua.checkpoint.origin import Origin

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checked:
    """The values that are decided before data is prepared and the model takes memory."""

    data: Data
    tokenizer: Tokenizer
    built: Built
    saved: Saved | None  # checkpoint to resume, if there is one
    origin: "Origin | None"  # otherwise the tensors that a new run starts from, if it names some
    changes: "list[Change]"  # keys that differ from the checkpoint's


def check(argv: list[str], world_size: int) -> tuple[TrainArgs, list[str]]:
    """The configuration of a run to be launched with `world_size` processes, and its notices: what
    lingua stool asks for. Raises UserError where the run would refuse it."""
    from lingua.tools.in_process import one_process

    app = choose_app(argv)
    args: TrainArgs
    args, notices = load_run(app, argv)
    resolved = deepcopy(args)
    resolved.checkpoint.verify = "size"  # the run itself compares checksums
    with one_process():
        device = "cpu" if args.device == "cpu" else "cuda"  # on the machine that runs it
        check_run(app, resolved, mesh_sizes(args.distributed, world_size), device)
    args.app = app.path
    return args, notices


def check_run(app: App, args: TrainArgs, sizes: tuple[int, ...], device: str) -> Checked:
    """Everything that can be found wrong before a run trains. Called by every rank.

    Fills in what `args` leaves open: the global batch size, the vocabulary, the dump dir. `sizes`
    are those of the mesh, (dp_replicate, dp_shard, tp), and `device` is the type of its devices.
    Raises UserError where the run cannot start like this.
    """
    if args.app not in (None, app.path):
        raise UserError(f"app = {args.app}: this program trains {app.path}; leave it out")
    replicas, shards, tp = sizes
    args.app = app.path
    args.dump_dir = str(args.folder)
    data: Data = app.data or TextData()
    tokenizer = build_tokenizer(args.data.tokenizer)
    on_rank_0(lambda: data.check(args, tokenizer))

    classes, allowed = resume_classes(type(args)), args.checkpoint.allow_change
    on_rank_0(partial(check_run_id, args.checkpoint_folder, args.folder))
    saved, origin = find_start(args.checkpoint_folder, args.checkpoint, classes, app)
    resolve(args, replicas * shards, tokenizer, saved)
    config = flatten(args)
    changes: list[Change] = []
    if saved is not None:
        from lingua.checkpoint.changes import check_config, kernel_changes  # for one that resumes

        changes = check_config(saved, config, classes, allowed)
        changes += kernel_changes(saved, device) if args.deterministic else []
    elif origin is not None:
        changes = origin.check(args.model, config, tokenizer, classes, allowed)
    args.micro_steps(replicas * shards)
    resolve_attention(args, device)
    built = app.build(args)
    check_forward(built.module, args)
    check_layout(built.module, built.plan, tp)
    if args.distributed.float8 is not None:
        from lingua.parallel.float8 import check_float8

        check_float8(built.module, built.plan, sizes, args.data.seq_len, device)
    if args.eval is not None:
        benchmarks = import_tool("apps.main.benchmarks", "eval.tasks")
        on_rank_0(lambda: benchmarks.check_benchmarks(args))
    return Checked(data, tokenizer, built, saved, origin, changes)


def resolve(args: TrainArgs, degree: int, tokenizer: Tokenizer, saved: Saved | None) -> None:
    """Fill in what the config leaves open. It is decided once: a later start on another topology
    takes the global batch size from the checkpoint or the dump dir's config.yaml."""
    if args.data.global_batch_size is None:
        key, previous = (
            "data.global_batch_size",
            on_rank_0(partial(previous_global_batch_size, args, saved)),
        )
        rows = args.data.batch_size * degree * (args.grad_acc_steps or 1)
        args.data.global_batch_size = previous or rows
        if previous is None:
            logger.info(
                f"{key} = {rows}: it was left open, so it is data.batch_size = "
                f"{args.data.batch_size} times {counted(degree, 'data-parallel rank')} times "
                f"{counted(args.grad_acc_steps or 1, 'micro-step')}. Set it for a run that does "
                "not depend on the number of processes"
            )
        elif previous != rows:
            logger.info(
                f"{key} = {previous}, as this run was started with; null would give {rows} now"
            )
            args.grad_acc_steps = None
    if saved is not None and args.validation.tokens is None:  # a run keeps its held-out text
        args.validation.tokens = saved.config.get("validation.tokens")
    if args.model.vocab_size == -1:
        args.model.vocab_size = tokenizer.vocab_size
    if args.model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size = {args.model.vocab_size}: must be at least the tokenizer's, "
            f"{tokenizer.vocab_size}, or -1"
        )


def previous_global_batch_size(args: TrainArgs, saved: Saved | None) -> int | None:
    """The global batch size that an earlier start of the run decided. Raises UserError."""
    key, config_file = "data.global_batch_size", args.folder / CONFIG
    if saved is not None:
        return saved.config[key]
    return flat_config(config_file, [key]).get(key) if config_file.exists() else None


def resolve_attention(args: TrainArgs, device: str) -> tuple[str, str]:
    """(implementation of attention, why it is this one) of the run. Raises UserError."""
    window = args.model.sliding_window
    masked = args.data.document_mask != "none" or (window or math.inf) < args.data.seq_len
    head_dim, dtype = args.model.heads()[2], args.distributed.dtype
    return choose_attention(args.model.attn_impl, head_dim, torch.device(device), dtype, masked)


def check_forward(model: nn.Module, args: TrainArgs) -> None:
    """Raise UserError where the config asks for an argument that the model's forward lacks."""
    mask, dropout = args.data.document_mask, args.model.dropout
    asked = (("data.document_mask", mask, "none", "documents"),
             ("model.dropout", dropout, 0.0, "noise"))  # fmt: skip
    for key, value, off, argument in asked:
        try:
            inspect.signature(model.forward).bind(None, None, **{argument: None})
        except TypeError:
            if value != off:
                need = f"must be {off}, since the forward of this model does not take {argument}"
                raise UserError(f"{key} = {value}: {need}") from None


def check_fields(where: str, fields: dict[str, Tensor], rows: int) -> None:
    """Raise UserError where `Objective.fields` has not returned tensors of the rows."""
    for name, t in fields.items():
        if not isinstance(t, Tensor) or t.shape[:1] != (rows,):
            came = f"{t.dtype} {list(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
            raise UserError(f"{where}: {name} is {came}; must be a tensor [{rows}, ...] on the CPU")


def check_losses(where: str, losses: Losses, n_sums: int, rows: int) -> None:
    """Raise UserError where `Objective.loss` has not returned what `count` and the rows ask for."""
    if not isinstance(losses, Losses):
        raise UserError(f"{where}: {type(losses).__name__}; must be lingua.model.Losses")
    check_array(f"{where}: sums", losses.sums, "float32", (n_sums,))
    for name, term in losses.per_row.items():
        check_array(f"{where}: per_row, {name}", term, "float32", (rows,))


def check_dump_dir(folder: Path) -> None:
    """Make the dump dir. Raises UserError where something in it is not what a run can write."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            mode = os.R_OK if path.name == CONFIG else os.R_OK | os.W_OK
            usable = path.is_file() and os.access(path, mode, effective_ids=True)
            if path.name in FILES and not usable:
                raise UserError(f"{path}: must be a file that can be read and written, or absent")
            if path.name in FOLDERS and not path.is_dir():
                raise UserError(f"{path}: must be a folder, or absent")
    except OSError as error:
        raise UserError(f"dump_dir = {folder}: cannot be used: {error}") from None
