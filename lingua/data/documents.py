"""The documents of a row: where they begin, and which targets are in another than their input."""

from dataclasses import dataclass

import numpy as np

from lingua.data import IGNORE


@dataclass(frozen=True)
class DocumentMarks:
    """The token that begins every document, or else (`bos_id` None) the one that ends it. Where one
    token does both, it stands twice between two documents."""

    bos_id: int | None
    eos_id: int | None  # None: nothing ends a document
    ignores_first: bool  # whether the first token of a document is no target

    def index(self, tokens: np.ndarray) -> np.ndarray:
        """int64, the shape of `tokens` [..., L]: which document of its row each token belongs to,
        counted from 0."""
        starts = np.zeros(tokens.shape, np.int64)
        if self.bos_id is not None and self.bos_id == self.eos_id:
            starts[..., 1:] = self._begins(tokens)[..., 1:]
        elif self.bos_id is not None:
            starts[..., 1:] = tokens[..., 1:] == self.bos_id
        else:
            starts[..., 1:] = tokens[..., :-1] == self.eos_id
        return starts.cumsum(-1)

    def _begins(self, tokens: np.ndarray) -> np.ndarray:
        """bool, where a document begins whose first and last token are the same: at every second of
        a run of them, the last of a run that begins the row, and else the one behind an end."""
        marks, at = tokens == self.bos_id, np.arange(tokens.shape[-1])
        last_text = np.maximum.accumulate(np.where(marks, -1, at), -1)
        first_text = np.where(marks.all(-1), tokens.shape[-1], (~marks).argmax(-1))[..., None]
        place = at - last_text - 1 + (first_text % 2) * (at < first_text)
        begins: np.ndarray = marks & (place % 2 == 1)
        return begins

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
