"""Which steps of a run are profiled. lingua.monitor.profiler, imported for that, profiles them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from lingua.config.schema import Free, bounds

if TYPE_CHECKING:
    from lingua.monitor.profiler import Profiler


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
        yield from bounds(self, 0, "mem_warmup", "mem_steps", "profile_warmup", "profile_steps")


def open_profiler(
    args: ProfilingArgs, dump_dir: str | Path, mesh: DeviceMesh
) -> "Profiler | Unprofiled":
    """Returns the profiler of a run: `step(number)` is a context around the work of each step,
    `close()` comes last. Called by every rank."""
    if not args.run:
        return Unprofiled()
    from lingua.monitor.profiler import Profiler

    return Profiler(args, dump_dir, mesh)


class Unprofiled:
    """Names each step for a profiler from outside."""

    def step(self, step: int) -> AbstractContextManager[object]:
        return record_function(f"step {step}")

    def close(self) -> None:
        pass
