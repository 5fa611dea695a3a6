"""How a run starts: its processes and folder, and the state that it continues from."""

import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from apps.main.check import Checked, check_dump_dir, check_run
from apps.main.config import TrainArgs
from lingua.app import App
from lingua.base.errors import UserError, import_tool
from lingua.checkpoint.folder import write_run_id
from lingua.checkpoint.resume import TOKENIZER
from lingua.checkpoint.saver import Saver
from lingua.checkpoint.state import Progress
from lingua.checkpoint.tensors import tensors_of
from lingua.data.loader import n_grains
from lingua.data.rows import OpenData
from lingua.monitor.logger import init_logger
from lingua.optim.optimizer import LoopOptimizer, build_optimizer
from lingua.parallel.launch import detect_launch, pick_device, start
from lingua.parallel.mesh import dp_degree, on_rank_0
from lingua.parallel.parallelize import ParallelPlan
from lingua.parallel.signals import Stopped, StopRequest

if TYPE_CHECKING:
    from apps.main.benchmarks import Benchmarks
    from lingua.checkpoint.changes import Change

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Started:
    """Processes that have met, and a folder that is theirs."""

    mesh: DeviceMesh
    device: torch.device  # device of this process
    saver: Saver
    checked: Checked


def start_run(app: App, args: TrainArgs, stop: StopRequest, open_parts: ExitStack) -> Started:
    """Start the process group, take the dump dir, and check everything. Raises UserError, and
    Stopped where a signal came while another run had the folder."""
    launch = detect_launch()
    init_logger(None, launch.rank, app.path)
    device = pick_device(args.device, launch)
    mesh = start(device, launch, args.distributed, args.deterministic, args.folder)
    on_rank_0(partial(check_dump_dir, args.folder))
    init_logger(args.folder, dist.get_rank(), app.path)
    saver = open_parts.enter_context(Saver(args.checkpoint_folder, args.checkpoint))
    run_interruptibly(partial(saver.claim, args.folder), stop, "another run had its folder")
    checked = check_run(app, args, mesh.shape, device.type)
    on_rank_0(partial(write_run_id, args.checkpoint_folder, args.folder))
    return Started(mesh, device, saver, checked)


def is_finished(started: Started, args: TrainArgs) -> bool:
    """Whether an earlier process made the last step, and what follows it, which is logged."""
    saved = started.checked.saved
    if saved is None or saved.progress.step < args.end:
        return False
    where = f"{saved.checkpoint.path} is step {saved.progress.step} of {args.end}"
    with suppress(UserError):  # without the tools there is nothing to finish
        receipt = import_tool("lingua.tools.audit.receipt", "a receipt")
        if not on_rank_0(partial(receipt.is_written, args.folder, saved.progress.step, args.steps)):
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
    args: TrainArgs, checked: Checked, stop: StopRequest
) -> "tuple[OpenData, dict[str, str], list[Change]]":
    """Prepare data where it is not, and open it. Returns it with the hashes of what rows are made
    of, and keys whose value changed since the run was saved. Raises UserError, and Stopped where a
    signal came while text was prepared. Called by every rank."""
    data, tokenizer = checked.data, checked.tokenizer
    prepare = partial(data.prepare, args, tokenizer, logger.info)
    run_interruptibly(prepare, stop, "the text was prepared")
    opened = data.open(args, tokenizer)
    opened.check(args.data)
    fingerprints = {**opened.fingerprints, TOKENIZER: tokenizer.fingerprint()}
    changes = checked.changes
    if checked.saved is not None:
        from lingua.checkpoint.changes import check_data  # imported for a run that resumes

        changes = changes + check_data(checked.saved, fingerprints, args.checkpoint.allow_change)
    return opened, fingerprints, changes


def make_optimizer(
    app: App, model: nn.Module, args: TrainArgs, plan: ParallelPlan | None
) -> LoopOptimizer:
    """The app's optimizer, or that of the configuration."""
    if app.optimizer is None:
        optimizer = build_optimizer(model, args.optim, plan.blocks if plan else ())
    else:
        from lingua.optim.adapter import adapt  # imported where a fork has an optimizer of its own

        optimizer = adapt(app.optimizer(model, args, plan), model)
    if args.exact:
        from lingua.optim.exact import make_exact

        make_exact(optimizer)
    return optimizer


def add_in_order(model: nn.Module, args: TrainArgs, mesh: DeviceMesh) -> None:
    """Have the gradients of the model added in the order of a step's grains."""
    from lingua.parallel.exact import GradientSums

    _, rows = args.micro_steps(dp_degree(mesh))
    GradientSums(model, mesh, n_grains(args.data.step_rows, rows), args.distributed.dtype)


def load_benchmarks(args: TrainArgs) -> "Benchmarks | None":
    """The tasks of `eval` with their data, if the run has some. Raises UserError."""
    if args.eval is None:
        return None
    from apps.main.benchmarks import Benchmarks

    return Benchmarks(args)


def restore(
    checked: Checked,
    changes: "list[Change]",
    args: TrainArgs,
    model: nn.Module,
    optimizer: LoopOptimizer,
    mesh: DeviceMesh,
) -> Progress:
    """Load what the run starts from into its model and optimizer, if anything; returns where it
    continues. `changes` are logged. Called by every rank."""
    saved, origin = checked.saved, checked.origin
    if saved is not None:
        from lingua.checkpoint.changes import log_resume
        from lingua.checkpoint.source import open_checkpoint

        open_checkpoint(saved.checkpoint).load(tensors_of(model, optimizer))
        log_resume(saved, changes, mesh.shape)
        return saved.progress
    if origin is not None:
        return origin.load_into(model, optimizer, changes, args.data.step_rows)
    return Progress()
