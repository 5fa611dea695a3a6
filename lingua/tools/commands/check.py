"""Check this machine in a minute, before a run: devices, links, disk and clocks of every rank:

    python -m lingua check folder=runs
    torchrun --nproc-per-node 8 -m lingua check gpu=h100
    srun --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 python -m lingua check gpu=h100

A table has the least, the median and the largest of all ranks; lines below it name the rank, host
and device that is out of line. Exit code: 0 where nothing is, 1 where something is. `python -m
lingua stool check=true` does this before a run, in its job.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lingua.config.load import load
from lingua.config.schema import Free


@dataclass
class CheckArgs:
    device: Free[Literal["auto", "cpu", "cuda"]] = "auto"  # auto: cuda where there is one
    # what the devices are: a name of lingua plan's table or a YAML file with the keys of a Device;
    # null: what most of them are called, if the table has that
    gpu: Free[str | None] = None
    folder: Free[str] = "."  # where each rank writes a file of 128 MiB, which it removes

    def validate(self) -> Iterator[tuple[str, str]]:
        if self.gpu is not None:
            from lingua.tools.plan.device import unknown_device  # imports torch

            if need := unknown_device(self.gpu):
                yield "gpu", need


def main(argv: Sequence[str]) -> None:
    args, _ = load(CheckArgs, list(argv), program_doc=__doc__)
    from lingua.tools.check.machine import check  # here, since --help needs no torch

    sys.exit(check(args.device, args.gpu, Path(args.folder)))
