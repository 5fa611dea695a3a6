"""How a run starts: what can be wrong with it is found before it trains, and by lingua stool before
a launch; its processes meet, take its folder, and build or load what it continues from."""

import inspect
import logging
import math
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lingua.app import App, Built, choose_app
from lingua.base.dump_dir import CONFIG, FILES, FOLDERS, SURVIVORS
from lingua.base.errors import UserError, check_array, tool_needed_by
from lingua.base.format import counted
from lingua.base.urls import url_of_copy
from lingua.checkpoint.args import CheckpointArgs
from lingua.checkpoint.folder import Checkpoint, check_run_id, published, write_run_id
from lingua.checkpoint.run_config import load_run
from lingua.checkpoint.saver import Saver
from lingua.checkpoint.starts import last_start
from lingua.checkpoint.state import Progress
from lingua.checkpoint.tensors import tensors_of
from lingua.config.load import flatten, resume_classes
from lingua.config.values import read_files
from lingua.data.args import n_grains
from lingua.data.loader import Loader
from lingua.data.rows import TOKENIZER, Data, OpenData
from lingua.data.sources import TextData
from lingua.model import Losses
from lingua.model.attention import choose_attention
from lingua.monitor.logger import init_logger
from lingua.optim.optimizer import LoopOptimizer, build_optimizer
from lingua.parallel.args import fitting, mesh_sizes
from lingua.parallel.gradients import Sharded
from lingua.parallel.heartbeat import Heartbeat
from lingua.parallel.launch import detect_launch, pick_device, start
from lingua.parallel.mesh import dp_degree, on_rank_0, sizes_of
from lingua.parallel.plan import ParallelPlan, check_layout
from lingua.parallel.signals import Stopped, StopRequest
from lingua.run.args import RunArgs
from lingua.run.receipt import is_written
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import Tokenizer

if TYPE_CHECKING:
    from lingua.checkpoint.changes import Change
    from lingua.checkpoint.origin import Origin
    from lingua.checkpoint.saved import Saved
    from lingua.run.run import Run
    from lingua.tools.elastic.recheck import Recheck
    from lingua.tools.inference.benchmarks import Benchmarks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checked:
    """The values that are decided before data is prepared and the model takes memory."""

    data: Data
    tokenizer: Tokenizer
    built: Built
    saved: "Saved | None"  # checkpoint to resume, if there is one
    origin: "Origin | None"  # the tensors that a new run starts from, or any reads its base from
    changes: "list[Change]"  # keys that differ from the checkpoint's


@dataclass(frozen=True)
class Started:
    """Processes that have met, and a folder that is theirs."""

    mesh: DeviceMesh
    device: torch.device  # device of this process
    saver: Saver
    checked: Checked
    heart: Heartbeat = field(default_factory=Heartbeat)  # is given where this rank is


def start_run(app: App, args: RunArgs, stop: StopRequest, open_parts: ExitStack) -> Started:
    """Start the process group, take the dump dir, and check everything. Raises UserError, and
    Stopped where a signal came while another run had the folder."""
    launch = detect_launch()
    init_logger(None, launch.rank, app.path)
    device = pick_device(args.device, launch)
    heart, last = Heartbeat(), last_start(args.folder).number  # before ranks of this start meet
    mesh = start(device, launch, args.distributed, args.deterministic, args.folder, heart)
    on_rank_0(partial(check_dump_dir, args.folder))
    init_logger(args.folder, dist.get_rank(), app.path)
    saver = open_parts.enter_context(Saver(args.checkpoint_folder, args.checkpoint))
    run_interruptibly(partial(saver.claim, args.folder, last), stop, "another run had its folder")
    saver.number = on_rank_0(lambda: saver.start.number)
    if on_rank_0(lambda: any(saver.root.glob(f"{SURVIVORS}-*"))):
        with tool_needed_by("what ranks have saved after the death of another"):
            from lingua.tools.elastic.survivors import publish_survivors

        publish_survivors(saver, args)
    mirror = None
    if args.checkpoint.mirror is not None:
        with tool_needed_by("checkpoint.mirror"):
            from lingua.tools.storage.mirror import Mirror

        mirror = Mirror(args, saver, stop)
        run_interruptibly(mirror.restore, stop, "a checkpoint was downloaded")
    checked = check_run(app, args, mesh.shape, device.type, saver.start.shards)
    on_rank_0(partial(write_run_id, args.checkpoint_folder, args.folder))
    if mirror is not None:
        open_parts.enter_context(mirror)
    return Started(mesh, device, saver, checked, heart)


