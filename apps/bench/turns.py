"""Turns: the sides of a measurement run one after the other, so that other work of the machine
affects all of them equally."""

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from apps.bench.report import Spread, quotients, spread

Side = Callable[[], Any]


@dataclass(frozen=True)
class Turns:
    """The turns of one side, by round."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)  # see `clock`
    results: list[Any] = field(default_factory=list)  # what the side returned


BySide = defaultdict[str, Turns]


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
    turns: BySide,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Call every side once and add its turn; each round begins with the next side. `before` is not
    timed; `after` ends each turn and is."""
    names = list(sides)
    first = len(turns[names[0]].seconds) % len(names)
    for name in names[first:] + names[:first]:
        before()
        begin = clock()
        turns[name].results.append(sides[name]())
        after()
        seconds, cpu_seconds = (clock() - begin).tolist()
        turns[name].seconds.append(seconds)
        turns[name].cpu_seconds.append(cpu_seconds)


def take_turns(
    sides: Mapping[str, Side],
    repeats: int,
    title: str,
    warm_up: int = 1,
    before: Callable[[], object] = lambda: None,
) -> BySide:
    """The turns of every side in so many rounds, after others that warm up and are left out."""
    for n, about in ((warm_up, " to warm up"), (repeats, "")):
        turns = BySide(Turns)
        for i in range(n):
            print(f"{title}: round {i + 1} of {n}{about}", file=sys.stderr)
            take_round(sides, turns, before)
    return turns


def times(turns: Mapping[str, Turns], *ratios: tuple[str, str]) -> dict[str, Spread]:
    """Cells of a row: milliseconds of each side, and seconds of one over those of another."""
    cells = {f"{side}, ms": spread(1000 * s for s in t.seconds) for side, t in turns.items()}
    return cells | {f"{a} / {b}": quotients(turns[a].seconds, turns[b].seconds) for a, b in ratios}
