"""A rank whose work takes longer than that of the others, which wait for it in every step."""

import logging

import torch.distributed as dist

from lingua.parallel.failure import host_of
from lingua.parallel.heartbeat import Heartbeat

SLOW, SLOW_STEPS = 1.2, 50  # a rank is slow above this ratio, and is named after so many steps

logger = logging.getLogger(__name__)


class SlowRank:
    """The rank that was slowest last, and for how many steps it has been slow."""

    def __init__(self, heart: Heartbeat) -> None:
        self.heart = heart
        self.rank, self.steps = -1, 0

    def note(self, rank: int, ratio: float, steps: int) -> None:
        """Log once a rank that is slow for SLOW_STEPS steps. `rank` was the slowest of the last
        `steps` steps; `ratio` is its time over that of the median rank."""
        before = self.steps if rank == self.rank else 0
        self.rank, self.steps = rank, before + steps if ratio > SLOW else 0
        if before < SLOW_STEPS <= self.steps and dist.get_rank() == 0:
            logger.warning(
                f"rank {rank} on {host_of(self.heart, rank)} has been slow for {SLOW_STEPS} steps: "
                f"its work takes {ratio:.2f} times the median rank's (slowest_ratio)"
            )
