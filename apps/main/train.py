"""Train a language model (the whole run, read top to bottom):

    python -m apps.main.train config=apps/main/configs/debug.yaml
    python -m apps.main.train config=my.yaml name=second optim.lr=1e-3 app=my_app
    torchrun --nproc-per-node 4 -m apps.main.train config=my.yaml distributed.tp_size=2

A fork gives what it changes as its App (lingua.app): the model, where rows come from, the
optimizer, the objective, a probe. A fork that changes the order of the loop copies this file.
"""

if __name__ == "__main__":  # mistakes are printed before the seconds in which torch is imported
    from lingua.run.program import run_loop

    run_loop(__spec__.name, __doc__)

from collections.abc import Generator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lingua.app import App
from lingua.base.hashing import batch_hash
from lingua.data import IGNORE
from lingua.data.loader import Loader, MicroBatch
from lingua.data.rows import HeldOut, document_marks
from lingua.model import Losses, as_losses
from lingua.monitor.held_out import measure_sources, validate
from lingua.monitor.means import Means
from lingua.monitor.profiling import open_profiler
from lingua.monitor.reporter import Reporter, StepResult
from lingua.optim.optimizer import NonFiniteGuard, update
from lingua.optim.schedule import lr_at
from lingua.parallel.gradients import clip_divisor, grad_norm, set_gradient_sync
from lingua.parallel.init import init_parameters
from lingua.parallel.launch import detect_launch, set_timeout
from lingua.parallel.mesh import dp_degree, dp_rank, received_signals
from lingua.parallel.parallelize import parallelize_model
from lingua.parallel.program import collect_garbage, collected_in_steps
from lingua.parallel.signals import Stopped, StopRequest
from lingua.run import start
from lingua.run.args import RunArgs
from lingua.run.describe import announce, finish
from lingua.run.program import main as main
from lingua.run.run import Run
from lingua.run.start import check, check_fields, check_losses  # noqa: F401 (stool calls check)

if TYPE_CHECKING:
    from lingua.run.loop import ObjectiveLike


def train(app: App, args: RunArgs) -> str | None:
    """Train until `steps`, `stop_at` or a signal, from the newest checkpoint if there is one.
    Returns the name of the signal that ended it, if one did: the lowest that a rank received."""
    with StopRequest("stopping before the next step") as stop:
        signals: list[str] = []  # names of those that ended it
        with ExitStack() as open_parts:  # closed at the end, also where a start fails
            try:
                started = start.start_run(app, args, stop, open_parts)
                if not start.is_finished(started, args):
                    run = build_run(app, args, started, stop, open_parts)
                    for _ in take_steps(run, stop):
                        pass
                    signals = run.signals
                    finish(run)
            except Stopped:  # by a signal that came before the first step
                signals = received_signals(stop.received)
        if signals and detect_launch().by == "slurm":
            from lingua.parallel.slurm import requeue

            requeue(signals)
        return signals[0] if signals else None


def build_run(
    app: App, args: RunArgs, started: start.Started, stop: StopRequest, open_parts: ExitStack
) -> Run:
    """Everything between the checks and the first step. Raises UserError, and Stopped where a
    signal came while text was prepared."""
    mesh, checked = started.mesh, started.checked
    tokenizer, built = checked.tokenizer, checked.built
    benchmarks = start.load_benchmarks(args)
    data, fingerprints, changes = start.open_data(args, checked, stop)

    # ---- model and optimizer, and the state that they continue from
    model = parallelize_model(built.module, mesh, built.plan, args.distributed, args.exact)
    init_parameters(model, args.seed, started.device)
    optimizer = start.make_optimizer(app, model, args, built.plan)
    progress = start.restore(checked, changes, args, model, optimizer, mesh)

    # ---- rows from there on, and a place to report to
    n_micro, rows = args.micro_steps(dp_degree(mesh))
    loader = Loader(
        stream=data.rows,
        global_batch_size=args.data.step_rows,
        dp_rank=dp_rank(mesh),
        dp_size=dp_degree(mesh),
        n_micro=n_micro,
        rows=rows,
        device=started.device,
        marks=document_marks(args.data, tokenizer),
        documents=data.documents,
        grains=args.exact,
    )
    if args.exact:
        start.add_in_order(model, args, mesh)
    steps = open_parts.enter_context(closing(loader.steps(progress.position, args.data.workers)))
    where = started.saver.is_alone, started.heart, started.saver.number
    report = Reporter(args, mesh, progress, built.flops_per_token, *where)
    open_parts.enter_context(report)
    run = Run(
        app, args, mesh, model, optimizer, tokenizer, data, fingerprints, progress, report,
        started.saver, steps, benchmarks, built.base,
    )  # fmt: skip
    open_parts.enter_context(start.surviving(run))
    announce(run, checked)
    run.objective = (app.objective or Objective)(run)
    run.recheck = start.make_recheck(run, loader)
    return run


