"""The row stream -> the micro-batches of one data-parallel rank, prefetched in threads.

A step's global batch is the next G = `global_batch_size` rows of the stream. Rank r of dp_size
ranks has rows [r * G // dp_size, (r + 1) * G // dp_size) of it, for any dp_size, also above G. With
`deterministic: mesh` its k-th micro-batch is grain k * dp_size + r, of the rows that begin at that
multiple of the micro-batch size.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lingua.base.errors import UserError
from lingua.data import IGNORE
from lingua.data.rows import Documents, Rows
from lingua.parallel.mesh import begin_world_sum_, counts_rows
from lingua.parallel.tensors import device_threads, to_device

if TYPE_CHECKING:
    from lingua.data.documents import DocumentMarks

STEPS_AHEAD = 8  # steps each thread reads ahead
UNIT = 2.0**-30  # of the whole numbers in which fractional counts are added up, in any order
MAX_COUNT = 2.0**32  # fractional counts of a step; half of what int64 has of these units


@dataclass
class MicroBatch:
    """R rows of one forward pass. A padding row has row id -1 and no target that counts."""

    row_ids: Tensor  # int64 [R], the row's position in the stream
    tokens: Tensor  # int64 [R, S], view 0
    targets: Tensor  # int64 [V-1, R, S], IGNORE where there is no loss
    # int64 [R, K], where the documents of each row begin (lingua.model); None without such masks
    documents: Tensor | None = None
    noise: Tensor | None = None  # int64 [R], a random key of each row; None: nothing is random
    # [R, ...] each: tensors of the rows that the objective adds (`Objective.fields`)
    fields: dict[str, Tensor] = field(default_factory=dict)
    step: int = 0  # the step that trains on it; of held-out text the last one that is complete
    held_out: bool = False  # whether it is measured, and not trained on

    def to(self, device: torch.device) -> "MicroBatch":
        """A copy on the device, for which the host does not wait; without noise and fields."""
        tensors = self.row_ids, self.tokens, self.targets
        row_ids, tokens, targets = (to_device(t, device) for t in tensors)
        documents = None if self.documents is None else to_device(self.documents, device)
        moved = MicroBatch(row_ids, tokens, targets, documents)
        moved.step, moved.held_out = self.step, self.held_out
        return moved

    def inputs(self) -> list[Tensor]:
        """The arguments of a model's forward: tokens, targets and documents, if any."""
        inputs = [self.tokens, self.targets]
        return inputs if self.documents is None else [*inputs, self.documents]

    def random(self) -> dict[str, Tensor]:
        """The keyword arguments of a model's forward: `noise` if any."""
        return {} if self.noise is None else {"noise": self.noise}


