"""Train a language model (the whole run, read top to bottom):

    python -m apps.main.train config=apps/main/configs/debug.yaml
    python -m apps.main.train config=my.yaml name=second optim.lr=1e-3 app=my_app
    torchrun --nproc-per-node 4 -m apps.main.train config=my.yaml distributed.tp_size=2

What a fork changes it gives as its App (lingua.app): the model, where rows come from, the
optimizer, the objective, a probe. A fork that changes the order of the loop copies this file, and
imports the parts of it that stay (set_up, Objective, next_batch, save_checkpoint, ...).
"""

import gc
import logging
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from apps.main.benchmarks import Benchmarks
from apps.main.config import TrainArgs
from apps.main.run import Run
from apps.main.samples import check_samples, write_samples
from apps.main.start import check as check  # what lingua.stool calls before it launches
from apps.main.start import (
    check_dump_dir,
    check_start,
    default_optimizer,
    describe,
    machine,
    restore,
    unless_stopped,
)
from lingua.app import App, choose_app
from lingua.checkpoint.folder import TrainState
from lingua.checkpoint.resume import TOKENIZER, check_data
from lingua.checkpoint.saver import Saver
from lingua.checkpoint.tensors import settings_of, tensors_of
from lingua.config.load import to_yaml
from lingua.data import IGNORE
from lingua.data.documents import document_marks
from lingua.data.loader import Loader, MicroBatch
from lingua.device import to_device
from lingua.errors import UserError
from lingua.files import write_atomically
from lingua.format import short_time
from lingua.hashing import batch_hash, hash_bits, key_of
from lingua.init import init_parameters
from lingua.model import Losses
from lingua.monitor.logger import init_logger
from lingua.monitor.profiling import Profiler
from lingua.monitor.reporter import Reporter
from lingua.optim.adapter import adapt
from lingua.optim.optimizer import NonFiniteGuard, update
from lingua.optim.schedule import lr_at
from lingua.parallel.gradients import clip_divisor, grad_norm, set_gradient_sync
from lingua.parallel.launch import detect_launch, pick_device, set_timeout, start
from lingua.parallel.mesh import dp_degree, dp_rank, on_rank_0, world_sum_
from lingua.parallel.parallelize import parallelize_model, reshard
from lingua.parallel.program import run_program
from lingua.plan.fact import against_plan
from lingua.run_config import load_run
from lingua.signals import StopRequest
from lingua.slurm.jobs import requeue
from lingua.validation import validate

# Steps between garbage collections, on all ranks in the same step: one that collects alone
# holds up the others. Every tenth is of all objects, which takes a tenth of a second.
COLLECT_EVERY = 100

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    app = choose_app(argv)
    args: TrainArgs
    args, notices = load_run(app, argv)
    if detect_launch().rank == 0:
        for line in notices:
            print(line)
    train(app, args)


def train(app: App, args: TrainArgs) -> str | None:
    """Train until `steps`, `stop_at` or a signal, from the newest checkpoint if there is one.
    Returns the name of the signal of this process that ended it, if one did."""
    init_logger(None, detect_launch().rank, app.path)
    with closing(StopRequest("stopping before the next step")) as stop:
        with ExitStack() as open_parts:  # closed at the end, also of a start that fails
            parts = set_up(app, args, stop, open_parts)
            stopping = parts is None  # an earlier start finished it, or a signal came early
            if parts is not None:
                run, steps, benchmarks = parts
                gc.disable()  # the loop collects
                open_parts.callback(gc.enable)
                stopping = take_steps(run, steps, benchmarks, stop)
                finish(run, stop, stopping)
        if stopping:
            requeue(stop.signal)
        return stop.signal if stopping else None


