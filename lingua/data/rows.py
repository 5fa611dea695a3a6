"""The interfaces of a source of rows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lingua.data import IGNORE
from lingua.data.args import DataArgs
from lingua.tokenizer.interface import Tokenizer

if TYPE_CHECKING:
    from lingua.data.documents import DocumentMarks

CONTENT = "data.content."  # prefix of a source's name in the fingerprints
TOKENIZER = "data.tokenizer.content"  # name of the tokenizer's

# Positions int64 [n] -> which document of its row each token belongs to, counted from 0: int64 [n,
# seq_len + n_views - 1].
Documents = Callable[[np.ndarray], np.ndarray]


class Rows(Protocol):
    """All rows of a run, each a pure function of its position, which is all the state there is."""

    seq_len: int
    n_views: int

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """Tokens [n, seq_len + n_views - 1], of any integer dtype, of the positions int64 [n].
        Called by several threads at once."""

    def is_target(self, positions: np.ndarray) -> np.ndarray | None:
        """Returns which of these tokens may be targets, bool [n, seq_len + n_views - 1]; None:
        all."""


@dataclass
class HeldOut:
    """Whole documents, one after another, cut into windows that do not overlap."""

    tokens: np.ndarray  # int64 [windows, S]
    targets: np.ndarray  # int64 [windows, S], IGNORE after the last token
    n_bytes: int | None  # UTF-8 bytes of the documents' text; None: not known
    text: str = ""  # hash of that text; empty: of an app that gives none
    # int64 [windows, S], which document of its window each token belongs to, counted from 0; None:
    # the tokens that begin or end documents show it
    documents: np.ndarray | None = None

    def have_text(self) -> bool:
        """Whether there is a loss, per target and, where bytes are known, per byte."""
        return (self.n_bytes is None or self.n_bytes > 0) and bool((self.targets != IGNORE).any())


@dataclass(frozen=True)
class OpenData:
    """Data that is ready to be read."""

    rows: Rows
    # a hash of the content of each thing that rows are made of, by a name of the app's choice;
    # a resumed run is refused where one differs
    fingerprints: Mapping[str, str]
    held_out: Mapping[str, HeldOut] = field(default_factory=dict)  # held-out text by source
    # what `data.document_mask` separates; None: the tokens that begin or end documents show it
    documents: Documents | None = None


class Data(Protocol):
    """A source of rows. `args` is the app's configuration."""

    def check(self, args: Any, tokenizer: Tokenizer) -> None:
        """Raise UserError for what `prepare` or `open` would refuse, if that is known soon. Called
        by one process, before a run is launched and when it starts."""

    def prepare(self, args: Any, tokenizer: Tokenizer, report: Callable[[str], None]) -> None:
        """Build on disk what is not there yet; what is finished stays when it is interrupted.
        Called on rank 0, while the others wait. `report` logs a line."""

    def open(self, args: Any, tokenizer: Tokenizer) -> OpenData:
        """The data of a run whose `data.global_batch_size` is set. Called by every rank."""


def document_marks(args: DataArgs, tokenizer: Tokenizer) -> "DocumentMarks | None":
    """The marks that `data.document_mask` needs; None for rows whose documents see each other."""
    if args.document_mask == "none":
        return None
    from lingua.data.documents import DocumentMarks

    bos_id = tokenizer.bos_id if args.add_bos else None
    eos_id = tokenizer.eos_id if args.add_eos else None
    return DocumentMarks(bos_id, eos_id, args.document_mask == "ignore")
