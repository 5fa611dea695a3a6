"""The row stream -> the micro-batches of one data-parallel rank, prefetched in threads.

A step's global batch is the next `global_batch_size` rows of the stream. Rank r of dp_size ranks
holds rows [r * G // dp_size, (r + 1) * G // dp_size) of it: any degree goes, also one above G.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

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

    Without `grad_acc_steps` as few micro-steps as `batch_size` allows, of as equal rows as can be.
    Raises UserError where the given number of micro-steps cannot hold the rows or leaves one empty.
    """
    most = -(-global_batch_size // dp_size)  # rows of the fullest rank
    n_micro = -(-most // batch_size) if grad_acc_steps is None else grad_acc_steps
    rows = -(-most // n_micro)
    if rows <= batch_size and n_micro <= most:
        return n_micro, rows
    why = (
        f"holds at most {n_micro * batch_size} rows"
        if rows > batch_size
        else "leaves micro-steps without a row"
    )
    raise UserError(
        f"grad_acc_steps = {n_micro}: {why} with data.batch_size = {batch_size}, but "
        f"data.global_batch_size = {global_batch_size} gives {most} rows to each of {dp_size} "
        f"data-parallel ranks; must be {-(-most // batch_size)} to {most}, or null to derive it"
    )


class Loader:
    """Iterates over steps from `position` on: next(loader) is the list of a step's micro-batches.

    `workers` threads read ahead of it, a bounded number of steps; with 0 rows are read by the
    calling thread when asked for. The order does not depend on it. An exception of a worker is
    raised by next() as it is. Tensors are pinned when `device` is a CUDA device. `position` is
    the rows consumed by all ranks after the batches handed out so far. With `marks`, batches tell
    which document each token belongs to.
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
        self.position = position
        self._stream, self._global_batch_size = stream, global_batch_size
        self._begin = dp_rank * global_batch_size // dp_size
        self._end = (dp_rank + 1) * global_batch_size // dp_size
        self._n_micro, self._rows = n_micro, rows
        self._marks = marks
        self._pin = torch.device(device).type == "cuda"
        rows_per_fetch = min(ROWS_PER_FETCH, TOKENS_PER_FETCH // stream.seq_len)
        self._steps_per_fetch = max(1, rows_per_fetch // max(1, self._end - self._begin))
        self._pool = ThreadPoolExecutor(workers, "data") if workers else None
        self._in_flight: deque[Future[list[list[MicroBatch]]]] = deque()
        self._max_in_flight = 2 * workers
        self._fetch_from = position  # where the next fetch begins
        self._ready: deque[list[MicroBatch]] = deque()
        self._started = self._closed = False

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self

    def __next__(self) -> list[MicroBatch]:
        if self._closed:
            raise RuntimeError("this loader is closed")
        try:
            if not self._ready:
                self._ready.extend(self._fetch_next())
        except BaseException:
            self.close()
            raise
        self.position += self._global_batch_size
        return self._ready.popleft()

    def close(self) -> None:
        """Stop reading ahead. Waits for the reads that are under way."""
        self._closed = True
        self._ready.clear()
        self._in_flight.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fetch_next(self) -> list[list[MicroBatch]]:
        if self._pool is None:
            return self._fetch(*self._take_fetch())
        while len(self._in_flight) < self._max_in_flight:
            self._in_flight.append(self._pool.submit(self._fetch, *self._take_fetch()))
        return self._in_flight.popleft().result()

    def _take_fetch(self) -> tuple[int, int]:
        """(position, steps) of the next fetch."""
        position = self._fetch_from
        # The very first is one step, so that it is there soon.
        steps = 1 if self._pool is None or not self._started else self._steps_per_fetch
        self._started = True
        self._fetch_from += steps * self._global_batch_size
        return position, steps

    def _fetch(self, position: int, steps: int) -> list[list[MicroBatch]]:
        starts = position + self._global_batch_size * np.arange(steps)
        positions = starts[:, None] + np.arange(self._begin, self._end)
        block = self._stream.rows(positions.reshape(-1))
        block = block.reshape(*positions.shape, block.shape[-1])
        is_target = self._stream.is_target(positions.reshape(-1))
        masks = [None] * steps if is_target is None else is_target.reshape(block.shape)
        return [self._micro_batches(*step) for step in zip(positions, block, masks, strict=True)]

    def _micro_batches(
        self, ids: np.ndarray, block: np.ndarray, is_target: np.ndarray | None
    ) -> list[MicroBatch]:
        """One step's rows `block` [n, S + V - 1] cut into micro-batches of the same shape."""
        n_micro, rows, n = self._n_micro, self._rows, len(ids)
        seq_len, n_targets = self._stream.seq_len, self._stream.n_views - 1
        row_ids = self._empty(n_micro, rows)
        tokens = self._empty(n_micro, rows, seq_len)
        targets = self._empty(n_micro, n_targets, rows, seq_len)
        for m, (to_ids, to_tokens, to_targets) in enumerate(
            zip(row_ids.numpy(), tokens.numpy(), targets.numpy(), strict=True)
        ):
            part = slice(m * n // n_micro, (m + 1) * n // n_micro)
            filled = part.stop - part.start
            to_ids[:filled], to_ids[filled:] = ids[part], -1
            # A padding row goes through the model like any other: its tokens must be valid.
            to_tokens[:filled], to_tokens[filled:] = block[part, :seq_len], 0
            for v, to_view in enumerate(to_targets, start=1):
                to_view[:filled], to_view[filled:] = block[part, v : v + seq_len], IGNORE
                if is_target is not None:
                    to_view[:filled][~is_target[part, v : v + seq_len]] = IGNORE
        batch = [MicroBatch(row_ids[m], tokens[m], targets[m]) for m in range(n_micro)]
        if self._marks is not None:
            self._tell_documents(batch, block)
        return batch

    def _tell_documents(self, batch: list[MicroBatch], block: np.ndarray) -> None:
        """Fill in `documents`, and ignore the targets that the document mask ignores."""
        index, n = self._marks.index(block), len(block)
        for m, micro in enumerate(batch):
            part = slice(m * n // len(batch), (m + 1) * n // len(batch))
            filled = part.stop - part.start
            micro.documents = torch.zeros_like(micro.tokens, pin_memory=self._pin)
            micro.documents[:filled] = torch.from_numpy(index[part, : self._stream.seq_len])
            for v, targets in enumerate(micro.targets.numpy(), start=1):
                self._marks.drop_targets(targets[:filled], index[part], v)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, pin_memory=self._pin)
