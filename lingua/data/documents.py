"""The documents of a row: where they begin, and which targets are in another than their input."""

from dataclasses import dataclass

import numpy as np

from lingua.data import IGNORE


@dataclass(frozen=True)
class DocumentMarks:
    """The token that begins every document, or else (`bos_id` None) the one that ends it."""

    bos_id: int | None
    eos_id: int | None
    ignores_first: bool  # whether the first token of a document is no target

    def index(self, tokens: np.ndarray) -> np.ndarray:
        """int64, the shape of `tokens` [..., L]: which document of its row each token belongs to,
        counted from 0."""
        starts = np.zeros(tokens.shape, np.int64)
        if self.bos_id is not None:
            starts[..., 1:] = tokens[..., 1:] == self.bos_id
        else:
            starts[..., 1:] = tokens[..., :-1] == self.eos_id
        return starts.cumsum(-1)

    def drop_targets(self, targets: np.ndarray, documents: np.ndarray, view: int) -> None:
        """Ignore, in place, the targets [..., S] outside their input's document, with
        `ignores_first`. They are `view` tokens ahead; `documents` [..., L] is the index of the
        whole row.
        """
        if self.ignores_first:
            seq_len = targets.shape[-1]
            crosses = documents[..., view : view + seq_len] != documents[..., :seq_len]
            targets[crosses] = IGNORE

    @staticmethod
    def starts(index: np.ndarray) -> np.ndarray:
        """int64 [n, K]: the positions at which the documents of each row begin, from their index
        [n, S]. K is that of the row with the most; S stands for what the others do not have."""
        n_rows, seq_len = index.shape
        row, position = np.diff(index, prepend=-1).nonzero()
        starts = np.full((n_rows, index[:, -1].max(initial=0) + 1), seq_len)
        starts[row, index[row, position]] = position
        return starts
