"""Everything before the first step: processes, what a former start left, data, model, reports."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from apps.main.config import Built, TrainArgs, build
from apps.main.evaluation import check_evaluation, open_evaluation
from lingua.checkpoint.load import load as load_tensors
from lingua.checkpoint.origin import check_origin, find_start, start_from
from lingua.checkpoint.resume import (
    Progress,
    Saved,
    check_config,
    check_data,
    data_content,
    flat_config,
    tell,
)
from lingua.checkpoint.saver import Saver
from lingua.checkpoint.tensors import tensors_of
from lingua.config.load import flatten, load, resume_classes, to_yaml
from lingua.config.meta_lingua import META_LINGUA
from lingua.data.documents import DocumentMarks, document_marks
from lingua.data.heldout import HeldOut, held_out_windows
from lingua.data.loader import Loader, micro_steps
from lingua.data.prepare.sources import check_sources, open_sources, prepare_sources
from lingua.data.shards import Source, write_atomically
from lingua.errors import UserError
from lingua.hugging_face import LlamaFolder, check_model, load_llama
from lingua.init import init_parameters
from lingua.monitor.logger import init_logger
from lingua.monitor.reporter import Reporter
from lingua.optim.optimizer import build_optimizer
from lingua.optim.schedule import schedule_warnings
from lingua.parallel.gradients import grad_sync_note
from lingua.parallel.launch import detect_launch, one_process, pick_device, start
from lingua.parallel.mesh import AXES, dp_degree, dp_rank, mesh_sizes, on_rank_0
from lingua.parallel.parallelize import ParallelPlan, check_tensor_parallel, parallelize_model
from lingua.signals import Stopped, StopRequest
from lingua.tokenizer import Tokenizer, build_tokenizer

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """What set_up made: the parts of one start of a run."""

    dump_dir: Path
    mesh: DeviceMesh
    device: torch.device
    tokenizer: Tokenizer
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Loader
    saver: Saver
    held_out: dict[str, HeldOut]
    marks: DocumentMarks | None
    rows: int  # of a micro-batch
    data: dict[str, str]  # fingerprints
    progress: Progress
    report: Reporter
    end: int  # the step this start goes up to
    tasks: dict[str, Any]  # of benchmarks, on rank 0
    told: set[str] = field(default_factory=set)  # the jobs of benchmarks whose failure was told
    held_out_loss: tuple[int, float] = (0, 0.0)  # the step measured last, and its nats per byte


def set_up(
    args: TrainArgs, build: Callable[[TrainArgs], Built], stop: StopRequest, open_parts: ExitStack
) -> Run | None:
    """Everything before the first step; None when there is no step left to do. What is to be closed
    after the last, also when set-up fails, goes into `open_parts`."""
    # ---- processes, and what a former start left
    launch = detect_launch()
    device = pick_device(args.device, launch)
    mesh = start(device, launch, args.distributed, args.deterministic)
    args.dump_dir = args.dump_dir or f"runs/{args.name}"
    dump_dir = Path(args.dump_dir)
    init_logger(dump_dir, dist.get_rank())
    classes = resume_classes(type(args))
    checkpoints = Path(args.checkpoint.path or dump_dir / "checkpoints")
    saver = open_parts.enter_context(Saver(checkpoints, args.checkpoint))
    saved, origin = find_start(checkpoints, args.checkpoint, classes)
    end = min(args.steps, args.stop_at or args.steps)
    if saved is not None and saved.progress.step >= end:
        where = f"{saved.checkpoint.path} is step {saved.progress.step} of {end}"
        logger.info(f"the run is finished: {where}. To go on, raise steps or stop_at")
        return None

    # ---- config and data, each checked against the checkpoint as soon as it is known
    tokenizer = build_tokenizer(args.data.tokenizer)
    resolve(args, dp_degree(mesh), tokenizer, saved, dump_dir)
    llama = None  # a run's own checkpoint wins over the weights it began with
    if saved is None and args.checkpoint.init_from is not None:
        llama = open_llama(args)
    config, allowed = flatten(args), args.checkpoint.allow_change
    found = check_config(saved, config, classes, allowed)
    found += check_origin(origin, config, tokenizer, classes, allowed)
    n_micro, rows = micro_steps(
        args.data.global_batch_size, dp_degree(mesh), args.data.batch_size, args.grad_acc_steps
    )
    marks = document_marks(args.data, tokenizer)
    tasks = open_evaluation(args)
    if not prepare_data(args, tokenizer, stop):
        return None
    sources, held_out = open_data(args, tokenizer)
    data = data_content(sources, tokenizer)
    found += check_data(saved, data, allowed)

    # ---- model and optimizer, then what there is for them
    built = build(args)
    model = parallelize_model(built.module, mesh, built.plan, args.distributed)
    init_parameters(model, args.seed, device)
    optimizer = build_optimizer(model, args.optim, built.plan.blocks if built.plan else ())
    progress = Progress()
    if saved is not None:
        load_tensors(saved.checkpoint, tensors_of(model, optimizer))
        progress = saved.progress
        if saved.checkpoint.path.parent == saver.root:  # not of a run that this one branches from
            saver.saved_step = progress.step
        tell(saved, found, optimizer, tuple(mesh.shape))
    elif origin is not None:
        progress = start_from(origin, found, model, optimizer, args.data.global_batch_size)
    elif llama is not None:
        load_llama(llama, model)
        logger.info(f"it begins with the weights of {llama.path}")
    on_rank_0(lambda: write_atomically(dump_dir / "config.yaml", to_yaml(args)))
    for line in description(args, mesh, model, n_micro, rows):
        logger.info(line)

    # ---- rows from where the run is, and a place to report to
    loader = open_loader(args, sources, marks, mesh, device, n_micro, rows, progress.position)
    open_parts.enter_context(loader)
    report = open_report(args, mesh, progress, end, built.flops_per_token)
    if saved is not None and saved.topology != tuple(mesh.shape):
        report.event("topology", progress.step, old=saved.topology, new=tuple(mesh.shape))
    return Run(
        dump_dir, mesh, device, tokenizer, model, optimizer, loader, saver, held_out, marks,
        rows, data, progress, report, end, tasks,
    )  # fmt: skip


def open_loader(
    args: TrainArgs,
    sources: dict[str, Source],
    marks: DocumentMarks | None,
    mesh: DeviceMesh,
    device: torch.device,
    n_micro: int,
    rows: int,
    position: int,
) -> Loader:
    """This rank's micro-batches of every step from `position` on, read ahead."""
    return Loader(
        args.data.row_stream(sources, args.seed),
        args.data.global_batch_size,
        dp_rank(mesh),
        dp_degree(mesh),
        n_micro,
        rows,
        position=position,
        workers=args.data.workers,
        device=device,
        marks=marks,
    )


