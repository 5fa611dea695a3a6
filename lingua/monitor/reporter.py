"""What a run says while it trains: metrics.jsonl, wandb, the console, and what time went into what.

Only rank 0 writes; `log` is called by every rank, since its numbers are sums over ranks.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lingua.checkpoint.resume import Progress
from lingua.monitor.logger import progress_line
from lingua.monitor.metrics import (
    LoggingArgs,
    MetricsFile,
    cut_back,
    mfu,
    peak_flops,
    peak_mem_gib,
    start_wandb,
    wandb_values,
)
from lingua.parallel.mesh import dp_sum_

logger = logging.getLogger(__name__)


class Reporter:
    """Keeps the clock of a run and writes its lines.

    Args:
        step: completed steps; lines of later ones, of a run that went on before it was killed, are
            cut away.
        steps: the step the run ends at, for the time left.
        config: flat; what wandb shows as the run's configuration.
        trained_s: seconds trained before this start.
        evaluates: whether there will be benchmarks.
    """

    def __init__(
        self,
        args: LoggingArgs,
        dump_dir: Path,
        mesh: DeviceMesh,
        *,
        name: str,
        config: dict[str, Any],
        step: int,
        steps: int,
        global_batch_size: int,
        seq_len: int,
        flops_per_token: float,
        dtype: torch.dtype,
        trained_s: float,
        evaluates: bool = False,
    ) -> None:
        self.freq, self.mesh, self.steps = args.freq, mesh, steps
        self.global_batch_size, self.seq_len = global_batch_size, seq_len
        self.flops_per_token = flops_per_token
        self.device = torch.device(mesh.device_type)
        device_name = torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"
        self.peak = peak_flops(device_name, dtype)
        self.trained_s = trained_s
        self.files: dict[str, MetricsFile] = {}
        self.wandb = None
        if dist.get_rank() == 0:
            for kind in ("metrics", "metrics.validation", "metrics.eval"):
                path = dump_dir / f"{kind}.jsonl"
                cut_back(path, step)
                if kind != "metrics.eval" or evaluates:
                    self.files[kind] = MetricsFile(path)
            if args.wandb is not None:
                self.wandb = start_wandb(args.wandb, name, config, dump_dir)
        self.numbers: dict[str, Tensor] = {}  # of the step under way
        self._logged_step = step
        self._window_s = self._data_s = 0.0  # of the steps since the last line
        self._since = time.perf_counter()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Around the wait for the rows of the next step: counted as training time, and shown on its
        own."""
        self.numbers.clear()
        start = time.perf_counter()
        yield
        self._data_s += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is not training: throughput and step time leave it out."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # what was queued before is training
        self._take_time()
        yield
        self._since = time.perf_counter()

    def _take_time(self) -> None:
        now = time.perf_counter()
        self._window_s += now - self._since
        self.trained_s += now - self._since
        self._since = now

    def due(self, step: int) -> bool:
        return step % self.freq == 0 or step == self.steps

    def add(self, name: str, value: Tensor) -> None:
        """Add to a number of the step under way, a float scalar on the device. The step's metrics
        line, if it gets one, has under this name the sum over micro-steps and data-parallel ranks.
        Called alike by every rank; the host does not wait for the device."""
        value = value.detach().float()
        self.numbers[name] = self.numbers[name] + value if name in self.numbers else value

    def log(
        self, progress: Progress, loss: Tensor, grad_norm: Tensor, lr: float, hashed: Tensor
    ) -> None:
        """Write the line of the last step. Called by every rank, with its own part of both sums.

        Args:
            loss: float32 scalar, this data-parallel rank's share of the global batch's loss.
            hashed: int64 scalar, the sum of the hashes of the rows this rank put through forward.
        """
        loss, hashed = dp_sum_(loss.clone(), self.mesh), dp_sum_(hashed.clone(), self.mesh)
        hashed = _agreed(hashed, self.mesh)
        loss_nats, norm, bits = loss.item(), grad_norm.item(), hashed.item() % 2**64
        numbers = self._summed_numbers()
        self._take_time()  # after the numbers above have waited for the device
        step, n = progress.step, progress.step - self._logged_step
        rate = n * self.global_batch_size * self.seq_len / self._window_s
        rate_per_device = rate / dist.get_world_size()
        line = {
            "step": step,
            "tokens": progress.position * self.seq_len,
            "loss": loss_nats,
            "grad_norm": norm,
            "lr": lr,
            "tokens_per_s": rate,
            "tokens_per_s_per_device": rate_per_device,
            "mfu": mfu(self.flops_per_token, rate_per_device, self.peak),
            "step_time_s": self._window_s / n,
            "data_time_s": self._data_s / n,
            "peak_mem_gib": peak_mem_gib(self.device),
            "batch_hash": f"{bits:016x}",
            "skipped_steps": progress.skipped_steps,
        } | numbers
        if dist.get_rank() == 0:
            self._write("metrics", line)
            eta_s = (self.steps - step) * line["step_time_s"]
            logger.info(progress_line(step, self.steps, line, eta_s))
        self._logged_step, self._window_s, self._data_s = step, 0.0, 0.0

    def _summed_numbers(self) -> dict[str, float]:
        if not self.numbers:
            return {}
        values = dp_sum_(torch.stack(list(self.numbers.values())), self.mesh)
        return dict(zip(self.numbers, values.tolist(), strict=True))

    def validation(self, step: int, source: str, result: dict[str, float]) -> None:
        """Write what was measured on the held-out part of one source: numbers by name."""
        if dist.get_rank() != 0:
            return
        self._write("metrics.validation", {"step": step, "source": source, **result})
        shown = ", ".join(f"{name} {value:.4f}" for name, value in result.items())
        if "nats_per_byte" in result:
            shown = (
                f"{result['nats_per_byte']:.4f} nats per byte "
                f"({result['nats_per_token']:.4f} per token, {result['tokens']:,} tokens)"
            )
        logger.info(f"step {step}  held-out {source}: {shown}")

    def evaluation(self, lines: Iterable[dict[str, Any]]) -> None:
        """Write what benchmarks found, a line for each task; on rank 0."""
        for line in lines:
            self._write("metrics.eval", line)

    def event(self, event: str, step: int, **values: Any) -> None:
        """Write a line about something that happened, without a loss."""
        if dist.get_rank() == 0:
            self.files["metrics"].event(event, step, **values)

    def _write(self, kind: str, line: dict[str, Any]) -> None:
        try:
            written = self.files[kind].write(line)
        except OSError as error:  # a full disk: what it costs is a line, not the run
            logger.error(f"the line of step {line['step']} is lost: {error}")
            written = line
        if self.wandb is not None:
            self.wandb.log(wandb_values(kind, written))

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        if self.wandb is not None:
            self.wandb.finish()


def _agreed(hashed: Tensor, mesh: DeviceMesh) -> Tensor:
    """The hash as it is where all tp ranks of a group have the same; another where one differs."""
    size = mesh["tp"].size()
    if size == 1:
        return hashed
    total = hashed.clone()
    dist.all_reduce(total, group=mesh.get_group("tp"))
    # Of one that is off by d, 2d stays; of this rank's own, an odd multiple of d.
    return hashed + 2 * (total - size * hashed)
