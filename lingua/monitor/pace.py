"""Which rank works longest in a step, while the others wait for it in collectives."""

from collections.abc import Sequence
from statistics import median

SLOW, SLOW_STEPS = 1.2, 50  # a rank is slow above this ratio, and reported after so many steps


def slowest(work_s: Sequence[float]) -> tuple[int, float]:
    """The rank that worked longest, and the ratio of its time to the median rank's."""
    rank = max(range(len(work_s)), key=work_s.__getitem__)
    middle = median(work_s)
    return rank, work_s[rank] / middle if middle else 1.0


class SlowRank:
    """Recognizes a rank that is slow for SLOW_STEPS steps."""

    def __init__(self) -> None:
        self._rank, self._steps, self._reported = -1, 0, False

    def add(self, rank: int, ratio: float, steps: int) -> bool:
        """Add the slowest rank of some steps. Returns whether to report it: once, until another
        one is slowest, or none is slow."""
        if rank != self._rank or ratio <= SLOW:
            self._rank, self._steps, self._reported = rank, 0, False
        self._steps += steps if ratio > SLOW else 0
        due = self._steps >= SLOW_STEPS and not self._reported
        self._reported |= due
        return due