def open_report(
    args: TrainArgs, mesh: DeviceMesh, progress: Progress, end: int, flops_per_token: float
) -> Reporter:
    """What the run says and writes; what a former start wrote past `progress` is cut off."""
    return Reporter(
        args.logging,
        Path(args.dump_dir),
        mesh,
        name=args.name,
        config=flatten(args),
        step=progress.step,
        steps=end,
        global_batch_size=args.data.global_batch_size,
        seq_len=args.data.seq_len,
        flops_per_token=flops_per_token,
        dtype=args.distributed.dtype,
        trained_s=progress.trained_s,
        evaluates=args.eval is not None and args.eval.launcher == "process",
    )


def open_llama(args: TrainArgs) -> LlamaFolder:
    """The folder of checkpoint.init_from. Raises UserError where it is not one of this model."""
    llama = LlamaFolder(args.checkpoint.init_from, "checkpoint.init_from")
    check_model(llama, args.model, args.checkpoint.allow_change)
    return llama


def prepare_data(args: TrainArgs, tokenizer: Tokenizer, stop: StopRequest) -> bool:
    """Tokenize what is not yet, on rank 0. False where a signal to any rank ended that: it may take
    hours, and what is finished stays."""

    def prepare() -> bool:
        try:
            with stop.at_once():
                prepare_sources(args.data, tokenizer, logger.info, progress=True)
        except Stopped:
            logger.info(
                f"stopped by {stop.signal} while the text was prepared. "
                "The same command goes on from there"
            )
            return False
        return True

    with stop.passed_to_rank_0():
        return on_rank_0(prepare)


