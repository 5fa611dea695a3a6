"""Tokens of a long document, piece by piece: some libraries take more time for each character of a
longer text.

The document is cut into pieces of about PIECE characters, at places that depend only on its text.
Each piece is tokenized together with the CONTEXT characters before it, whose tokens are dropped.

A cut is made where a word or line begins. If a tokenizer never joins the end of a word with the
space after it, the tokens of the whole document have a boundary there. So bytes, tiktoken, and
sentencepiece BPE whose pieces have spaces only in front give the tokens of the whole. (A unigram
model sums scores over a document in float32, and rounding breaks ties: in a long document the same
words may get other tokens.) For any tokenizer a cut is verified: the tokens of the text on its left
must be the first tokens of both sides together. Where no word or line begins in WINDOW characters,
or none of the last TRIES passes, the cut is a rough one: at a character that passes, if any. Rough
cuts are counted.
"""

import re
from collections.abc import Iterator

import numpy as np

from lingua.tokenizer.interface import Tokenizer

PIECE = 2**18  # characters
CONTEXT = 512  # characters on each side of a cut that are compared
WINDOW = 2**16  # characters in which a word or line must begin
TRIES = 16
WORD_OR_LINE = re.compile(r"(?<=\S)(?= \S)|(?<=\n)(?=\S)")


class Pieces:
    """Tokenizes long documents; `rough_cuts` counts those of all of them."""

    def __init__(self, tokenizer: Tokenizer, piece: int = PIECE) -> None:
        self._encode, self._piece = tokenizer.encode, piece
        self.rough_cuts = 0

    def encode(self, text: str) -> Iterator[np.ndarray]:
        """The document's ids, piece by piece, without bos and eos."""
        begin, before = 0, np.empty(0)  # the tokens of the context before the piece
        while len(text) > begin + self._piece:
            cut, before_cut = self._find_cut(text, begin + self._piece)
            yield self._tokens(text, begin, cut, before)
            begin, before = cut, before_cut
        yield self._tokens(text, begin, len(text), before)

    def _tokens(self, text: str, begin: int, end: int, before: np.ndarray) -> np.ndarray:
        """The ids of text[begin:end], tokenized with the context before it."""
        ids = self._encode(text[max(0, begin - CONTEXT) : end])
        if np.array_equal(ids[: len(before)], before):
            return ids[len(before) :]
        self.rough_cuts += 1
        return self._encode(text[begin:end])

    def _find_cut(self, text: str, limit: int) -> tuple[int, np.ndarray]:
        """(where to cut, ids of the context before it): at `limit` or a little before."""
        starts = WORD_OR_LINE.finditer(text, limit - min(WINDOW, self._piece // 2), limit)
        words = [start.start() for start in starts][: -TRIES - 1 : -1]
        for cut in [*words, *range(limit, limit - TRIES, -1)]:
            left = self._encode(text[cut - CONTEXT : cut])
            both = self._encode(text[cut - CONTEXT : cut + CONTEXT])
            if np.array_equal(both[: len(left)], left):
                self.rough_cuts += cut not in words
                return cut, left
        self.rough_cuts += 1
        return limit, self._encode(text[limit - CONTEXT : limit])
