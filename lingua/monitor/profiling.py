"""Profiles a few steps of a run: a trace per rank, CUDA memory, and the collectives of one step.

Everything is written to `<dump_dir>/profiling/`; steps are numbered as in metrics.jsonl.
"""

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity

from lingua.config.schema import Free
from lingua.monitor.collectives import Collective, CollectiveCounter, table

logger = logging.getLogger(__name__)

MEMORY_EVENTS = 100_000  # allocations and frees in a snapshot; each takes some KB of host memory


@dataclass
class ProfilingArgs:
    run: Free[bool] = False  # write the traces, snapshots and counts described below
    mem_warmup: Free[int] = 0  # steps after the start before CUDA memory is recorded
    mem_steps: Free[int] = 2  # steps whose CUDA allocations are recorded; 0 for none
    # Steps after the start before the trace. In the last of them, which that slows down,
    # collectives are counted and the profiler warms up; 0 is therefore taken as 1.
    profile_warmup: Free[int] = 10
    profile_steps: Free[int] = 2  # steps that are traced; 0 for neither a trace nor a count

    def validate(self) -> Iterator[tuple[str, str]]:
        for name in ("mem_warmup", "mem_steps", "profile_warmup", "profile_steps"):
            if getattr(self, name) < 0:
                yield name, "must be at least 0"


class Profiler:
    """Profiles the first steps of a process; called by every rank.

        profiler = Profiler(args.profiling, dump_dir, mesh)
        for ...:
            with profiler.step(step + 1):  # the step's number in metrics.jsonl
                ...
        profiler.close()

    Of the steps of this process, number `profile_warmup` counts the collectives of global rank 0
    (`collectives_step{n}.txt` and `.json`, and a table in the log), the next `profile_steps` are
    traced (`trace_step{first}_{last}_rank{r}.json.gz`, Chrome's trace format), and on CUDA the
    `mem_steps` after `mem_warmup` are written to `memory_step{first}_{last}_rank{r}.pickle`.
    """

    def __init__(self, args: ProfilingArgs, dump_dir: str | Path, mesh: DeviceMesh) -> None:
        self._folder, self._mesh, self._rank = Path(dump_dir) / "profiling", mesh, dist.get_rank()
        self._steps: list[int] = []  # that this process ran
        self._trace: torch.profiler.profile | None = None
        # Indices of the steps that are traced, of those whose memory is recorded, the end of both.
        self._traced, self._recorded, self._end = range(0), range(0), 0
        if not args.run:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU]
        if mesh.device_type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            if args.mem_steps:
                self._recorded = range(args.mem_warmup, args.mem_warmup + args.mem_steps)
        if args.profile_steps:
            counted = max(args.profile_warmup, 1)
            self._traced = range(counted, counted + args.profile_steps)
            self._trace = torch.profiler.profile(
                activities=activities,
                schedule=torch.profiler.schedule(
                    wait=counted - 1, warmup=1, active=args.profile_steps, repeat=1
                ),
                on_trace_ready=self._write_trace,
                record_shapes=True,
            )
            self._trace.start()
        self._end = max(self._traced.stop, self._recorded.stop)

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around the work of `step`, the number of updates completed when it is done."""
        index = len(self._steps)
        if index >= self._end:
            yield
            return
        if self._recorded and index == self._recorded.start:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        counter = None
        if self._traced and index == self._traced.start - 1 and self._rank == 0:
            counter = CollectiveCounter(self._mesh)
        with torch.profiler.record_function(f"step {step}"), counter or contextlib.nullcontext():
            yield
        self._steps.append(step)
        if counter is not None:
            self._write_collectives(step, counter.totals())
        if self._trace is not None:
            self._trace.step()
        if index + 1 == self._recorded.stop:
            self._write_memory()
        if index + 1 == self._end:
            self.close()

    def close(self) -> None:
        """Write what is being traced or recorded, and warn if the run ended before all was."""
        if self._trace is not None:
            self._trace.stop()
            self._trace = None  # frees its events
        self._write_memory()
        if self._rank == 0 and len(self._steps) < self._end:
            ran = f"{len(self._steps)} of {self._end} steps ran"
            logger.warning(f"profiling incomplete: {ran}; lower its warmup")
        self._end = 0

    def _write_trace(self, trace: torch.profiler.profile) -> None:
        steps = self._steps[self._traced.start :]
        if steps:
            trace.export_chrome_trace(self._path("trace", steps, "json.gz"))

    def _write_memory(self) -> None:
        steps = self._steps[self._recorded.start : self._recorded.stop]
        if steps:  # and none was written yet
            torch.cuda.memory._dump_snapshot(self._path("memory", steps, "pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
            self._recorded = range(0)

    def _path(self, kind: str, steps: list[int], suffix: str) -> str:
        path = self._folder / f"{kind}_step{steps[0]}_{steps[-1]}_rank{self._rank}.{suffix}"
        if self._rank == 0:
            logger.info(f"profiling: {path}")
        return str(path)

    def _write_collectives(self, step: int, collectives: list[Collective]) -> None:
        mesh = dict(zip(self._mesh.mesh_dim_names, self._mesh.shape, strict=True))
        sizes = ", ".join(f"{name} {size}" for name, size in mesh.items())
        text = f"collectives of step {step} on rank 0 ({sizes}):\n{table(collectives)}"
        rows = [asdict(total) for total in collectives]
        content = {"step": step, "rank": 0, "mesh": mesh, "collectives": rows}
        path = self._folder / f"collectives_step{step}"
        path.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
        path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        logger.info(text)