def open_data(
    args: TrainArgs, tokenizer: Tokenizer
) -> tuple[dict[str, Source], dict[str, HeldOut]]:
    """The sources by name, and their held-out windows."""
    sources = open_sources(args.data, tokenizer)
    held_out = {}
    for name, source in sources.items():
        windows = held_out_windows(source, args.data.seq_len, args.validation.tokens)
        if windows.n_documents:
            held_out[name] = windows
        else:
            logger.info(f"{name} has too few documents to hold one out: its loss is not measured")
    return sources, held_out


def resolve(
    args: TrainArgs, degree: int, tokenizer: Tokenizer, saved: Saved | None, dump_dir: Path
) -> None:
    """Fill in what the config leaves open. It is decided once: a later start on another topology
    takes the global batch size from the checkpoint or the dump dir's config.yaml."""
    if args.data.global_batch_size is None:
        key, written = "data.global_batch_size", dump_dir / "config.yaml"
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


def description(
    args: TrainArgs, mesh: DeviceMesh, model: nn.Module, n_micro: int, rows: int
) -> Iterator[str]:
    """What a person wants to read before the first step."""
    n_parameters = sum(p.numel() for p in model.parameters())
    device = torch.cuda.get_device_name() if mesh.device_type == "cuda" else "CPU"
    sizes = ", ".join(f"{axis} {size}" for axis, size in zip(AXES, mesh.shape, strict=True))
    n = dist.get_world_size()
    yield f"{args.name}: {n_parameters:,} parameters on {n} x {device} ({sizes})"
    yield (
        f"a step is {args.data.global_batch_size} rows of {args.data.seq_len} tokens: "
        f"{n_micro} micro-step{'s' if n_micro > 1 else ''} of at most {rows} rows "
        f"on each of {dp_degree(mesh)} data-parallel ranks"
    )
    yield from grad_sync_note(model, mesh, args.distributed.grad_sync, n_micro)
    yield from schedule_warnings(args.optim, args.steps)


def check(
    argv: list[str],
    world_size: int,
    config: type[TrainArgs] = TrainArgs,
    build: Callable[[TrainArgs], Built] = build,
) -> tuple[TrainArgs, list[str]]:
    """The configuration of a run to be launched with `world_size` processes, and its notices.

    Raises:
        UserError: set_up would refuse it.
    """
    args, notices = load(config, argv, foreign=META_LINGUA)
    replicate, shard, tp = mesh_sizes(args.distributed, world_size)
    trial, degree = deepcopy(args), replicate * shard
    tokenizer = build_tokenizer(trial.data.tokenizer)
    check_sources(trial.data, tokenizer)
    dump_dir = Path(args.dump_dir or f"runs/{args.name}")
    classes = resume_classes(config)
    checkpoints = Path(args.checkpoint.path or dump_dir / "checkpoints")
    with one_process():
        quick = replace(args.checkpoint, verify="size")
        saved, origin = find_start(checkpoints, quick, classes)
        resolve(trial, degree, tokenizer, saved, dump_dir)
        if saved is None and args.checkpoint.init_from is not None:
            open_llama(trial)
        wanted, allowed = flatten(trial), args.checkpoint.allow_change
        check_config(saved, wanted, classes, allowed)
        check_origin(origin, wanted, tokenizer, classes, allowed)
    global_batch_size, batch_size = trial.data.global_batch_size, trial.data.batch_size
    micro_steps(global_batch_size, degree, batch_size, trial.grad_acc_steps)
    document_marks(trial.data, tokenizer)
    trial.dump_dir = str(dump_dir)
    check_evaluation(trial)
    check_tensor_parallel(build(trial).plan or ParallelPlan(), tp)
    return args, notices