@dataclass(frozen=True)
class Loader:
    """Reads one data-parallel rank's rows of a stream as micro-batches."""

    stream: Rows
    global_batch_size: int
    dp_rank: int
    dp_size: int
    n_micro: int  # micro-steps of a step
    rows: int  # rows per micro-batch, padding included
    device: torch.device | str = "cpu"  # tensors are pinned for a CUDA device
    # with marks, batches have `documents`, and targets that the document mask ignores are IGNORE
    marks: "DocumentMarks | None" = None
    documents: Documents | None = None  # used in place of the marks where it is given
    grains: bool = False  # each micro-batch is one of the grains of `deterministic: mesh`

    def steps(self, position: int, workers: int = 0) -> Generator[list[MicroBatch]]:
        """The micro-batches of each step from `position` on.

        `workers` threads read a bounded number of steps ahead; with 0 the calling thread reads each
        step when it is asked for. The order does not depend on it. A worker's exception is raised
        as it is. `close()` ends the threads, after the reads that are under way.
        """
        positions = itertools.count(position, self.global_batch_size)
        if not workers:
            yield from map(self._read, positions)
        in_flight: deque[Future[list[MicroBatch]]] = deque()
        pool = device_threads(workers, "data")
        try:
            while True:
                while len(in_flight) < STEPS_AHEAD * workers:
                    in_flight.append(pool.submit(self._read, next(positions)))
                yield in_flight.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _read(self, position: int) -> list[MicroBatch]:
        """This rank's micro-batches of the global batch that begins at `position`."""
        ranges = [range(position + i, position + j) for i, j in self._ranges()]
        positions = np.concatenate([np.arange(r.start, r.stop) for r in ranges])
        rows, is_target = self.stream.rows(positions), self.stream.is_target(positions)
        labels = rows if is_target is None else np.where(is_target, rows.astype(np.int64), IGNORE)
        index = None
        if self.marks is not None:
            index = self.marks.index(rows) if not self.documents else self.documents(positions)
        cuts = [0, *itertools.accumulate(map(len, ranges))]
        row_size = 1 + self.stream.seq_len * (self.stream.n_views + (self.marks is not None))
        pinned = torch.device(self.device).type == "cuda"
        block = _Block(self.n_micro * self.rows * row_size, pinned)
        return [
            self._micro_batch(
                positions[i:j], rows[i:j], labels[i:j], None if index is None else index[i:j], block
            )
            for i, j in pairwise(cuts)
        ]

    def _ranges(self) -> list[tuple[int, int]]:
        """The first row of each micro-batch in the global batch, and the one after its last."""
        size, rank = self.global_batch_size, self.dp_rank
        if self.grains:
            begins = ((m * self.dp_size + rank) * self.rows for m in range(self.n_micro))
            return [(min(i, size), min(i + self.rows, size)) for i in begins]
        begin, end = rank * size // self.dp_size, (rank + 1) * size // self.dp_size
        cuts = [begin + m * (end - begin) // self.n_micro for m in range(self.n_micro + 1)]
        return list(pairwise(cuts))

    def _micro_batch(
        self,
        ids: np.ndarray,
        rows: np.ndarray,
        labels: np.ndarray,
        index: np.ndarray | None,
        block: "_Block",
    ) -> MicroBatch:
        """`rows` [n, S + V - 1] with row ids [n], padded to the size of all micro-batches; `labels`
        are the rows with IGNORE for what may not be a target, `index` their documents."""
        n, seq_len = len(ids), self.stream.seq_len
        targets = block.take(self.stream.n_views - 1, self.rows, seq_len)
        for v, view in enumerate(targets.numpy(), start=1):
            view[:n], view[n:] = labels[:, v : v + seq_len], IGNORE
            if self.marks is not None and index is not None:
                self.marks.drop_targets(view[:n], index, v)
        starts = None
        if self.marks is not None and index is not None:
            starts = self.marks.starts(index[:, :seq_len])
        return MicroBatch(
            row_ids=self._padded(ids, -1, block),
            tokens=self._padded(rows[:, :seq_len], 0, block),  # goes through the model: valid
            targets=targets,
            documents=None if starts is None else self._padded(starts, 0, block),
        )

    def _padded(self, values: np.ndarray, padding: int, block: "_Block") -> Tensor:
        """`values` [n, ...], then `padding` in the remaining rows."""
        out = block.take(self.rows, *values.shape[1:])
        into, n = out.numpy(), len(values)
        into[:n], into[n:] = values, padding
        return out


class _Block:
    """Memory of all tensors of a step, allocated at once: each pinned one takes a call to CUDA."""

    def __init__(self, n: int, pinned: bool) -> None:
        self._free = torch.empty(n, dtype=torch.int64, pin_memory=pinned)

    def take(self, *shape: int) -> Tensor:
        n = math.prod(shape)
        taken, self._free = self._free[:n], self._free[n:]
        return taken.view(shape)


# ---- what ranks agree on for the next step


class Ahead(NamedTuple):
    """The next step of this rank. All but `batch` is equal on every rank."""

    batch: list[MicroBatch]  # micro-batches of this data-parallel rank
    # [K] on the CPU, `Objective.count` of the whole global batch: int64, or float32 of fractions
    counts: Tensor
    stopping: bool  # whether any rank is asked to stop
    save_overdue: bool  # whether a save is due by the clock of any rank


@dataclass(frozen=True)
class Agreement:
    """The next step, on which ranks have begun to agree."""

    batch: list[MicroBatch]
    total: Tensor  # int64 [K + 4] on the CPU: summed over the ranks
    summing: dist.Work
    fractional: bool  # counts are in multiples of UNIT

    def wait(self) -> Ahead:
        """Wait for the other ranks. Raises UserError on all where counts cannot be added up."""
        self.summing.wait()
        counts, flags = self.total[:-4], self.total[-4:]
        stopping, save_overdue, fractional, wrong = flags.tolist()
        if wrong or fractional not in (0, dist.get_world_size()):
            need = "must be all int64, or all float64, finite and below 2^32 in sum"
            raise UserError(f"Objective.count: what ranks have counted {need}")
        if self.fractional:
            counts = (counts * UNIT).float()
        return Ahead(self.batch, counts, bool(stopping), bool(save_overdue))


def agree(
    batch: list[MicroBatch],
    count: Callable[[MicroBatch], Tensor],
    mesh: DeviceMesh,
    stopping: bool,
    save_overdue: bool,
) -> Agreement:
    """Begin to agree on the next step, the one message between hosts of a step. Called by every
    rank, with its own micro-batches, `stopping` and `save_overdue`; `count` is that of the
    objective."""
    counts = torch.stack([count(micro) for micro in batch])
    wrong = False
    if fractional := counts.is_floating_point():
        wrong = not bool(counts.abs().sum() < MAX_COUNT / dist.get_world_size())
        counts = torch.zeros_like(counts) if wrong else counts
        counts = (counts.double() / UNIT).round().long()
    counts = counts.sum(0)
    if not counts_rows(mesh):
        counts = torch.zeros_like(counts)
    flags = torch.tensor([stopping, save_overdue, fractional, wrong])
    total = torch.cat((counts, flags))
    return Agreement(batch, total, begin_world_sum_(total), fractional)
