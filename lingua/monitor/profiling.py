"""Looks into a few steps of a run: a trace per rank, CUDA memory, and the collectives of one step.

Everything lands in `<dump_dir>/profiling/`; steps are numbered as in metrics.jsonl. Switched off it
costs one comparison a step.
"""

import contextlib
import json
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity

from lingua.config.schema import Free
from lingua.monitor.collectives import CollectiveCounter, table, totals

logger = logging.getLogger(__name__)

# Allocations and frees a snapshot remembers; each takes some KB of host memory.
MEMORY_EVENTS = 100_000
_NOTHING = contextlib.nullcontext()


@dataclass
class ProfilingArgs:
    run: Free[bool] = False  # write the traces, snapshots and counts described below
    mem_warmup: Free[int] = 0  # steps after the start before CUDA memory is recorded
    mem_steps: Free[int] = 2  # steps whose CUDA allocations are recorded; 0 for none
    # Steps after the start before the trace. The last of them, slowed by that, counts collectives
    # and warms the profiler up, so that the traced steps are clean; 0 is therefore taken as 1.
    profile_warmup: Free[int] = 10
    profile_steps: Free[int] = 2  # steps that are traced; 0 for neither a trace nor a count

    def validate(self) -> Iterator[tuple[str, str]]:
        for name in ("mem_warmup", "mem_steps", "profile_warmup", "profile_steps"):
            if getattr(self, name) < 0:
                yield name, "must be at least 0"


class Profiler:
    """Observes the steps of one start of a run; every rank makes one and calls it alike.

        profiler = Profiler(args.profiling, dump_dir, mesh)
        for ...:
            with profiler.step(step + 1):  # the number the step will have in metrics.jsonl
                ...
        profiler.close()

    Counted from this start, step `profile_warmup` counts the collectives of global rank 0
    (`collectives_step{n}.txt` and `.json`, and a table in the log), the `profile_steps` after it
    are traced (`trace_step{first}_{last}_rank{r}.json.gz`, Chrome's trace format), and on CUDA the
    `mem_steps` after `mem_warmup` give `memory_step{first}_{last}_rank{r}.pickle`.
    """

    def __init__(self, args: ProfilingArgs, dump_dir: str | Path, mesh: DeviceMesh) -> None:
        self._args = args
        self._folder = Path(dump_dir) / "profiling"
        self._mesh = mesh
        self._cuda = mesh.device_type == "cuda"
        self._rank = dist.get_rank()
        self._seen = 0  # steps of this start
        self._trace: torch.profiler.profile | None = None  # while warming up or tracing
        self._traced: list[int] = []
        self._remembered: list[int] = []  # steps in the memory history being recorded

        # Steps of this start, from 1: one that is counted, then those traced; and those remembered.
        self._counted = max(args.profile_warmup, 1) if args.profile_steps else 0
        self._trace_window = _window(self._counted, args.profile_steps)
        self._mem_window = _window(args.mem_warmup, args.mem_steps if self._cuda else 0)
        self._last = max(self._trace_window.stop, self._mem_window.stop) - 1 if args.run else 0
        if args.run:
            self._folder.mkdir(parents=True, exist_ok=True)

    def step(self, step: int) -> AbstractContextManager[None]:
        """Wraps the work of `step`, the number of updates completed when it is done."""
        if self._seen >= self._last:
            return _NOTHING
        self._seen += 1
        return self._observed(step)

    def close(self) -> None:
        """Writes what a run that ended early has so far, and says what it never reached."""
        if self._seen >= self._last:  # off, or everything was written
            return
        if self._traced:
            self._write_trace()
        elif self._trace is not None:
            self._trace.start_trace()  # what is prepared can only be ended so
            self._trace.stop_trace()
        self._trace = None
        if self._remembered:
            self._write_memory()
        if self._rank == 0 and self._seen < self._trace_window.stop - 1:
            n_traced = max(0, self._seen - self._counted)
            logger.warning(
                f"profiling: {n_traced or 'none'} of {len(self._trace_window)} steps were traced: "
                f"this start ran {self._seen} steps, and tracing begins after "
                f"profiling.profile_warmup = {self._args.profile_warmup} of them"
            )
        if self._rank == 0 and self._seen < self._mem_window.start:
            logger.warning(
                f"profiling: no memory was recorded: this start ran {self._seen} steps, and "
                f"recording begins after profiling.mem_warmup = {self._args.mem_warmup} of them"
            )
        self._last = 0

    @contextlib.contextmanager
    def _observed(self, step: int) -> Iterator[None]:
        number = self._seen
        if number in self._mem_window:
            if not self._remembered:
                torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
            self._remembered.append(step)
        if number in self._trace_window:
            if not self._traced:
                self._trace.start_trace()
            self._traced.append(step)
        with self._inside(number, step):
            yield
        if self._traced and number == self._trace_window[-1]:
            self._write_trace()
        if self._remembered and number == self._mem_window[-1]:
            self._write_memory()

    @contextlib.contextmanager
    def _inside(self, number: int, step: int) -> Iterator[None]:
        """The step itself: counted, named in the trace, or left alone."""
        if number in self._trace_window:
            with torch.profiler.record_function(f"step {step}"):
                yield
        elif number == self._counted:
            activities = [ProfilerActivity.CPU]
            if self._cuda:
                activities.append(ProfilerActivity.CUDA)
            self._trace = torch.profiler.profile(activities=activities, record_shapes=True)
            self._trace.prepare_trace()
            if self._rank != 0:
                yield
                return
            with CollectiveCounter(self._mesh) as counter:
                yield
            self._write_collectives(step, counter)
        else:
            yield

    def _write_trace(self) -> None:
        first, last = self._traced[0], self._traced[-1]
        self._trace.stop_trace()
        name = f"trace_step{first}_{last}_rank{self._rank}.json.gz"
        self._trace.export_chrome_trace(str(self._folder / name))
        self._trace, self._traced = None, []  # frees the events
        if self._rank == 0:
            logger.info(f"profiling: steps {first} to {last}: {self._folder / name}, one per rank")

    def _write_memory(self) -> None:
        first, last = self._remembered[0], self._remembered[-1]
        name = f"memory_step{first}_{last}_rank{self._rank}.pickle"
        torch.cuda.memory._dump_snapshot(str(self._folder / name))
        torch.cuda.memory._record_memory_history(enabled=None)
        self._remembered = []
        if self._rank == 0:
            logger.info(f"profiling: memory of steps {first} to {last}: {self._folder / name}")

    def _write_collectives(self, step: int, counter: CollectiveCounter) -> None:
        mesh = dict(zip(self._mesh.mesh_dim_names or (), self._mesh.shape, strict=False))
        sizes = ", ".join(f"{name} {size}" for name, size in mesh.items())
        text = f"collectives of step {step} on rank 0 ({sizes}):\n{table(counter.records)}"
        rows = [asdict(total) for total in totals(counter.records)]
        content = {"step": step, "rank": 0, "mesh": mesh, "collectives": rows}
        path = self._folder / f"collectives_step{step}"
        path.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
        path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        logger.info(text)


def _window(after: int, n: int) -> range:
    return range(after + 1, after + 1 + n) if n else range(0)
