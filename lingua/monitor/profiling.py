"""Which steps of a run are profiled. lingua.monitor.profiler, imported for that, profiles them."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from lingua.monitor.args import ProfilingArgs

if TYPE_CHECKING:
    from lingua.monitor.profiler import Profiler


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