def take_steps(run: Run, stop: StopRequest) -> Generator[int, None, None]:
    """The loop, until `steps`, `stop_at` or a signal. Yields each step once it is complete, and
    logged, measured and saved where that is due."""
    args, report, progress, objective = run.args, run.report, run.progress, run.objective
    guard = NonFiniteGuard(args.optim.on_nonfinite, run.device, progress.skipped_steps)
    if run.benchmarks is not None:
        run.benchmarks.evaluate_missed(run, stop)
    # What a model or an objective cannot do is known before the first step.
    if args.due_later(args.validation.every, progress.step) or args.checkpoint.keep_best:
        objective.try_measuring()
    if args.due_later(args.samples.every, progress.step):
        from lingua.run.samples import check_samples

        check_samples(run)
    stop.note = "saving after the next step"
    first = progress.step + 1
    ahead = run.read_ahead(objective.count, stop).wait()
    stopping = ahead.stopping
    if stopping and progress.step:
        run.save(None, final=True)  # a run that branches has no checkpoint of its own yet
    profiler = open_profiler(args.profiling, args.dump_dir, run.mesh)
    with collected_in_steps(), closing(profiler):
        while progress.step < args.end and not stopping:
            step = progress.step + 1
            run.check_targets(ahead, guard)
            # The ranks agree on the next step while they work on this one.
            agreed = run.read_ahead(objective.count, stop) if step < args.end else None
            with profiler.step(step):
                done = train_step(run, objective, guard, ahead.batch, ahead.counts)
            progress.step, progress.position = step, progress.position + args.data.step_rows
            run.batch, run.loss = ahead.batch, done.loss
            if agreed is not None:  # the device still works
                ahead = agreed.wait()
                stopping = ahead.stopping
            if step == first:  # blocks are compiled now
                set_timeout(run.mesh, args.distributed.step_timeout_s, report.heart)
            collect_garbage(step)

            # Benchmarks in a job need the checkpoint; those in this process take time.
            save_due = args.checkpoint.due(step) or step == args.end or args.evaluation_due(step)
            save_due |= ahead.save_overdue
            measuring = args.measurement_due(step) or (save_due and args.checkpoint.keep_best)
            pausing = measuring or args.samples_due(step)
            if report.due(step) or save_due or stopping or pausing:
                measured, counts = report.read(done, guard.counts)  # waits for the device
                run.settle(guard, counts)
                if report.due(step):
                    report.log(progress, measured, done.lr)
            held_out = None  # not measured
            if measuring:
                with run.pausing():
                    held_out = objective.measure()
            if save_due or stopping:
                run.save(held_out, final=stopping or step == args.end)
            if args.samples_due(step):
                from lingua.run.samples import write_samples

                with run.pausing():
                    write_samples(run)
            if run.benchmarks is not None and args.evaluation_due(step):
                asked = run.benchmarks.evaluate(run, stop)
                stopping |= step < args.end and asked
            yield step
    if stopping:
        run.saver.wait()  # raises the error that ends the run, if one does
        run.signals = received_signals(stop.received)


def train_step(
    run: Run,
    objective: "ObjectiveLike",
    guard: NonFiniteGuard,
    batch: list[MicroBatch],
    counts: Tensor,
) -> StepResult:
    """Gradients of this rank's micro-batches, clipping, the optimizer. `counts` is on the CPU, as
    in `Ahead`. `lingua plan` traces this function too."""
    args, step = run.args, run.progress.step + 1
    run.numbers = Means()
    counts = run.to_device(counts)
    # With `distributed.check_every` another rank's are computed too, and compared.
    loss, rows_hash = (run.recheck or objective).gradients(batch, counts)
    if run.app.probe is not None and args.probe_due(step):
        from lingua.parallel.probe import only_read

        run.batch = batch
        with only_read(run.model):
            run.app.probe(run)
    norm = grad_norm(list(run.model.parameters()), args.exact)
    lr = lr_at(run.progress.step, args.optim, args.steps)
    admitted, divisor = guard.admit(step, norm, counts), clip_divisor(norm, args.optim.clip)
    with run.updating(guard):
        update(run.optimizer, lr, admitted, divisor)  # one that is not finite changes nothing
    run.optimizer.zero_grad()
    return StepResult(loss, rows_hash, norm, lr, run.numbers)


