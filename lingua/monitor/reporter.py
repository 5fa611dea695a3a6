"""What a run logs while it trains: metrics.jsonl, trackers and the console; and the clock.

Only rank 0 writes. `log` is called by every rank, since it sums over ranks.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lingua.base.dump_dir import EVALUATION, LINES, METRICS, SAMPLES, VALIDATION
from lingua.base.errors import tool_needed_by
from lingua.checkpoint.starts import NUMBER
from lingua.checkpoint.state import Progress
from lingua.config.load import flatten
from lingua.config.values import shorten
from lingua.monitor.logger import progress_line
from lingua.monitor.means import Means, exact_sum, means
from lingua.monitor.metrics import Chain, Earlier, append_line, cut_back, mfu, peak_mem_gib
from lingua.parallel.heartbeat import Heartbeat
from lingua.parallel.mesh import cp_group, dp_gather, dp_sum_, gather, on_rank_0
from lingua.parallel.tensors import to_device, to_host

if TYPE_CHECKING:
    from lingua.tools.trackers import Trackers

logger = logging.getLogger(__name__)


class StepResult(NamedTuple):
    """One update, on the device but for the learning rate."""

    loss: Tensor  # float32 scalar or [n], summed the share of this data-parallel rank in the loss
    rows_hash: Tensor  # int64 scalar, sum of the hashes of the rows of this rank
    grad_norm: Tensor  # float32 scalar, of the global batch
    lr: float
    numbers: Means  # of the step; a metrics line has their means


class Measured(NamedTuple):
    """The measurements of a step over the global batch."""

    loss: float
    grad_norm: float
    batch_hash: str
    numbers: dict[str, float]  # means of `StepResult.numbers`, by name
    # by rank, since the last line: seconds of wait for data, and of CPU time where measured
    rank_s: list[float]


class Reporter:
    """Measures the time of a run and writes its lines; a context, whose end finishes trackers."""

    def __init__(
        self,
        args: Any,
        mesh: DeviceMesh,
        progress: Progress,
        flops_per_token: float,
        may_write: Callable[[], bool] = lambda: True,
        heart: Heartbeat | None = None,
        start: int = 0,
    ) -> None:
        """Open the files; lines of later steps than `progress`, which a killed process left, are
        removed.

        Args:
            args: the run's configuration.
            flops_per_token: of forward and backward, for the MFU.
            may_write: False once another run has the dump dir; asked on rank 0 for each line.
            heart: is given where this rank is.
            start: number of this start of the run.
        """
        self.args, self.mesh, self.flops_per_token = args, mesh, flops_per_token
        self.progress = progress
        self.may_write, self.heart, self.start = may_write, heart or Heartbeat(), start
        self.folder = Path(args.dump_dir)
        self.device = torch.device(mesh.device_type)
        self.device_name, self.peak = self.device.type, None
        if self.device.type == "cuda":
            from lingua.monitor.peaks import peak_flops

            self.device_name = torch.cuda.get_device_name()
            self.peak = peak_flops(self.device_name, args.distributed.dtype)
        self.trackers: Trackers | None = None
        self.chains: dict[str, Chain] = {}  # of each file, on rank 0
        self.earlier = Earlier()  # what earlier starts have left in metrics.jsonl, on rank 0
        on_rank_0(partial(self._open, progress.step))
        # training time of the whole run, earlier processes included
        self.trained_s = progress.trained_s
        self._logged_step = progress.step
        # since the last line: training, waiting for data, other CPU time of this thread
        self._window_s = self._data_s = self._cpu_s = 0.0
        self._since, self._cpu_since = time.perf_counter(), time.thread_time()
        self._slow = None
        if dist.get_world_size() > 1:
            from lingua.monitor.slow import SlowRank

            self._slow = SlowRank(self.heart)

    def _open(self, step: int) -> None:
        left = {file: cut_back(self.folder / file, step, self.may_write) for file in LINES}
        self.earlier = left[METRICS]
        self.chains = {file: earlier.chain for file, earlier in left.items()}
        args = self.args
        if args.logging.trackers:
            with tool_needed_by("logging.to"):
                from lingua.tools.trackers import Trackers
            self.trackers = Trackers(args.logging, args.name, flatten(args), self.folder, step)

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Around the wait for the rows of the next step: training time, also logged separately."""
        start, cpu = time.perf_counter(), time.thread_time()
        self.heart.at(self.progress.step + 1, "data")
        yield
        self.heart.at(self.progress.step + 1, "step")
        self._data_s += time.perf_counter() - start
        self._cpu_since += time.thread_time() - cpu

    @contextmanager
    def paused(self, phase: str = "evaluation") -> Iterator[None]:
        """Around what is not training: its time does not count. Called by every rank."""
        torch.get_device_module(self.device).synchronize()  # queued kernels are training
        self._take_time()
        self.heart.at(self.progress.step, phase)
        try:
            yield
        finally:
            self.heart.at(self.progress.step + 1, "step")
            self._since, self._cpu_since = time.perf_counter(), time.thread_time()

    def _take_time(self) -> None:
        now, cpu = time.perf_counter(), time.thread_time()
        self._window_s += now - self._since
        self.trained_s += now - self._since
        self._cpu_s += cpu - self._cpu_since
        self._since, self._cpu_since = now, cpu

    def due(self, step: int) -> bool:
        return step % self.args.logging.freq == 0 or step == self.args.end

    def read(self, step: StepResult, guard: Tensor) -> tuple[Measured, list[int]]:
        """Returns the measurements of the last step, and the values of `guard`, the counts of a
        NonFiniteGuard, int64 [2]. Called by every rank. This is where the host waits for the
        device, once."""
        self._take_time()
        # On CUDA the CPU time of a host that waits for its device cannot be told apart.
        host_s = self._data_s + (self._cpu_s if self.device.type == "cpu" else 0)
        groups = self.mesh.get_group("tp"), cp_group(self.mesh)  # ranks with the same rows
        host = gather(to_device(torch.tensor([host_s]), self.device), *groups).flatten()
        pairs = [torch.stack(parts) for parts in step.numbers.parts.values()]  # [n, 2] each
        sizes = [step.loss.numel(), *(pair.numel() for pair in pairs), len(host)]
        flat = torch.cat([step.loss.flatten(), *(pair.flatten() for pair in pairs), host])
        parts = dp_gather(flat, self.mesh).split(sizes, dim=1)
        rows_hash = dp_sum_(_agreed(step.rows_hash.clone(), groups[1]), self.mesh)
        rows_hash = _agreed(rows_hash, groups[0])
        norm, bits, counts, losses, *rest, hosts = to_host(step.grad_norm, rows_hash, guard, *parts)
        nats = exact_sum(chain(*losses))
        sums = [[exact_sum(chain(*(row[i::2] for row in rows))) for i in (0, 1)] for rows in rest]
        numbers = means(step.numbers.parts, sums)
        rank_s = list(chain(*hosts))
        return Measured(nats, norm, f"{bits % 2**64:016x}", numbers, rank_s), counts

    def log(self, progress: Progress, measured: Measured, lr: float) -> None:
        """Write the line of the last step, right after `read`. Called by every rank."""
        self._take_time()
        step, n, data = progress.step, progress.step - self._logged_step, self.args.data
        rate = n * data.global_batch_size * data.seq_len / self._window_s
        rate_per_device = rate / dist.get_world_size()
        rank_s, on_cpu = measured.rank_s, self.device.type == "cpu"
        if not on_cpu:  # what remains of the time counts alike for all ranks
            rank_s = [self._window_s - max(rank_s) + waited_s for waited_s in rank_s]
        slowest = max(range(len(rank_s)), key=rank_s.__getitem__)
        ratio = rank_s[slowest] / median(rank_s)
        line = {
            "step": step,
            "tokens": progress.position * data.seq_len,
            "loss": measured.loss,
            "grad_norm": measured.grad_norm,
            "lr": lr,
            "tokens_per_s": rate,
            "tokens_per_s_per_device": rate_per_device,
            "mfu": mfu(self.flops_per_token, rate_per_device, self.peak),
            "step_time_s": self._window_s / n,
            "data_time_s": self._data_s / n,
            "host_time_s": median(rank_s) / n if on_cpu else None,
            "slowest_rank": slowest,
            "slowest_ratio": ratio,
            "peak_mem_gib": peak_mem_gib(self.device),
            "batch_hash": measured.batch_hash,
            "skipped_steps": progress.skipped_steps,
        }
        self._write(METRICS, line | measured.numbers)
        eta_s = (self.args.end - step) * line["step_time_s"]
        logger.info(progress_line(step, self.args.end, line, eta_s, measured.numbers))
        if self._slow is not None:
            self._slow.note(slowest, ratio, n)
        self._logged_step, self._window_s, self._data_s, self._cpu_s = step, 0.0, 0.0, 0.0

    def validation(self, step: int, source: str, result: dict[str, Any]) -> None:
        """Write the results of the held-out part of one source: numbers by name, and `text`, the
        hash of what was measured."""
        self._write(VALIDATION, {"step": step, "source": source, **result})
        if "nats_per_token" in result:
            units = ("nats/byte", "nats/token")
            values = {unit: result.get(f"nats_per_{unit[5:]}") for unit in units}
            shown = ", ".join(f"{v:.4f} {unit}" for unit, v in values.items() if v is not None)
        else:
            shown = ", ".join(f"{name} {value:.4f}" for name, value in result.items())
        logger.info(f"step {step} held-out {source}: {shown}")

    def evaluation(self, lines: Iterable[dict[str, Any]]) -> None:
        """Write the results of benchmarks, a line for each task; on rank 0."""
        for line in lines:
            self._write(EVALUATION, line)

    def samples(self, step: int, source: str, pairs: list[tuple[str, str]]) -> None:
        """Write text that the model generated: (prompt, text), with prompts of one source."""
        for prompt, text in pairs:
            self._write(SAMPLES, {"step": step, "source": source, "prompt": prompt, "text": text})
        if self.trackers is not None:
            self.trackers.samples(step, source, pairs)

    def event(self, event: str, step: int, **values: Any) -> None:
        """Write a line about something that happened after `step`, or that a probe has measured; it
        has no loss. Trackers get its numbers."""
        self._write(METRICS, {"event": event, "step": step, **values})

    def _write(self, file: str, line: dict[str, Any]) -> None:
        if dist.get_rank() != 0 or not self.may_write():
            return
        line = {**line, NUMBER: self.start} if self.start else line
        link = self.chains[file].link(line) if file in (METRICS, VALIDATION) else None
        linked = line if link is None else {**line, "chain": link}
        try:
            append_line(self.folder / file, linked)
            self.chains[file] = self.chains[file].after(linked)
        except OSError as error:  # a full disk must not end the run
            logger.error(f"{file}: the line of step {line['step']} was not written: {error}")
        if self.trackers is not None:
            self.trackers.log(file, line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            first_line = shorten("".join(str(error).splitlines()[:1]))
            text = f"{type(error).__name__}: {first_line}"
            self.event("stop", self.progress.step, reason="error", error=text)
        if self.trackers is not None:
            self.trackers.finish()


def _agreed(hashed: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The hash where all ranks of a group have the same, another number where one differs."""
    if group is None or (size := group.size()) == 1:
        return hashed
    total = hashed.clone()
    dist.all_reduce(total, group=group)
    # Where one rank differs by d: 2d is added to the hash of the others, an odd multiple of d to
    # its own, so that neither is what it was.
    return hashed + 2 * (total - size * hashed)