def set_up(
    app: App, args: TrainArgs, stop: StopRequest, open_parts: ExitStack
) -> tuple[Run, Iterator[list[MicroBatch]], Benchmarks] | None:
    """Everything before the first step; None when there is no step left to do."""
    # ---- processes, and the folder of the run
    launch = detect_launch()
    device = pick_device(args.device, launch)
    mesh = start(device, launch, args.distributed, args.deterministic, args.folder)
    on_rank_0(partial(check_dump_dir, args.folder))
    init_logger(args.folder, dist.get_rank(), app.path)
    saver = open_parts.enter_context(Saver(args.checkpoint_folder, args.checkpoint))
    if not unless_stopped(partial(saver.claim, args.folder), stop, "another run had its folder"):
        return None

    # ---- what can be wrong, and what an earlier start left
    begin = check_start(app, args, mesh.shape, device.type)
    if begin.saved is not None and (step := begin.saved.progress.step) >= args.end:
        where = f"{begin.saved.checkpoint.path} is step {step} of {args.end}"
        logger.info(f"the run is finished: {where}. To continue it, raise steps or stop_at")
        return None
    benchmarks = Benchmarks(args)  # loads their tasks

    # ---- data
    prepare = partial(begin.data.prepare, args, begin.tokenizer, logger.info)
    if not unless_stopped(prepare, stop, "the text was prepared"):
        return None
    data = begin.data.open(args, begin.tokenizer)
    fingerprints = {**data.fingerprints, TOKENIZER: begin.tokenizer.fingerprint()}
    begin.changes.extend(check_data(begin.saved, fingerprints, args.checkpoint.allow_change))

    # ---- model and optimizer, and the state that they start from
    built = begin.built
    model = parallelize_model(built.module, mesh, built.plan, args.distributed)
    init_parameters(model, args.seed, device)
    optimizer = adapt((app.optimizer or default_optimizer)(model, args, built.plan), model)
    progress = restore(begin, args, model, optimizer, mesh)
    on_rank_0(lambda: write_atomically(args.folder / "config.yaml", to_yaml(args)))
    for line in describe(args, model, mesh):
        logger.info(line)

    # ---- rows from there on, and a place to report to
    degree, marks = dp_degree(mesh), document_marks(args.data, begin.tokenizer)
    micro = args.micro_steps(degree)
    mine = dp_rank(mesh), degree, *micro, device, marks, data.documents
    loader = Loader(data.rows, args.data.step_rows, *mine)
    steps = open_parts.enter_context(closing(loader.steps(progress.position, args.data.workers)))
    report = open_parts.enter_context(
        Reporter(args, mesh, progress, built.flops_per_token, saver.is_alone)
    )
    report.event("start", progress.step, topology=mesh.shape, **machine(report.device_name))
    if begin.saved is not None and begin.saved.topology != mesh.shape:
        report.event("topology", progress.step, old=begin.saved.topology, new=mesh.shape)
    run = Run(
        app, args, mesh, model, optimizer, begin.tokenizer, data, fingerprints, progress, report,
        saver,
    )  # fmt: skip
    return run, steps, benchmarks


def take_steps(
    run: Run, steps: Iterator[list[MicroBatch]], benchmarks: Benchmarks, stop: StopRequest
) -> bool:
    """The loop. Returns True when a signal ended it before its last step."""
    args, report, progress = run.args, run.report, run.progress
    global_batch_size = args.data.global_batch_size
    objective = (run.app.objective or Objective)(run)
    guard = NonFiniteGuard(args.optim.on_nonfinite, run.device, progress.skipped_steps)
    profiler = Profiler(args.profiling, args.dump_dir, run.mesh)
    benchmarks.evaluate_missed(run, stop)
    check_samples(run)  # so that what the last step shows does not fail only there
    stop.note = "saving after this step"
    first, saved_at = progress.step + 1, time.monotonic()
    batch, valid, stopping, overdue = next_batch(run, steps, stop, saved_at)
    if stopping and progress.step:
        save_checkpoint(run, None, final=True)  # a branch has none of its own yet
    while progress.step < args.end and not stopping:
        step = progress.step + 1
        check_targets(valid, step, progress.position, global_batch_size)
        with profiler.step(step):
            loss, hashed, norm, lr = train_step(run, objective, guard, batch, valid)
        progress.step, progress.position = step, progress.position + global_batch_size

        # The device has work now: meanwhile the next rows are read, and the ranks agree on them.
        if step < args.end:
            batch, valid, stopping, overdue = next_batch(run, steps, stop, saved_at)
        if step == first:
            set_timeout(run.mesh, args.distributed.step_timeout_s)  # what compiles has compiled
        if step % COLLECT_EVERY == 0:
            gc.collect(2 if step % (10 * COLLECT_EVERY) == 0 else 1)  # all objects, or new ones

        evaluate_due = args.evaluation_due(step)
        # A job needs the checkpoint, and an evaluation here takes its time.
        save_due = args.checkpoint.due(step) or overdue or step == args.end or evaluate_due
        if report.due(step) or save_due or stopping:
            measured, counts = report.read(loss, norm, hashed, guard.counts)  # waits for the device
            count_skipped(run, guard, counts)
            if report.due(step):
                report.log(progress, measured, lr)
        held_out = None  # where it is not measured
        if args.measurement_due(step) or (save_due and args.checkpoint.keep_best):
            with report.paused():
                held_out = objective.measure()
        if save_due or stopping:
            save_checkpoint(run, held_out, final=stopping or step == args.end)
            saved_at = time.monotonic()
        if args.samples_due(step):
            with report.paused():
                write_samples(run)
        if evaluate_due:
            benchmarks.evaluate(run, stop)
            asked = world_sum_(torch.tensor([stop.signal is not None]))  # while it ran
            stopping |= step < args.end and bool(asked)
    profiler.close()
    if stopping:
        run.saver.wait()  # raises the error that ends the run, if one does
    return stopping


