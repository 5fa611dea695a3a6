"""Which document each token of a row belongs to, from the tokens that begin or end documents."""

from dataclasses import dataclass

import numpy as np

from lingua.data import IGNORE
from lingua.data.args import DataArgs
from lingua.tokenizer import Tokenizer


@dataclass(frozen=True)
class DocumentMarks:
    """The token that begins every document, or else (`bos_id` None) the one that ends it."""

    bos_id: int | None
    eos_id: int | None
    ignores_first: bool  # the first token of a document is not a target

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
        """With `ignores_first`, ignore, in place, the targets [..., S] outside their input's
        document. They are `view` tokens ahead; `documents` [..., L] is the index of the whole row.
        """
        if self.ignores_first:
            seq_len = targets.shape[-1]
            of_target, of_input = documents[..., view : view + seq_len], documents[..., :seq_len]
            targets[of_target != of_input] = IGNORE


def document_starts(index: np.ndarray) -> np.ndarray:
    """int64 [n, K]: the positions at which the documents of each row begin, from their index
    [n, S]. K is that of the row with the most; S stands for those that the others do not have."""
    n_rows, seq_len = index.shape
    row, position = np.diff(index, prepend=-1).nonzero()
    starts = np.full((n_rows, index[:, -1].max(initial=0) + 1), seq_len)
    starts[row, index[row, position]] = position
    return starts


def document_marks(args: DataArgs, tokenizer: Tokenizer) -> DocumentMarks | None:
    """The marks that `data.document_mask` needs; None for rows whose documents see each other."""
    if args.document_mask == "none":
        return None
    bos_id = tokenizer.bos_id if args.add_bos else None
    return DocumentMarks(bos_id, tokenizer.eos_id, args.document_mask == "ignore")
