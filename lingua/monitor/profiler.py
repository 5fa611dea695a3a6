"""Profiles a few steps of a run: a trace per rank, CUDA memory, and the collectives of one step.

Everything is written to `<dump_dir>/profiling/`; steps are numbered as in metrics.jsonl.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerAction

from lingua.base.dump_dir import COLLECTIVES, PROFILING
from lingua.monitor.args import ProfilingArgs
from lingua.monitor.collectives import CollectiveCounter, collectives_table
from lingua.parallel.mesh import WORDS, sizes_of
from lingua.parallel.torch_private import dump_memory_snapshot, record_memory_history

logger = logging.getLogger(__name__)

MEMORY_EVENTS = 100_000  # allocations and frees in a snapshot; each takes some KB of host memory


class Profiler:
    """Profiles the first steps of a process; called by every rank.

        profiler = Profiler(args.profiling, dump_dir, mesh)
        for ...:
            with profiler.step(step + 1):  # the step's number in metrics.jsonl
                ...
        profiler.close()

    Of the steps of this process, number `profile_warmup` counts the collectives of global rank 0
    (`collectives_step{n}.json`, and a table in the log), the next `profile_steps` are traced by
    every rank (`rank{r}.{time}.pt.trace.json.gz`, for Perfetto and TensorBoard), and on CUDA the
    `mem_steps` after `mem_warmup` are written to `memory_step{last}_rank{r}.pickle`.
    """

    def __init__(self, args: ProfilingArgs, dump_dir: str | Path, mesh: DeviceMesh) -> None:
        self._folder, self._mesh, self._rank = Path(dump_dir) / PROFILING, mesh, dist.get_rank()
        self._trace: torch.profiler.profile | None = None  # until it is written
        self._memory = range(0)  # the steps of this process whose memory is to be recorded
        self._n_steps = 0  # steps that this process has made
        self._folder.mkdir(parents=True, exist_ok=True)
        if mesh.device_type == "cuda":
            self._memory = range(args.mem_warmup, args.mem_warmup + args.mem_steps)
        if args.profile_steps:
            waits = max(args.profile_warmup, 1) - 1
            self._trace = torch.profiler.profile(
                schedule=torch.profiler.schedule(
                    wait=waits, warmup=1, active=args.profile_steps, repeat=1
                ),
                on_trace_ready=torch.profiler.tensorboard_trace_handler(
                    str(self._folder), f"rank{self._rank}", use_gzip=True
                ),
                record_shapes=True,
            )
            self._trace.start()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around the work of `step`, the number of updates completed when it is done."""
        if self._memory and self._n_steps == self._memory.start:
            record_memory_history(max_entries=MEMORY_EVENTS)
        action = ProfilerAction.NONE if self._trace is None else self._trace.current_action
        counted = action is ProfilerAction.WARMUP and self._rank == 0
        counter = CollectiveCounter(self._mesh) if counted else None
        with torch.profiler.record_function(f"step {step}"), counter or nullcontext():
            yield
        self._n_steps += 1
        if counter is not None:
            self._write_collectives(step, counter)
        if self._trace is not None:
            self._trace.step()
            if action is ProfilerAction.RECORD_AND_SAVE:
                self._trace.stop()
                self._trace = None  # frees its events
                logger.info(f"profiling: traces are in {self._folder}")
        if self._memory and self._n_steps == self._memory.stop:
            path = self._folder / f"memory_step{step}_rank{self._rank}.pickle"
            dump_memory_snapshot(str(path))
            record_memory_history(enabled=None)
            self._memory = range(0)

    def close(self) -> None:
        """Write what was traced, and warn if the run ended before all was."""
        if self._trace is not None:
            self._trace.stop()
        if self._trace is not None or self._memory:
            logger.warning(f"profiling incomplete: {self._n_steps} steps ran; lower its warmup")

    def _write_collectives(self, step: int, counter: CollectiveCounter) -> None:
        mesh = dict(zip(WORDS, sizes_of(self._mesh), strict=False))
        sizes = ", ".join(f"{name} {size}" for name, size in mesh.items())
        logger.info(
            f"collectives of step {step} on rank 0 ({sizes}):\n{collectives_table(counter.totals)}"
        )
        content = {"step": step, "rank": 0, "mesh": mesh, "collectives": counter.totals}
        path = self._folder / COLLECTIVES.replace("*", str(step))
        try:
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:  # a full disk must not end the run
            logger.error(f"profiling: {path} was not written: {error}")
