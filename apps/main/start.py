"""Before a run trains: what is checked (also by lingua.stool, before it launches), built, restored
and described."""

import inspect
import logging
import math
import os
import socket
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from apps.main.benchmarks import check_benchmarks
from apps.main.config import TrainArgs
from lingua.app import App, Built, choose_app
from lingua.attention import choose_attention
from lingua.checkpoint.folder import versions
from lingua.checkpoint.resume import (
    Change,
    Origin,
    Progress,
    Saved,
    check_config,
    check_origin,
    find_start,
    flat_config,
    log_resume,
    start_from,
)
from lingua.checkpoint.source import open_checkpoint
from lingua.checkpoint.tensors import tensors_of
from lingua.config.load import flatten, resume_classes
from lingua.data.rows import Data
from lingua.data.text import TextData
from lingua.errors import UserError
from lingua.format import counted
from lingua.head import chunk_note
from lingua.hugging_face import open_weights
from lingua.optim.optimizer import build_optimizer
from lingua.optim.schedule import schedule_warnings
from lingua.parallel.gradients import grad_sync_note, replicas_note
from lingua.parallel.launch import detect_launch, one_process
from lingua.parallel.mesh import AXES, dp_degree, mesh_sizes, on_rank_0
from lingua.parallel.parallelize import ParallelPlan, check_layout
from lingua.run_config import load_run
from lingua.signals import Stopped, StopRequest
from lingua.slurm.freeze import code_version
from lingua.tokenizer import Tokenizer, build_tokenizer

logger = logging.getLogger(__name__)

# What a run writes into its dump dir, besides the files of its saves and of other programs.
FILES = ("config.yaml", "train.log", "metrics.jsonl", "metrics.validation.jsonl",
         "metrics.eval.jsonl", "samples.jsonl", "wandb_id")  # fmt: skip
FOLDERS = ("checkpoints", "evals", "profiling", "wandb")


@dataclass(frozen=True)
class Start:
    """What was decided before data is prepared and the model takes memory."""

    data: Data
    tokenizer: Tokenizer
    built: Built
    saved: Saved | None  # the checkpoint to resume
    origin: Origin | None  # or what a new run takes tensors from
    changes: list[Change]  # since it was saved


def check_dump_dir(folder: Path) -> None:
    """Make the dump dir. Raises UserError where something in it is not what a run can write."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            mode = os.R_OK if path.name == "config.yaml" else os.R_OK | os.W_OK
            usable = path.is_file() and os.access(path, mode, effective_ids=True)
            if path.name in FILES and not usable:
                raise UserError(f"{path}: must be a file that can be read and written, or absent")
            if path.name in FOLDERS and not path.is_dir():
                raise UserError(f"{path}: must be a folder, or absent")
    except OSError as error:
        raise UserError(f"dump_dir = {folder}: cannot be used: {error}") from None


def check_start(app: App, args: TrainArgs, sizes: tuple[int, ...], device: str) -> Start:
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
    saved, origin = find_start(args.checkpoint_folder, args.checkpoint, classes)
    resolve(args, replicas * shards, tokenizer, saved)
    weights = args.checkpoint.init_from
    if saved is None and origin is None and weights is not None:  # a folder of transformers
        origin = Origin(open_weights(app, weights, args.model, allowed))
    config = flatten(args)
    changes = check_config(saved, config, classes, allowed)
    changes += check_origin(origin, config, tokenizer, classes, allowed)
    args.micro_steps(replicas * shards)
    attention_of(args, device)
    built = app.build(args)
    check_forward(built.module, args)
    check_layout(built.module, built.plan, tp)
    on_rank_0(lambda: check_benchmarks(args))
    return Start(data, tokenizer, built, saved, origin, changes)


def attention_of(args: TrainArgs, device: str) -> tuple[str, str]:
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


def check(argv: list[str], world_size: int) -> tuple[TrainArgs, list[str]]:
    """The configuration of a run to be launched with `world_size` processes, and its notices: what
    lingua.stool asks for. Raises UserError where the run would refuse it."""
    app = choose_app(argv)
    args: TrainArgs
    args, notices = load_run(app, argv)
    resolved = deepcopy(args)
    resolved.checkpoint.verify = "size"  # the run itself compares checksums
    with one_process():
        device = "cpu" if args.device == "cpu" else "cuda"  # of the machine that it will run on
        check_start(app, resolved, mesh_sizes(args.distributed, world_size), device)
    args.app = app.path
    return args, notices


def resolve(args: TrainArgs, degree: int, tokenizer: Tokenizer, saved: Saved | None) -> None:
    """Fill in what the config leaves open. It is decided once: a later start on another topology
    takes the global batch size from the checkpoint or the dump dir's config.yaml."""
    if args.data.global_batch_size is None:
        key, former = "data.global_batch_size", on_rank_0(partial(former_rows, args, saved))
        rows = args.data.batch_size * degree * (args.grad_acc_steps or 1)
        args.data.global_batch_size = former or rows
        if former is None:
            logger.info(
                f"{key} = {rows}: it was left open, so it is data.batch_size = "
                f"{args.data.batch_size} times {counted(degree, 'data-parallel rank')} times "
                f"{counted(args.grad_acc_steps or 1, 'micro-step')}. Set it for a run that does "
                "not depend on the number of processes"
            )
        elif former != rows:
            logger.info(
                f"{key} = {former}, as this run was started with; null would give {rows} now"
            )
            args.grad_acc_steps = None
    if args.model.vocab_size == -1:
        args.model.vocab_size = tokenizer.vocab_size
    if args.model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size = {args.model.vocab_size}: must be at least the tokenizer's, "
            f"{tokenizer.vocab_size}, or -1"
        )


