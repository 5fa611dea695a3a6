"""What a run consists of once it has started."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lingua.app import App
from lingua.base.errors import UserError, check_array
from lingua.base.hashing import hash_bits, key_of
from lingua.checkpoint.saver import Saver
from lingua.checkpoint.state import Progress, TrainState
from lingua.checkpoint.tensors import settings_of, tensors_of
from lingua.config.load import to_yaml
from lingua.data.loader import Agreement, Ahead, MicroBatch, agree
from lingua.data.rows import OpenData
from lingua.data.stream import RowStream
from lingua.monitor.means import Means
from lingua.monitor.reporter import Reporter
from lingua.optim.optimizer import LoopOptimizer, NonFiniteGuard
from lingua.optim.schedule import lr_at
from lingua.parallel.gradients import grad_norms
from lingua.parallel.mesh import all_call, sizes_of
from lingua.parallel.parallelize import reshard
from lingua.parallel.plan import find_modules
from lingua.parallel.signals import StopRequest
from lingua.parallel.tensors import to_device
from lingua.tokenizer.interface import Tokenizer

if TYPE_CHECKING:
    from lingua.run.loop import ObjectiveLike
    from lingua.tools.elastic.recheck import Recheck
    from lingua.tools.inference.benchmarks import Benchmarks

ALL_FAIL_S = 10.0  # seconds between the ranks in which an error that all have is raised


@dataclass
class Run:
    """A started run, as the loop, an app's objective and its probe see it."""

    app: App
    args: Any  # an instance of the app's configuration class, every value resolved
    mesh: DeviceMesh
    model: nn.Module  # sharded; parameters may be DTensors
    optimizer: LoopOptimizer
    tokenizer: Tokenizer
    data: OpenData  # None under lingua plan
    fingerprints: dict[str, str]  # hashes of data and tokenizer, saved with each checkpoint
    progress: Progress  # completed steps and rows consumed
    report: Reporter
    saver: Saver
    steps: Iterator[list[MicroBatch]]  # micro-batches of this data-parallel rank, step by step
    benchmarks: "Benchmarks | None" = None  # with eval.tasks
    base: frozenset[str] = frozenset()  # tensors of the model that are not saved (lingua.app.Built)
    recheck: "Recheck | None" = None  # with distributed.check_every and several ranks
    objective: "ObjectiveLike" = field(init=False)
    read_step: int = 0  # the step whose rows were read last
    batch: list[MicroBatch] = field(default_factory=list)  # this rank's rows of the newest step
    numbers: Means = field(default_factory=Means)  # of the newest step: what its objective measures
    loss: Tensor = field(init=False)  # of the newest step: parts of this data-parallel rank's share
    signals: list[str] = field(default_factory=list)  # stop signals that ended it, by name
    checked: bool = False  # whether an app's functions were seen to return what they must
    saved_at: float = field(default_factory=time.monotonic)  # end of the last save, or of the start
    # around the update of a step; with replicas that of lingua.tools.elastic.survivors
    updating: Callable[[NonFiniteGuard], AbstractContextManager[object]] = nullcontext

    @property
    def device(self) -> torch.device:
        return torch.device(self.mesh.device_type)

    def to_device(self, t: Tensor) -> Tensor:
        """A copy of a tensor of the host, for which the host does not wait."""
        return to_device(t, self.device)

    def on_device(self, read: MicroBatch) -> MicroBatch:
        """A micro-batch of the current step, or of held-out text, on the device; of a step with the
        keys of its noise, if any."""
        micro = read.to(self.device)
        if self.args.noisy and not read.held_out:
            noise = key_of(self.args.seed, "noise", self.progress.step + 1)
            micro.noise = hash_bits(noise, micro.row_ids)
        return micro

    def hidden(self, *patterns: str) -> Iterator[tuple[MicroBatch, dict[str, Tensor]]]:
        """For a probe: run the model on each micro-batch of the step, with the noise of the step,
        and give what its modules of these patterns return (`lingua.run.hidden`). Iterated
        to the end by every rank. Raises UserError where a pattern matches nothing."""
        from lingua.run.hidden import recorded  # imported where a probe asks for it

        for read in self.batch:
            micro = self.on_device(read)
            with recorded(self.model, patterns, self.args, self.mesh) as states:
                self.model(*micro.inputs(), **micro.random())
            yield micro, states

    def grad_norms(self, *patterns: str) -> dict[str, float]:
        """For a probe: the norm of the gradients of each module of these patterns. Called by every
        rank; the host waits. Raises UserError where a pattern matches nothing."""
        modules = find_modules(self.model, patterns)
        groups = [list(module.parameters()) for module in modules.values()]
        norms = grad_norms(groups, self.args.exact)
        return dict(zip(modules, norms.tolist(), strict=True))

    def read_ahead(self, count: Callable[[MicroBatch], Tensor], stop: StopRequest) -> Agreement:
        """Read the rows of the next step, and begin to agree on what its loss is divided by and on
        whether ranks stop or save before it. `count` is that of the objective."""
        with self.report.waiting_for_data():
            batch = next(self.steps)
        self.read_step = max(self.read_step, self.progress.step) + 1
        for micro in batch:
            micro.step = self.read_step
        if not self.checked:
            kinds, counts = "int64 or float64", count(batch[0])
            check_array(count.__qualname__, counts, kinds, (None,), on_host=True)
        stopping = stop.signal is not None or self.saver.must_stop
        since_save_s = time.monotonic() - self.saved_at
        overdue = dist.get_rank() == 0 and self.args.checkpoint.overdue(since_save_s)
        return agree(batch, count, self.mesh, stopping, overdue)

    def settle(self, guard: NonFiniteGuard, counts: list[int]) -> None:
        """Take over the updates that were suppressed, by the values of `guard.counts`. Where one is
        to stop the run, no later one was made: the state before it is saved, and UserError raised.
        """
        try:
            guard.settle(counts, self.progress, self.args.data.step_rows)
        except UserError:
            if self.progress.step:
                self.save(None, final=True)
            raise

    def check_targets(self, ahead: Ahead, guard: NonFiniteGuard) -> None:
        """Raise UserError where the next step has nothing to divide its loss by and is not to be
        skipped. What is complete is saved before. Called by every rank."""
        if ahead.counts.all() or self.args.data.on_no_targets == "skip":
            return
        self.settle(guard, guard.counts.tolist())
        if self.progress.step:
            self.save(None, final=True)
        begin, rows, sources = self.progress.position, self.data.rows, ""
        end = begin + self.args.data.step_rows
        if isinstance(rows, RowStream):
            before, after = rows.counts(begin), rows.counts(end)
            sources = " of " + ", ".join(name for name, n in after.items() if n > before[name])
        raise UserError(
            f"step {self.progress.step + 1}: all targets are ignored in its global batch (rows "
            f"{begin} to {end - 1}{sources}). The run stops before it; data.on_no_targets = skip "
            "counts such steps and goes on"
        )

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Around what is not training: its time does not count. Where it raises an error on every
        rank, the completed step is saved before the error ends the run."""
        try:
            with self.report.paused():
                yield
        except Exception as error:
            try:
                if all_call("lingua/failed", ALL_FAIL_S):
                    reshard(self.model, interrupted=True)
                    self.save(None, final=True)
            finally:
                raise error

    def save(self, held_out: float | None, final: bool) -> None:
        """Save the completed step, and its held-out loss in nats per byte where it was measured. A
        `final` save is finished when this returns. Called by every rank."""
        progress = self.progress
        with self.report.paused("save"):
            progress.trained_s = self.report.trained_s
            tensors = tensors_of(self.model, self.optimizer, without=self.base)
            state = self.state(progress, held_out)
            self.saver.save(progress.step, tensors, state, to_yaml(self.args), final)
        self.saved_at = time.monotonic()

    def state(self, progress: Progress, held_out: float | None = None) -> dict[str, Any]:
        """What is saved of a completed step besides tensors, as values of JSON."""
        args = self.args
        state = TrainState(
            progress,
            tokens=progress.position * args.data.seq_len,
            schedule={"step": progress.step, "lr": lr_at(progress.step, args.optim, args.steps)},
            param_groups=settings_of(self.optimizer),
            topology=list(sizes_of(self.mesh)),
            data=self.fingerprints,
            held_out=held_out,
        )
        return asdict(state)
