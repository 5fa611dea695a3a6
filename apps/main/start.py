"""What is checked before a run trains, by the run itself and by lingua.stool before it launches."""

import logging
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from apps.main.benchmarks import check_benchmarks
from apps.main.config import TrainArgs
from lingua.app import App, Built, choose_app
from lingua.checkpoint.load import load as load_tensors
from lingua.checkpoint.origin import Origin, check_origin, find_start, start_from
from lingua.checkpoint.resume import (
    Change,
    Progress,
    Saved,
    check_config,
    flat_config,
    log_resume,
)
from lingua.checkpoint.tensors import tensors_of
from lingua.config.load import flatten, load, resume_classes
from lingua.config.meta_lingua import META_LINGUA
from lingua.data.documents import DocumentMarks, document_marks
from lingua.data.loader import micro_steps
from lingua.data.rows import Data
from lingua.data.text import TextData
from lingua.errors import UserError
from lingua.hugging_face import LlamaFolder, check_model, load_llama
from lingua.optim.schedule import schedule_warnings
from lingua.parallel.gradients import grad_sync_note
from lingua.parallel.launch import one_process
from lingua.parallel.mesh import AXES, dp_degree, mesh_sizes, on_rank_0
from lingua.parallel.parallelize import check_layout
from lingua.tokenizer import Tokenizer, build_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """What was decided before data is prepared and the model takes memory."""

    data: Data
    tokenizer: Tokenizer
    built: Built
    marks: DocumentMarks | None
    n_micro: int  # micro-steps of a step
    rows: int  # of a micro-batch
    saved: Saved | None  # the checkpoint to resume
    origin: Origin | None  # or what a new run takes tensors from
    llama: LlamaFolder | None  # or the folder of checkpoint.init_from
    changes: list[Change]  # of the configuration, since it was saved

    @property
    def step(self) -> int:
        """Completed steps."""
        return 0 if self.saved is None else self.saved.progress.step


def check_start(app: App, args: TrainArgs, sizes: tuple[int, int, int], verify: str) -> Start:
    """Everything that can be found wrong before a run trains. Called by every rank.

    Fills in what `args` leaves open: the global batch size, the vocabulary, the dump dir.

    Args:
        sizes: of the mesh, (dp_replicate, dp_shard, tp).
        verify: as checkpoint.verify, for the checkpoint that is found.

    Raises:
        UserError: the run cannot start like this.
    """
    if args.app not in (None, app.path):
        raise UserError(f"app = {args.app}: this program trains {app.path}; leave it out")
    replicas, shards, tp = sizes
    args.app = app.path
    args.dump_dir = args.dump_dir or f"runs/{args.name}"
    data: Data = app.data or TextData()
    tokenizer = build_tokenizer(args.data.tokenizer)
    on_rank_0(lambda: data.check(args, tokenizer))

    classes, allowed = resume_classes(type(args)), args.checkpoint.allow_change
    checkpoints = replace(args.checkpoint, verify=verify)
    saved, origin = find_start(checkpoint_folder(args), checkpoints, classes)
    resolve(args, replicas * shards, tokenizer, saved)
    llama = None  # a run's own checkpoint wins over the weights it began with
    if saved is None and args.checkpoint.init_from is not None:
        llama = LlamaFolder(args.checkpoint.init_from, "checkpoint.init_from")
        check_model(llama, args.model, allowed)
    config = flatten(args)
    changes = check_config(saved, config, classes, allowed)
    changes += check_origin(origin, config, tokenizer, classes, allowed)

    n_micro, rows = micro_steps(
        args.data.global_batch_size, replicas * shards, args.data.batch_size, args.grad_acc_steps
    )
    marks = document_marks(args.data, tokenizer)
    built = app.build(args)
    check_layout(built.module, built.plan, tp)
    on_rank_0(lambda: check_benchmarks(args))
    return Start(
        data, tokenizer, built, marks, n_micro, rows, saved, origin, llama, changes
    )  # fmt: skip


def check(argv: list[str], world_size: int) -> tuple[TrainArgs, list[str]]:
    """The configuration of a run to be launched with `world_size` processes, and its notices: what
    lingua.stool asks for.

    Raises:
        UserError: the run would refuse it.
    """
    app = choose_app(argv)
    args, notices = load(app.config, argv, foreign=META_LINGUA)
    with one_process():
        check_start(app, deepcopy(args), mesh_sizes(args.distributed, world_size), verify="size")
    args.app = app.path
    return args, notices


def checkpoint_folder(args: TrainArgs) -> Path:
    return Path(args.checkpoint.path or Path(args.dump_dir) / "checkpoints")


def resolve(args: TrainArgs, degree: int, tokenizer: Tokenizer, saved: Saved | None) -> None:
    """Fill in what the config leaves open. It is decided once: a later start on another topology
    takes the global batch size from the checkpoint or the dump dir's config.yaml."""
    if args.data.global_batch_size is None:
        key, written = "data.global_batch_size", Path(args.dump_dir) / "config.yaml"
        former = saved.config if saved is not None else None
        if former is None:
            former = on_rank_0(lambda: flat_config(written, [key]) if written.exists() else {})
        rows = args.data.batch_size * degree * (args.grad_acc_steps or 1)
        args.data.global_batch_size = former.get(key, rows)
        if args.data.global_batch_size != rows:
            logger.info(
                f"{key} = {former[key]}, as this run was started with; null would give {rows} now"
            )
            args.grad_acc_steps = None
    if args.model.vocab_size == -1:
        args.model.vocab_size = tokenizer.vocab_size
    if args.model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size = {args.model.vocab_size}: must be at least the tokenizer's, "
            f"{tokenizer.vocab_size}, or -1"
        )


def restore(
    begin: Start,
    changes: list[Change],
    args: TrainArgs,
    model: nn.Module,
    optimizer: Optimizer,
    mesh: DeviceMesh,
) -> Progress:
    """Load what the run starts from into its model and optimizer, if anything. Called by every
    rank. Returns where it goes on."""
    saved, origin = begin.saved, begin.origin
    if saved is not None:
        load_tensors(saved.checkpoint, tensors_of(model, optimizer))
        log_resume(saved, changes, optimizer, tuple(mesh.shape))
        return saved.progress
    if origin is not None:
        return start_from(origin, changes, model, optimizer, args.data.global_batch_size)
    if begin.llama is not None:
        load_llama(begin.llama, model)
        logger.info(f"starting with the weights of {begin.llama.path}")
    return Progress()


def describe(args: TrainArgs, begin: Start, model: nn.Module, mesh: DeviceMesh) -> Iterator[str]:
    """What a person wants to read before the first step."""
    n_parameters = sum(p.numel() for p in model.parameters())
    device = torch.cuda.get_device_name() if mesh.device_type == "cuda" else "CPU"
    sizes = ", ".join(f"{axis} {size}" for axis, size in zip(AXES, mesh.shape, strict=True))
    n = dist.get_world_size()
    yield f"{args.name}: {n_parameters:,} parameters on {n} x {device} ({sizes})"
    yield (
        f"a step is {args.data.global_batch_size} rows of {args.data.seq_len} tokens: "
        f"{begin.n_micro} micro-step{'s' if begin.n_micro > 1 else ''} of at most {begin.rows} "
        f"rows on each of {dp_degree(mesh)} data-parallel ranks"
    )
    yield from grad_sync_note(model, mesh, args.distributed.grad_sync, begin.n_micro)
    yield from schedule_warnings(args.optim, args.steps)