def former_rows(args: TrainArgs, saved: Saved | None) -> int | None:
    """The global batch size that an earlier start of the run decided. Raises UserError."""
    key, written = "data.global_batch_size", args.folder / "config.yaml"
    if saved is not None:
        return saved.config[key]
    return flat_config(written, [key]).get(key) if written.exists() else None


def unless_stopped(work: Callable[[], object], stop: StopRequest, what: str) -> bool:
    """Run `work`, which may take hours, on rank 0. False where a signal ended it, which is logged:
    what is finished stays. Called by every rank."""

    def attempt() -> bool:
        try:
            with stop.at_once():
                work()
        except Stopped:
            logger.info(f"stopped by {stop.signal} while {what}. The same command resumes it")
            return False
        return True

    return on_rank_0(attempt)


def default_optimizer(model: nn.Module, args: TrainArgs, plan: ParallelPlan | None) -> Optimizer:
    return build_optimizer(model, args.optim, plan.blocks if plan else ())


def restore(
    begin: Start, args: TrainArgs, model: nn.Module, optimizer: Optimizer, mesh: DeviceMesh
) -> Progress:
    """Load what the run starts from into its model and optimizer, if anything; returns where it
    continues. Called by every rank."""
    saved, origin = begin.saved, begin.origin
    if saved is not None:
        open_checkpoint(saved.checkpoint).load(tensors_of(model, optimizer))
        log_resume(saved, begin.changes, mesh.shape)
        return saved.progress
    if origin is not None:
        return start_from(origin, begin.changes, model, optimizer, args.data.step_rows)
    return Progress()


def machine(device_name: str) -> dict[str, Any]:
    """What a start of a run is on, as values of JSON. Called by every rank."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return {
        "device": device_name,
        "hosts": list(dict.fromkeys(hosts)),
        "commit": on_rank_0(partial(code_version, Path(__file__))),
        **versions(),
    }


def describe(args: TrainArgs, model: nn.Module, mesh: DeviceMesh) -> Iterator[str]:
    """What a person wants to read before the first step."""
    n_parameters = sum(p.numel() for p in model.parameters())
    device = torch.cuda.get_device_name() if mesh.device_type == "cuda" else "CPU"
    sizes = ", ".join(f"{axis} {size}" for axis, size in zip(AXES, mesh.shape, strict=True))
    degree, n = dp_degree(mesh), dist.get_world_size()
    n_micro, rows = args.micro_steps(degree)
    yield f"{args.name}: {n_parameters:,} parameters on {n} x {device} ({sizes})"
    yield (
        f"a step is {counted(args.data.step_rows, 'row')} of {args.data.seq_len} tokens: "
        f"{counted(n_micro, 'micro-step')} of at most {counted(rows, 'row')} a rank, on "
        f"{counted(degree, 'data-parallel rank')}"
    )
    yield "attention: {}, {}".format(*attention_of(args, mesh.device_type))
    yield from grad_sync_note(model, mesh, args.distributed.grad_sync, n_micro)
    node = detect_launch().local_world_size
    yield from replicas_note(model, mesh, args.distributed, n_micro, node)
    yield from chunk_note(model, rows * args.data.seq_len, mesh["tp"].size())
    yield from schedule_warnings(args.optim, args.steps)
