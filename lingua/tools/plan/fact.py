"""A plan that was written into the dump dir of a run, beside what the run measured."""

import json
from pathlib import Path
from typing import Any

import torch

from lingua.base.dump_dir import COLLECTIVES, PLAN, PROFILING
from lingua.base.format import human_bytes
from lingua.monitor.metrics import peak_mem_gib


def against_plan(
    folder: Path, sizes: tuple[int, ...], device: torch.device, step_s: float
) -> str | None:
    """A line for the log; None where no plan of these mesh sizes is in the dump dir. Traffic is
    compared where profiling has counted it."""
    try:
        planned: dict[str, Any] = json.loads((folder / PLAN).read_text())
        if list(planned["mesh"].values()) != list(sizes):
            return f"plan: {PLAN} is of another mesh"
        pairs = []
        if device.type == "cuda":  # the CPU has only the peak of the whole process
            allocated, peak = planned["allocated"] / 2**30, peak_mem_gib(device)
            pairs.append(f"memory {allocated:.2f} GiB, was {peak:.2f}")
        if planned["times"] is not None:
            pairs.append(f"a step {planned['times']['step']:.3g} s, was {step_s:.3g}")
        counts = sorted((folder / PROFILING).glob(COLLECTIVES))
        if counts:
            counted = json.loads(counts[-1].read_text())["collectives"]
            sent = [sum(t["bytes"] for t in c) for c in (planned["collectives"], counted)]
            pairs.append(f"sent {human_bytes(sent[0])}, was {human_bytes(sent[1])}")
        return f"planned: {'; '.join(pairs)}"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"plan: {folder / PLAN} cannot be compared: {error}"  # it must not end the run
