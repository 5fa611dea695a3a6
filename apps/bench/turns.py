"""Turns: the sides of a measurement run one after the other, so that other work of the machine
affects all of them equally."""

import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from apps.bench.report import Spread, quotients, spread

Side = Callable[[], Any]


class Turn(NamedTuple):
    """One call of one side."""

    seconds: float
    cpu_seconds: float  # summed over the threads of this process, and its children that have ended
    result: Any  # what the side returned


class Turns(NamedTuple):
    """The turns of one side, by round."""

    seconds: list[float]
    cpu_seconds: list[float]
    results: list[Any]


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


def take_turns(
    sides: Mapping[str, Side], repeats: int, title: str, warm_up: int = 1
) -> dict[str, Turns]:
    """The turns of every side in so many rounds, after others that warm up and are left out."""
    rounds = []
    for i in range(warm_up + repeats):
        print(f"{title}: round {i + 1 - warm_up} of {repeats}", file=sys.stderr)
        rounds.append(take_round(sides, i))
    return by_side(rounds[warm_up:])


def times(turns: Mapping[str, Turns], *ratios: tuple[str, str]) -> dict[str, Spread]:
    """Cells of a row: milliseconds of each side, and seconds of one over those of another."""
    cells = {f"{side}, ms": spread(1000 * s for s in t.seconds) for side, t in turns.items()}
    return cells | {f"{a} / {b}": quotients(turns[a].seconds, turns[b].seconds) for a, b in ratios}


def by_side(rounds: Iterable[Mapping[str, Turn]]) -> dict[str, Turns]:
    """The turns of every side."""
    rounds = list(rounds)
    return {
        side: Turns(*map(list, zip(*(taken[side] for taken in rounds), strict=True)))
        for side in rounds[0]
    }


def seconds_of(rounds: Iterable[Mapping[str, Turn]]) -> dict[str, list[float]]:
    """The seconds of every side, by round."""
    return {side: turns.seconds for side, turns in by_side(rounds).items()}
