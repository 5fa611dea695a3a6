"""A fork whose rows are made by code: a random half, then the same half again."""

from dataclasses import replace

import numpy as np

from apps.main import app as main_app
from apps.main.config import TrainArgs
from lingua.base.errors import UserError
from lingua.data.rows import Data, HeldOut, OpenData, Rows
from lingua.tokenizer.interface import Tokenizer

HELD_OUT = 1 << 40  # the position of the first row that training never reaches


class CopyRows(Rows):
    def __init__(self, args: TrainArgs, vocab_size: int) -> None:
        self.seq_len, self.n_views = args.data.seq_len, args.data.n_views
        self.seed, self.vocab_size = args.seed, vocab_size

    def rows(self, positions: np.ndarray) -> np.ndarray:
        length = self.seq_len + self.n_views - 1
        draws = [np.random.default_rng((self.seed, p)) for p in positions.tolist()]
        halves = [draw.integers(self.vocab_size, size=length // 2) for draw in draws]
        return np.stack([np.resize(half, length) for half in halves])

    def is_target(self, positions: np.ndarray) -> np.ndarray:
        found = np.zeros((len(positions), self.seq_len + self.n_views - 1), bool)
        found[:, found.shape[1] // 2 :] = True  # the first half cannot be known
        return found


class CopyTask(Data):
    def check(self, args: TrainArgs, tokenizer: Tokenizer) -> None:
        if args.data.seq_len < 4:
            raise UserError(
                f"data.seq_len = {args.data.seq_len}: must be at least 4 to copy a half"
            )

    def open(self, args: TrainArgs, tokenizer: Tokenizer) -> OpenData:
        rows = CopyRows(args, tokenizer.vocab_size)
        windows = rows.rows(np.arange(HELD_OUT, HELD_OUT + 8))[:, : args.data.seq_len + 1]
        tokens, targets = windows[:, :-1], windows[:, 1:]
        held_out = HeldOut(tokens, targets, n_bytes=targets.size)
        return OpenData(rows, {"data.content.copy": "version 1"}, {"copy": held_out})


app = replace(main_app, path=__name__, data=CopyTask())