def train_step(
    run: Run, objective: "Objective", guard: NonFiniteGuard, batch: list[MicroBatch], valid: Tensor
) -> tuple[Tensor, Tensor, Tensor, float]:
    """One update, of which lingua.plan makes a trace too: gradients of this rank's micro-batches,
    clipping, the optimizer. `valid` is on the CPU, as `count_targets` returns it.

    Returns what `objective.gradients` does, the norm of the gradient, and the learning rate.
    """
    args, step = run.args, run.progress.step + 1
    run.report.numbers.clear()  # of the step before
    loss, hashed = objective.gradients(batch, to_device(valid, run.device))
    if run.app.probe is not None:
        run.app.probe(run)
    reshard(run.model)  # what a probe's forward has left whole
    norm = grad_norm(list(run.model.parameters()))
    lr = lr_at(run.progress.step, args.optim, args.steps)
    admitted, divisor = guard.admit(step, norm), clip_divisor(norm, args.optim.clip)
    update(run.optimizer, lr, admitted, divisor)  # a bad gradient changes nothing
    run.optimizer.zero_grad()
    return loss, hashed, norm, lr


class Objective:
    """What a run minimises: the mean loss of the targets. A fork may give another, or a part."""

    def __init__(self, run: Run) -> None:
        """Called by every rank once the run is restored, before its first step."""
        self.run = run
        self.marks = document_marks(run.args.data, run.tokenizer)

    def gradients(self, batch: list[MicroBatch], valid: Tensor) -> tuple[Tensor, Tensor]:
        """Fill `.grad` with the gradient of (sum of token losses / valid targets) over the global
        batch, plus the mean over its rows of each term that the model has per row.

        Args:
            batch: this data-parallel rank's micro-batches, the same number on every rank.
            valid: int64 [views - 1] on the device: targets of the whole global batch.

        Returns:
            This rank's share of that loss, float32, and the hash of the rows it used, int64; both
            are summed over data-parallel ranks where they are logged. Further numbers of the step
            go to `run.report.add`.
        """
        run, args = self.run, self.run.args
        noise = key_of(args.seed, "noise", run.progress.step + 1) if args.model.dropout else None
        loss = torch.zeros((), device=run.device)
        hashed = torch.zeros((), dtype=torch.int64, device=run.device)
        for i, micro in enumerate(batch):
            ids, tokens, targets, *documents = (
                t.to(run.device, non_blocking=True) for t in micro.tensors()
            )
            last = i == len(batch) - 1
            set_gradient_sync(run.model, args.distributed.grad_sync, last)  # reduced on the last
            random = {} if noise is None else {"noise": hash_bits(noise, ids)}
            sums, _, per_row = Losses(*run.model(tokens, targets, *documents, **random))
            if sums.shape != valid.shape:  # else the division would broadcast
                raise UserError(
                    f"data.n_views = {len(valid) + 1}: the model predicts {len(sums)} of the "
                    f"{len(valid)} views after the first; must be {len(sums) + 1}"
                )
            part = (sums / valid).sum()  # over the views
            # Terms of the rows, not of padding: means over the global batch.
            terms = {
                name: torch.where(ids >= 0, term, 0).sum() / args.data.global_batch_size
                for name, term in per_row.items()
            }
            sum(terms.values(), part).backward()
            loss += part.detach()
            for name, term in terms.items():
                run.report.add(name, term)
            hashed += batch_hash(ids, tokens, targets)
        return loss, hashed

    def measure(self) -> float | None:
        """Measure and report the held-out loss of every source. Returns it in nats per byte of all
        of them, None where nothing is held out. The lowest is the best checkpoint."""
        run, args = self.run, self.run.args
        _, rows = args.micro_steps(dp_degree(run.mesh))
        nats = n_bytes = 0.0
        for name, windows in run.data.held_out.items():
            result = validate(run.model, windows, rows, args.data.n_views - 1, run.mesh, self.marks)
            run.report.validation(run.progress.step, name, result)
            nats += result["nats_per_byte"] * result["bytes"]
            n_bytes += result["bytes"]
        if len(run.data.held_out) > 1:
            where = f"step {run.progress.step} held-out mean of {len(run.data.held_out)} sources"
            logger.info(f"{where}: {nats / n_bytes:.4f} nats/byte")
        return nats / n_bytes if n_bytes else None