class Objective:
    """The function that a run minimises: here the mean loss of the targets. A fork derives a class
    that gives another `loss`, and what it is divided by."""

    def __init__(self, run: Run) -> None:
        """Called by every rank once the run is restored, before its first step."""
        self.run = run
        self.marks = document_marks(run.args.data, run.tokenizer)

    def count(self, micro: MicroBatch) -> Tensor:
        """Returns what each of the sums of `loss` is divided by once it is added up over the global
        batch: [K] on the CPU, int64, or float64 to the nearest 2^-30. Called when the rows are
        read, in the step before theirs, which is `micro.step`."""
        return (micro.targets != IGNORE).sum((1, 2))

    def fields(self, micro: MicroBatch) -> dict[str, Tensor]:
        """Returns further tensors of the rows, on the CPU, which `loss` has in `micro.fields`."""
        return {}

    def prepared(self, read: MicroBatch) -> MicroBatch:
        """A micro-batch as `loss` has it: on the device, with its noise and its fields."""
        micro, fields = self.run.on_device(read), self.fields(read)
        if not self.run.checked:
            check_fields(f"{type(self).__name__}.fields", fields, len(read.row_ids))
        micro.fields = {key: self.run.to_device(t) for key, t in fields.items()}
        return micro

    def loss(self, micro: MicroBatch) -> Losses:
        """Returns the losses of a micro-batch: `sums` are float32 [K], `counts` are not read. All
        tensors are on the device. One that is `held_out` is measured; nothing is random in it."""
        returned = self.run.model(*micro.inputs(), **micro.random())
        return as_losses(returned, len(micro.targets))

    def gradients(self, batch: list[MicroBatch], counts: Tensor) -> tuple[Tensor, Tensor]:
        """Fill `.grad` with the gradient of the sum of (`loss` / `count`) over the global batch,
        plus the mean over its rows of each term that the model has per row.

        Args:
            batch: this data-parallel rank's micro-batches, the same number on every rank.
            counts: [K] on the device, `count` of the whole global batch: int64 or float32.

        Returns:
            The loss of each micro-batch as a share of that loss, float32 [n], or this rank's
            share, and the hash of the rows that it used, int64; both are summed over data-parallel
            ranks where they are logged.
        """
        run, args = self.run, self.run.args
        parts: list[Tensor] = []
        rows_hash = torch.zeros((), dtype=torch.int64, device=run.device)
        for i, read in enumerate(batch):
            micro = self.prepared(read)
            last = i == len(batch) - 1
            set_gradient_sync(run.model, args.distributed.grad_sync, last)  # reduced on the last
            losses = self.loss(micro)
            if not run.checked:  # once: shapes do not change
                check_losses(f"{type(self).__name__}.loss", losses, len(counts), len(read.row_ids))
                run.checked = True
            part = (losses.sums / counts).sum()
            is_row = micro.row_ids >= 0  # and not padding
            terms = [torch.where(is_row, t, 0).sum() for t in losses.per_row.values()]
            sum((term / args.data.step_rows for term in terms), part).backward()
            parts.append(part.detach())
            run.numbers.add({**losses.per_row, **losses.metrics}, micro)
            rows_hash += batch_hash(micro.row_ids, micro.tokens, micro.targets)
        return torch.stack(parts), rows_hash

    def measure(self) -> float | None:
        """Measure and report held-out loss and metrics of every source. Returns the loss in nats
        per byte of all of them, None where nothing is held out. The lowest is the best checkpoint.
        """
        return self._measure(self.run.report)

    def try_measuring(self) -> None:
        """Measure the first windows alone, so that a loss which fails there is known before the
        first step. Called by every rank."""
        if type(self).measure is Objective.measure:
            from lingua.model.generate import evaluating

            # Not compiled: the shapes that are compiled first are those of training.
            with self.run.report.paused(), evaluating(self.run.model):
                self._measure(None)

    def _measure(self, report: Reporter | None) -> float | None:  # measured
        run, data, step = self.run, self.run.args.data, self.run.progress.step
        how = data.batch_size, data.n_views - 1, run.mesh, self.marks, step, self.prepared

        def measure(windows: HeldOut) -> dict[str, float]:
            return validate(run.model, self.loss, windows, *how, first=report is None)

        return measure_sources(measure, run.data.held_out, report, step)  # end of measured