def is_finished(started: Started, args: RunArgs) -> bool:
    """Whether an earlier process made the last step, and what follows it, which is logged."""
    saved = started.checked.saved
    if saved is None or saved.progress.step < args.end:
        return False
    where = f"{saved.checkpoint.path} is step {saved.progress.step} of {args.end}"
    if not on_rank_0(partial(is_written, args.folder, saved.progress.step, args.steps)):
        logger.info(f"{where}: what follows the last step is made now")
        return False
    logger.info(f"the run is finished: {where}. To continue it, raise steps or stop_at")
    return True


def run_interruptibly(work: Callable[[], object], stop: StopRequest, what: str) -> None:
    """Run `work`, which may take hours, on rank 0. Called by every rank. Raises Stopped on every
    rank where a signal ended it, which is logged: what is finished stays."""

    def attempt() -> bool:
        try:
            with stop.at_once():
                work()
        except Stopped:
            logger.info(f"stopped by {stop.signal} while {what}. The same command resumes it")
            return False
        return True

    if not on_rank_0(attempt):
        raise Stopped


def open_data(
    args: RunArgs, checked: Checked, stop: StopRequest
) -> "tuple[OpenData, dict[str, str], list[Change]]":
    """Prepare data where it is not, and open it. Returns it with the hashes of what rows are made
    of, and keys whose value changed since the run was saved. Raises UserError, and Stopped where a
    signal came while text was prepared. Called by every rank."""
    data, tokenizer = checked.data, checked.tokenizer
    prepare = partial(data.prepare, args, tokenizer, logger.info)
    run_interruptibly(prepare, stop, "the text was prepared")
    opened = data.open(args, tokenizer)
    if type(data) is not TextData:
        from lingua.data.contract import check_opened  # imported for rows of an app

        check_opened(opened, args.data)
    fingerprints = {**opened.fingerprints, TOKENIZER: tokenizer.fingerprint()}
    if checked.origin is not None:
        fingerprints |= checked.origin.fingerprints(checked.built.base)
    changes = checked.changes
    if checked.saved is not None:
        from lingua.checkpoint.changes import check_data  # imported for a run that resumes

        changes = changes + check_data(checked.saved, fingerprints, args.checkpoint.allow_change)
    return opened, fingerprints, changes


def make_optimizer(
    app: App, model: nn.Module, args: RunArgs, plan: ParallelPlan | None
) -> LoopOptimizer:
    """The app's optimizer, or that of the configuration."""
    if app.optimizer is None:
        optimizer = build_optimizer(model, args.optim, plan.blocks if plan else ())
    if app.optimizer is not None or args.device == "mps":
        from lingua.optim.adapter import adapt  # imported where another one is adapted

        # On mps the kernel of AdamW ignores what AdamWMuon gives it (torch 2.13).
        other = app.optimizer(model, args, plan) if app.optimizer else None
        optimizer = adapt(other or torch.optim.AdamW(optimizer.param_groups, fused=True), model)
    if args.exact:
        from lingua.optim.exact import make_exact

        make_exact(optimizer)
    return optimizer


def add_in_order(model: nn.Module, args: RunArgs, mesh: DeviceMesh) -> None:
    """Have the gradients of the model added in the order of a step's grains."""
    from lingua.parallel.exact import GradientSums

    _, rows = args.micro_steps(dp_degree(mesh))
    n = n_grains(args.data.step_rows, rows)
    assert isinstance(model, Sharded)
    model.gradient_sums = GradientSums(model, mesh, n, args.distributed.dtype)


def make_recheck(run: "Run", loader: Loader) -> "Recheck | None":
    """What compares gradients of ranks, with `distributed.check_every` and several of them."""
    if run.args.distributed.check_every is None:
        return None
    with tool_needed_by("distributed.check_every"):
        from lingua.tools.elastic.recheck import Recheck
    return Recheck.of(run, loader)


def surviving(run: "Run") -> AbstractContextManager[None]:
    """Around the steps of a run: its replicas save a copy of it when a rank dies. Without the tool
    for that, the next start resumes from the last checkpoint."""
    if run.mesh.shape[0] == 1:
        return nullcontext()
    try:
        with tool_needed_by("saving a copy of the run when a rank dies"):
            from lingua.tools.elastic.survivors import save_when_one_dies
    except UserError as error:
        logger.info(error)
        return nullcontext()
    return save_when_one_dies(run)