# ------------------------------------------------------------------------------- parts of the loop


def next_batch(
    run: Run, steps: Iterator[list[MicroBatch]], stop: StopRequest, saved_at: float
) -> tuple[list[MicroBatch], Tensor, bool, bool]:
    """This rank's micro-batches of the next step, and what ranks agree on for it, as
    `count_targets` returns it: the one message between hosts of a step."""
    with run.report.waiting_for_data():
        batch = next(steps)
    wants_stop = stop.signal is not None or run.saver.must_stop
    # By the clock of rank 0.
    overdue = dist.get_rank() == 0 and run.args.checkpoint.overdue(time.monotonic() - saved_at)
    return batch, *count_targets(batch, wants_stop, overdue, run.mesh)


def count_targets(
    batch: list[MicroBatch], stopping: bool, overdue: bool, mesh: DeviceMesh
) -> tuple[Tensor, bool, bool]:
    """Valid targets of the whole global batch, int64 of each view on the CPU, and whether any rank
    stops, and any is overdue to save."""
    counts = torch.stack([(micro.targets != IGNORE).sum((1, 2)) for micro in batch]).sum(0)
    if mesh.get_local_rank("tp"):  # tp ranks of a group hold the same rows: one of them counts
        counts = torch.zeros_like(counts)
    total = world_sum_(torch.cat((counts, torch.tensor([stopping, overdue]))))
    return total[:-2], bool(total[-2]), bool(total[-1])


def check_targets(valid: Tensor, step: int, position: int, global_batch_size: int) -> None:
    """Raise UserError where a view has no valid target in the whole global batch."""
    if not valid.all():
        rows = f"{position} to {position + global_batch_size - 1}"
        raise UserError(f"step {step}: all targets are ignored in its global batch (rows {rows})")


def count_skipped(run: Run, guard: NonFiniteGuard, counts: list[int]) -> None:
    """Take over the updates that were suppressed, by the values of `guard.counts`. Where one is to
    stop the run, no later one was made: what the bad step found is saved, so that nothing trained
    before it is lost."""
    progress, rows = run.progress, run.args.data.global_batch_size
    try:
        progress.skipped_steps = guard.skipped(counts, progress.step, progress.position, rows)
    except UserError:
        undone = progress.step + 1 - counts[1]
        progress.step -= undone
        progress.position -= undone * rows
        if progress.step:
            save_checkpoint(run, None, final=True)
        raise


def save_checkpoint(run: Run, held_out: float | None, final: bool) -> None:
    """Save the completed step and its held-out loss, if that was measured, in nats per byte. A
    `final` save is finished when this returns."""
    args, progress, report = run.args, run.progress, run.report
    with report.paused():
        progress.trained_s = report.trained_s
        rate = lr_at(progress.step, args.optim, args.steps)
        state = TrainState(
            progress,
            tokens=progress.position * args.data.seq_len,
            schedule={"step": progress.step, "lr": rate},
            param_groups=settings_of(run.optimizer),
            topology=list(run.mesh.shape),
            data=run.fingerprints,
            held_out=held_out,
        )
        tensors = tensors_of(run.model, run.optimizer)
        run.saver.save(progress.step, tensors, asdict(state), to_yaml(args), final)


def finish(run: Run, stop: StopRequest, stopping: bool) -> None:
    """Log how the run ended; a finished one also writes samples."""
    args, step = run.args, run.progress.step
    reason = "done"
    if stopping:
        reason = by = stop.signal or "a signal to another rank"
        where = f"after step {step}, which is saved" if step else "before the first step"
        logger.info(f"stopped by {by} {where}. The same command resumes it")
    elif step < args.steps:
        reason = "stop_at"
        logger.info(f"stopped after step {step}, as stop_at asks; without it the run continues")
    else:
        write_samples(run)
        newest = f"the newest checkpoint is {run.saver.root / f'{step:010d}'}"
        logger.info(f"done: {step} steps in {short_time(run.report.trained_s)}; {newest}")
    step_s = run.report.trained_s / max(1, step)
    if line := against_plan(args.folder, run.mesh.shape, run.device, step_s):
        logger.info(line)
    if not stopping:
        logger.info(f"report: python -m lingua.report {shlex.quote(str(args.folder))}")
    run.report.event("stop", step, reason=reason)


if __name__ == "__main__":
    run_program(main)
