"""An app that trains nothing, for tests on Slurm: each rank prints where it keeps temporary files,
its place and its GPUs. A job's environment sets SLEEP_S, seconds until a rank ends."""

import os
import tempfile
import time
from dataclasses import dataclass

from lingua.config.load import load


@dataclass
class GpuArgs:
    name: str = "gpus"
    dump_dir: str | None = None


def check(argv: list[str], world_size: int) -> tuple[GpuArgs, list[str]]:
    return load(GpuArgs, argv)


if __name__ == "__main__":
    print(tempfile.gettempdir())
    names = ("SLURM_PROCID", "SLURMD_NODENAME", "SLURM_LOCALID", "CUDA_VISIBLE_DEVICES")
    print(*(os.environ.get(name) for name in names), flush=True)
    time.sleep(float(os.environ.get("SLEEP_S", 0)))
