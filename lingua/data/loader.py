"""The row stream -> the micro-batches of one data-parallel rank, prefetched in threads.

A step's global batch is the next G = `global_batch_size` rows of the stream. Rank r of dp_size
ranks has rows [r * G // dp_size, (r + 1) * G // dp_size) of it, for any dp_size, also above G.
"""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from lingua.data import IGNORE
from lingua.data.documents import DocumentMarks
from lingua.data.rows import Rows
from lingua.errors import UserError

# Small steps are fetched several at a time, so that many rows share numpy's cost per call; up to
# about this many rows and tokens, so that reading ahead stays cheap.
ROWS_PER_FETCH = 256
TOKENS_PER_FETCH = 2**19


@dataclass
class MicroBatch:
    """R rows of one forward pass. A padding row has row id -1 and no target that counts."""

    row_ids: torch.Tensor  # int64 [R], the row's position in the stream
    tokens: torch.Tensor  # int64 [R, S], view 0
    targets: torch.Tensor  # int64 [V-1, R, S], IGNORE where there is no loss
    # int64 [R, S], which document of its row each input token belongs to; None without such masks
    documents: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Row ids, tokens, targets and, where there are some, documents."""
        tensors = [self.row_ids, self.tokens, self.targets]
        return tensors if self.documents is None else [*tensors, self.documents]


def micro_steps(
    global_batch_size: int, dp_size: int, batch_size: int, grad_acc_steps: int | None = None
) -> tuple[int, int]:
    """(micro-steps per step, rows per micro-batch), the same on every rank; rows <= batch_size.

    Without `grad_acc_steps`: as few micro-steps as `batch_size` allows, as equal as possible.

    Raises:
        UserError: `grad_acc_steps` micro-steps are too few for the rows, or one would have no row.
    """
    most = -(-global_batch_size // dp_size)  # rows of the fullest rank
    n_micro = -(-most // batch_size) if grad_acc_steps is None else grad_acc_steps
    rows = -(-most // n_micro)
    if rows > batch_size:
        why = f"holds at most {n_micro * batch_size} rows"
    elif n_micro > most:
        why = "leaves micro-steps without a row"
    else:
        return n_micro, rows
    raise UserError(
        f"grad_acc_steps = {n_micro}: {why} with data.batch_size = {batch_size}, but "
        f"data.global_batch_size = {global_batch_size} gives {most} rows to each of {dp_size} "
        f"data-parallel ranks; must be {-(-most // batch_size)} to {most}, or null to derive it"
    )


class Loader:
    """Iterates over steps from `position` on: next(loader) is the list of a step's micro-batches.

    `workers` threads read a bounded number of steps ahead; with 0 the calling thread reads each
    step when it is asked for. The order does not depend on it. next() raises a worker's exception
    as it is. Tensors are pinned when `device` is a CUDA device. With `marks`, batches have
    `documents`, and targets that the document mask ignores are IGNORE.
    """

    def __init__(
        self,
        stream: Rows,
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        n_micro: int,
        rows: int,
        position: int = 0,
        workers: int = 0,
        device: torch.device | str = "cpu",
        marks: DocumentMarks | None = None,
    ):
        self._stream, self._marks = stream, marks
        self._global_batch_size, self._n_micro, self._rows = global_batch_size, n_micro, rows
        self._begin = dp_rank * global_batch_size // dp_size
        self._end = (dp_rank + 1) * global_batch_size // dp_size
        self._pin = torch.device(device).type == "cuda"
        self._steps = self._read(position, workers)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self

    def __next__(self) -> list[MicroBatch]:
        return next(self._steps)

    def close(self) -> None:
        """Stop reading ahead. Waits for the reads that are under way."""
        self._steps.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, position: int, workers: int) -> Generator[list[MicroBatch]]:
        while not workers:
            yield from self._fetch(position, 1)
            position += self._global_batch_size
        rows_per_fetch = min(ROWS_PER_FETCH, TOKENS_PER_FETCH // self._stream.seq_len)
        steps_per_fetch = max(1, rows_per_fetch // max(1, self._end - self._begin))
        steps = 1  # the first fetch is a single step, so that it is ready soon
        in_flight: deque[Future[list[list[MicroBatch]]]] = deque()
        pool = ThreadPoolExecutor(workers, "data")
        try:
            while True:
                while len(in_flight) < 2 * workers:
                    in_flight.append(pool.submit(self._fetch, position, steps))
                    position += steps * self._global_batch_size
                    steps = steps_per_fetch
                yield from in_flight.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _fetch(self, position: int, steps: int) -> list[list[MicroBatch]]:
        """This rank's micro-batches of `steps` steps from `position` on."""
        n = self._end - self._begin
        starts = position + self._global_batch_size * np.arange(steps)
        positions = (starts[:, None] + np.arange(self._begin, self._end)).reshape(-1)
        columns = [positions, self._stream.rows(positions)]
        if (is_target := self._stream.is_target(positions)) is not None:
            columns.append(is_target)
        cuts = [m * n // self._n_micro for m in range(self._n_micro + 1)]
        return [
            [
                self._micro_batch(*(c[step * n + first : step * n + end] for c in columns))
                for first, end in pairwise(cuts)
            ]
            for step in range(steps)
        ]

    def _micro_batch(
        self, ids: np.ndarray, block: np.ndarray, is_target: np.ndarray | None = None
    ) -> MicroBatch:
        """Rows `block` [n, S + V - 1] with row ids [n], padded to the size of all micro-batches."""
        n, rows, seq_len = len(ids), self._rows, self._stream.seq_len
        row_ids, tokens = self._empty(rows), self._empty(rows, seq_len)
        targets = self._empty(self._stream.n_views - 1, rows, seq_len)
        batch = MicroBatch(row_ids, tokens, targets)
        _fill(row_ids, ids, -1)
        _fill(tokens, block[:, :seq_len], 0)  # padding goes through the model: valid tokens
        if self._marks is not None:
            index = self._marks.index(block)
            batch.documents = self._empty(rows, seq_len)
            _fill(batch.documents, index[:, :seq_len], 0)
        for v, view in enumerate(targets, start=1):
            _fill(view, block[:, v : v + seq_len], IGNORE)
            if is_target is not None:
                view.numpy()[:n][~is_target[:, v : v + seq_len]] = IGNORE
            if self._marks is not None:
                self._marks.drop_targets(view.numpy()[:n], index, v)
        return batch

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, pin_memory=self._pin)


def _fill(out: torch.Tensor, rows: np.ndarray, padding: int) -> None:
    """Copy `rows` [n, ...] to the first n rows of `out`; the others become `padding`."""
    into, n = out.numpy(), len(rows)
    into[:n], into[n:] = rows, padding