def load_benchmarks(args: RunArgs) -> "Benchmarks | None":
    """The tasks of `eval` with their data, if the run has some. Raises UserError."""
    if args.eval is None:
        return None
    with tool_needed_by("eval.tasks"):
        from lingua.tools.inference.benchmarks import Benchmarks

    return Benchmarks(args)


def restore(
    checked: Checked,
    changes: "list[Change]",
    args: RunArgs,
    model: nn.Module,
    optimizer: LoopOptimizer,
    mesh: DeviceMesh,
) -> Progress:
    """Load what the run starts from into its model and optimizer, if anything; returns where it
    continues. `changes` are logged. Called by every rank."""
    saved, origin, base = checked.saved, checked.origin, checked.built.base
    if saved is not None:
        from lingua.checkpoint.changes import log_resume
        from lingua.checkpoint.source import open_checkpoint

        if origin is not None:
            origin.load_base(model, base)
        open_checkpoint(saved.checkpoint).load(tensors_of(model, optimizer, without=base))
        log_resume(saved, changes, sizes_of(mesh))
        return saved.progress
    if origin is not None:
        new = args.checkpoint.init_new
        return origin.load_into(model, optimizer, changes, args.data.step_rows, new, base)
    return Progress()


def check(argv: list[str], world_size: int) -> tuple[RunArgs, list[str]]:
    """The configuration of a run to be launched with `world_size` processes, and its notices: what
    lingua stool asks for. Raises UserError where the run would refuse it."""
    from lingua.parallel.alone import one_process

    files = read_files(argv)
    app = choose_app(argv, files)
    args: RunArgs
    args, notices = load_run(app, argv, files=files)
    resolved = deepcopy(args)
    resolved.checkpoint.verify = "size"  # the run itself compares checksums
    n = fitting(args.distributed, world_size) if args.distributed.spare else world_size
    with one_process():
        device = args.device.replace("auto", "cuda")  # on the machine that runs it
        check_run(app, resolved, mesh_sizes(args.distributed, n or world_size), device)
    args.app = app.path
    return args, notices


def check_run(
    app: App, args: RunArgs, sizes: tuple[int, ...], device: str, prepared: Collection[str] = ()
) -> Checked:
    """Everything that can be found wrong before a run trains. Called by every rank.

    Fills in what `args` leaves open: the global batch size, the vocabulary, the dump dir. `sizes`
    are those of the mesh, (dp_replicate, dp_shard, tp), and `device` is the type of its devices;
    `prepared` is for TextData, on rank 0.
    Raises UserError where the run cannot start like this.
    """
    if args.app not in (None, app.path):
        raise UserError(f"app = {args.app}: this program trains {app.path}; leave it out")
    replicas, shards, tp = sizes
    degree, cp = replicas * shards // args.distributed.cp_size, args.distributed.cp_size
    args.app = app.path
    args.dump_dir = str(args.folder)
    data: Data = app.data or TextData(prepared)
    tokenizer = build_tokenizer(args.data.tokenizer)
    if tokenizer.fingerprint() != on_rank_0(tokenizer.fingerprint):
        path = args.data.tokenizer.path
        raise UserError(f"data.tokenizer.path = {path}: has another content than on rank 0", True)
    found, previous_rows = on_rank_0(partial(look, args, data, tokenizer))
    classes, allowed = resume_classes(type(args)), args.checkpoint.allow_change
    saved, origin = find_start(found, args.checkpoint, classes, app)
    previous_rows = previous_rows if saved is None else saved.config["data.global_batch_size"]
    resolve(args, degree, tokenizer, saved, previous_rows)
    config = flatten(args)
    changes: list[Change] = []
    if saved is not None:
        from lingua.checkpoint.changes import check_config, kernel_changes  # for one that resumes

        changes = check_config(saved, config, classes, allowed)
        changes += kernel_changes(saved, device) if args.deterministic else []
    elif origin is not None:
        changes = origin.check(args.model, config, tokenizer, classes, allowed)
    args.micro_steps(degree)
    resolve_attention(args, device)
    built = app.build(args)
    check_forward(built.module, args)
    check_layout(built.module, built.plan, tp, cp)
    if built.base:
        from lingua.checkpoint.origin import find_base  # imported where there is one

        origin = origin or find_base(args.checkpoint, saved, app)
        base = args.checkpoint.init_from or ""  # a run may have newer checkpoints
        args.checkpoint.init_from = url_of_copy(base, origin.source.path)
    elif saved is not None and args.checkpoint.init_from is not None:
        logger.info(f"{args.checkpoint.init_from} is not read: this run has checkpoints of its own")
    if args.distributed.float8 is not None:
        from lingua.parallel.float8 import check_float8

        check_float8(built.module, built.plan, sizes, args.data.seq_len, cp, device)
    if args.eval is not None:
        with tool_needed_by("eval.tasks"):
            from lingua.tools.inference.benchmarks import check_benchmarks
        on_rank_0(partial(check_benchmarks, args))
    return Checked(data, tokenizer, built, saved, origin, changes)


