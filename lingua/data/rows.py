"""Where the rows of a run come from: what an app gives in place of text files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from lingua.tokenizer import Tokenizer

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
        """Which of these tokens may be targets, bool [n, seq_len + n_views - 1]; None: all."""


@dataclass
class HeldOut:
    """Whole documents, one after another, cut into windows that do not overlap."""

    tokens: np.ndarray  # int64 [windows, S]
    targets: np.ndarray  # int64 [windows, S], IGNORE after the last token
    n_bytes: int  # of the documents' text in UTF-8
    # int64 [windows, S], which document of its window each token belongs to, counted from 0; None:
    # the tokens that begin or end documents show it
    documents: np.ndarray | None = None


@dataclass(frozen=True)
class OpenData:
    """Data that is ready to be read."""

    rows: Rows
    # a hash of the content of each thing that rows are made of, by a name of the app's choice;
    # a resumed run is refused where one differs
    fingerprints: Mapping[str, str]
    held_out: Mapping[str, HeldOut] = field(default_factory=dict)  # by source: what is measured
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
