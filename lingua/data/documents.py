"""Where documents begin in a row, told from the tokens that begin or end them."""

import numpy as np

from lingua.data import IGNORE
from lingua.data.args import DataArgs
from lingua.errors import UserError
from lingua.tokenizer import Tokenizer


class DocumentMarks:
    """The token that begins every document, or else (`bos_id` None) the one that ends it."""

    def __init__(self, bos_id: int | None, eos_id: int | None, ignores_first: bool) -> None:
        self.bos_id, self.eos_id, self.ignores_first = bos_id, eos_id, ignores_first

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
        """Ignore, in place, those of the targets [..., S] that are not in their input's document.

        They lie `view` tokens ahead; `documents` [..., L] is the index of the whole row. Does
        nothing where such targets are kept.
        """
        if self.ignores_first:
            seq_len = targets.shape[-1]
            there, here = documents[..., view : view + seq_len], documents[..., :seq_len]
            targets[there != here] = IGNORE


def document_marks(args: DataArgs, tokenizer: Tokenizer) -> DocumentMarks | None:
    """What `data.document_mask` asks for; None for rows whose documents see each other.

    Raises:
        UserError: documents carry neither a first nor a last token of their own.
    """
    if args.document_mask == "none":
        return None
    if not (args.add_bos or args.add_eos):
        raise UserError(
            f"data.document_mask = {args.document_mask}: documents are told apart by their first "
            "or last token; set data.add_bos or data.add_eos to true"
        )
    bos_id = tokenizer.bos_id if args.add_bos else None
    return DocumentMarks(bos_id, tokenizer.eos_id, args.document_mask == "ignore")