def look(
    args: RunArgs, data: Data, tokenizer: Tokenizer
) -> tuple[list[dict[str, Any]], int | None]:
    """What one process finds on disk for all: the checkpoints of the run, as values of JSON, the
    last published first, and the global batch size that an earlier start decided. Raises UserError
    for data that cannot be read, and for checkpoints of another run or that are all damaged."""
    data.check(args, tokenizer)
    if args.logging.trackers:
        with tool_needed_by("logging.to"):
            from lingua.tools.trackers import check_packages
        check_packages(args.logging)
    root, key = args.checkpoint_folder, "data.global_batch_size"
    check_run_id(root, args.folder)
    found, rows = published(root, logger.warning), None
    config_file = args.folder / CONFIG
    if args.data.global_batch_size is None and not found and config_file.exists():
        from lingua.checkpoint.saved import flat_config  # imported for a run that has started

        rows = flat_config(config_file, [key]).get(key)
    return [checkpoint.to_json() for checkpoint in found], rows


def find_start(
    found: list[dict[str, Any]], args: CheckpointArgs, keys: Iterable[str], app: App | None = None
) -> "tuple[Saved | None, Origin | None]":
    """The checkpoint to resume, or else what to start from, if anything. Called by every rank.
    Raises UserError where no checkpoint verifies, and where checkpoint.init_from names nothing to
    start from.

    Args:
        found: this run's own checkpoints, as `look` returns them.
        keys: of the config, dotted.
        app: that of the run; None: apps.main.
    """
    if found:
        from lingua.checkpoint.saved import newest, read_saved  # imported for a run that resumes

        resumed = newest(list(map(Checkpoint.of_json, found)), args.verify, logger.warning)
        return read_saved(resumed, keys), None
    if args.init_from is None:
        return None, None
    from lingua.checkpoint.origin import find_origin  # imported for a run that has one

    return find_origin(args, keys, app)


def resolve(
    args: RunArgs, degree: int, tokenizer: Tokenizer, saved: "Saved | None", previous: int | None
) -> None:
    """Fill in what the config leaves open. It is decided once: a later start on another topology
    takes the `previous` global batch size, from the checkpoint or the dump dir's config.yaml."""
    if args.data.global_batch_size is None:
        key = "data.global_batch_size"
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


def resolve_attention(args: RunArgs, device: str) -> tuple[str, str]:
    """(implementation of attention, why it is this one) of the run. Raises UserError."""
    window = args.model.sliding_window
    masked = args.data.document_mask != "none" or (window or math.inf) < args.data.seq_len
    head_dim, dtype = args.model.heads()[2], args.distributed.dtype
    return choose_attention(args.model.attn_impl, head_dim, torch.device(device), dtype, masked)


def check_forward(model: nn.Module, args: RunArgs) -> None:
    """Raise UserError where the config asks for an argument that the model's forward lacks."""
    asked = {"documents": ("data.document_mask", "none"), "noise": (args.noisy, 0.0)}
    for argument, (key, off) in asked.items():
        try:
            inspect.signature(model.forward).bind(None, None, **{argument: None})
        except TypeError:
            if key is not None and (value := flatten(args)[key]) != off:
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
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            raise UserError(f"dump_dir = {folder}: this user may not read and write in it")
        for path in folder.iterdir():
            mode = os.R_OK if path.name == CONFIG else os.R_OK | os.W_OK
            usable = path.is_file() and os.access(path, mode, effective_ids=True)
            if path.name in FILES and not usable:
                raise UserError(f"{path}: must be a file that can be read and written, or absent")
            if path.name in FOLDERS and not path.is_dir():
                raise UserError(f"{path}: must be a folder, or absent")
    except OSError as error:
        raise UserError(f"dump_dir = {folder}: cannot be used: {error}") from None
