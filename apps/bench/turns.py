"""Turns: the sides of a measurement run one after the other, so that other work of the machine
affects all of them equally."""

import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Side = Callable[[], Any]


@dataclass(frozen=True)
class Turn:
    """One call of one side."""

    seconds: float
    cpu_seconds: float  # summed over the threads of this process, and its children that have ended
    result: Any  # what the side returned


def clock(device: torch.device | None = None) -> np.ndarray:
    """Wall time and processor time, of all threads and of children that have ended, in seconds:
    float64 [2]. Waits for the device."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = time.process_time() + children.ru_utime + children.ru_stime
    return np.array([time.perf_counter(), cpu_s])


def take_round(
    sides: Mapping[str, Side],
    i: int,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> dict[str, Turn]:
    """Call every side once; in round i + 1 the order begins with the next side. `before` is not
    timed; `after` ends each turn and is."""
    names, turns = list(sides), {}
    for name in (names + names)[i % len(names) :][: len(names)]:
        before()
        begin = clock()
        result = sides[name]()
        after()
        seconds, cpu_seconds = (clock() - begin).tolist()
        turns[name] = Turn(seconds, cpu_seconds, result)
    return {name: turns[name] for name in names}


def take_turns(sides: Mapping[str, Side], repeats: int, title: str) -> list[dict[str, Turn]]:
    """Rounds of all sides, after one that warms up and is left out."""
    rounds = []
    for i in range(repeats + 1):
        print(f"{title}: round {i} of {repeats}", file=sys.stderr)
        rounds.append(take_round(sides, i))
    return rounds[1:]
