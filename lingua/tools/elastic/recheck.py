"""`distributed.check_every`: in each such step a rank computes a grain of another one again.

With `deterministic: mesh` a grain's gradient has the same bits on every rank: one that computes
wrongly, once or always, is contradicted by others, from the same rows and weights. What is done
with a gradient after its backward (the exchange, the sum, the update) is not compared.
"""

import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lingua.base.dump_dir import WRONG_HOSTS
from lingua.base.errors import UserError
from lingua.base.hashing import hash_bits, key_of
from lingua.data.loader import Loader, MicroBatch
from lingua.monitor.means import Means
from lingua.monitor.metrics import append_line
from lingua.parallel.gradients import Sharded
from lingua.parallel.mesh import dp_degree, dp_gather, dp_rank, gather_on_every_rank
from lingua.run.run import Run

logger = logging.getLogger(__name__)

CHUNKS = {"cpu": 1 << 15, "cuda": 1 << 20}  # elements that are hashed at once


class Recheck:
    """Makes gradients as the run's objective does, and compares some of them."""

    @classmethod
    def of(cls, run: Run, loader: Loader) -> "Recheck | None":
        """None where there is one rank."""
        if dp_degree(run.mesh) > 1:
            return cls(run, loader)
        logger.info("distributed.check_every: there is no other rank to compare with")
        return None

    def __init__(self, run: Run, loader: Loader) -> None:
        assert isinstance(run.model, Sharded) and run.model.gradient_sums is not None
        self.run, self.loader, self.sums = run, loader, run.model.gradient_sums
        self.sums.observe = self._observe
        # Neighbours are in different replicas where they can be: those of one have its weights.
        replicas, shards, _ = run.mesh.shape
        self.ring = [i * shards + j for j in range(shards) for i in range(replicas)]
        index = torch.arange(2 * CHUNKS[run.device.type], device=run.device)
        # Two independent keys. Factors are odd: one bit changes both sums, which are modulo 2^64.
        self.factors = hash_bits(key_of("recheck"), index).view(2, -1) | 1
        self.total = torch.zeros(2, dtype=torch.int64, device=run.device)
        self.micro_step, self.only_hash = -1, False  # whose gradients are hashed; or not added too
        self.agreed = "none"  # the last step in which all ranks agreed

    def gradients(self, batch: list[MicroBatch], counts: Tensor) -> tuple[Tensor, Tensor]:
        """`Objective.gradients`. Where a comparison is due the host waits for the device. Raises
        UserError on every rank where ranks differ."""
        run, every = self.run, self.run.args.distributed.check_every
        step = run.progress.step + 1
        if step % every:
            return run.objective.gradients(batch, counts)
        i = step // every % len(batch)  # each micro-step has its turn
        following, _ = self._compute_of(1, i, counts)  # before this rank has gradients
        own, result = self._hashed(batch, counts, i)
        n = 2 + (result[0].shape == (len(batch),))  # an objective may return no loss of a grain
        votes = [dp_gather(t[:n], run.mesh).tolist() for t in (own, following)]
        if any(votes[0][r] != votes[1][self.ring[p - 1]] for p, r in enumerate(self.ring)):
            second, _ = self._compute_of(2, i, counts)
            votes.append(dp_gather(second[:n], run.mesh).tolist())
            raise self._error(step, *outvoted(self.ring, votes))
        self.agreed = f"step {step}"
        return result

    def _compute_of(self, distance: int, i: int, counts: Tensor) -> tuple[Tensor, object]:
        """`_hashed` of the grain that the rank so far on in the ring has in micro-step i. This rank
        reads its rows, and adds nothing."""
        run = self.run
        other = self.ring[(self.ring.index(dp_rank(run.mesh)) + distance) % len(self.ring)]
        # Grain i * ranks + r is the first one of a rank of that number.
        loader = replace(self.loader, dp_rank=i * len(self.ring) + other, n_micro=1)
        self.only_hash = True
        [grain] = next(loader.steps(run.progress.position))
        grain.step = run.progress.step + 1
        hashed = self._hashed([grain], counts, 0)
        self.only_hash, run.numbers = False, Means()
        return hashed

    def _hashed(
        self, batch: list[MicroBatch], counts: Tensor, i: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(Hash of micro-batch i, int64 [3]: of its gradients, and the bits of its loss; what the
        objective returns)."""
        self.micro_step, self.total = i, torch.zeros_like(self.total)
        loss, rows_hash = self.run.objective.gradients(batch, counts)
        self.micro_step = -1
        part = loss.reshape(-1)[i % loss.numel()].view(torch.int32)
        return torch.cat((self.total, part[None].long())), (loss, rows_hash)

    def _observe(self, grads: Tensor) -> bool:
        """Hash the gradients of an FSDP unit, float32 [n], in the order in which units make them.
        Returns whether they are for nothing else."""
        if self.sums.micro_step == self.micro_step:
            for part in grads.view(torch.int32).split(self.factors.shape[1]):
                sums = (self.factors[:, : len(part)] * part).sum(1)
                self.total = self.total * self.factors[:, 0] + sums
        return self.only_hash

    def _error(self, step: int, named: set[int], suspects: set[int]) -> UserError:
        """Names ranks, and has rank 0 write the hosts of those that are known to be wrong."""
        hosts = gather_on_every_rank(socket.gethostname())
        path = Path(self.run.args.folder, WRONG_HOSTS)
        shown = ", ".join(f"rank {r} on {hosts[r]}" for r in sorted(named or suspects))
        why = "other gradients than two ranks that computed the same grain"
        written = f"It is written to {path}"
        if not named:
            why = "different gradients of the same grain, and no majority has equal ones"
            written = f"No host is written to {path}"
        elif not dp_rank(self.run.mesh):
            with suppress(OSError):  # a full disk
                for r in sorted(named):
                    append_line(path, {"host": hosts[r], "rank": r, "step": step, "why": why})
        return UserError(
            f"distributed.check_every: step {step}: {shown}: {why}. The step was not applied, and "
            f"is not saved; the last step in which all ranks agreed: {self.agreed}. {written}",
            exit_code=3,
        )


def outvoted(ring: Sequence[int], votes: Sequence[Sequence[object]]) -> tuple[set[int], set[int]]:
    """(Ranks that two others contradict, where these are fewer than half; all that have computed a
    grain on which not all agree). `votes` are, by rank, of its own grain, of that of the next rank
    of the ring, and of the one after."""
    named, suspects = set[int](), set[int]()
    for p in range(len(ring)):
        ranks = ring[p], ring[p - 1], ring[p - 2]
        values = [vote[r] for vote, r in zip(votes, ranks, strict=True)]
        counts = [values.count(value) for value in values]
        suspects |= set(ranks) if counts != [3, 3, 3] else set()
        named |= {ranks[counts.index(1)]} if counts.count(1) == 1 else set()
    return (named if 2 * len(named) < len(ring) else set()), suspects
