"""A source whose tokens lie in files of other tools (lingua.data.token_formats), read in place.

Held out is one document in HELD_OUT, by a hash of its number: which ones needs the index alone.
Where the ends of documents are not stored, as many equal blocks take their place, each from the
first document that begins in it, as eos shows, up to the first one of the next block.

Its fingerprint is that of the sizes of its files, of all ends of documents, and of a sample of its
tokens at fixed places.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import xxhash

from lingua.base.errors import UserError
from lingua.data.documents import DocumentMarks
from lingua.data.files import IO_THREADS
from lingua.data.rows import Documents
from lingua.data.shards import FORMAT_VERSION, SPLITS, Budget, Manifest, Shard, Source, Split
from lingua.data.stream import RowStream, mix
from lingua.data.token_formats import TokenFile
from lingua.tokenizer.interface import Tokenizer

HELD_OUT = 50
SAMPLES, SAMPLE_TOKENS = 16, 4096  # of each file: places, and tokens at each
MIN_BLOCK, MAX_BLOCK, FILE_BLOCKS = 1024, 2**16, 4096  # tokens of a block, blocks of a file
READ_TOKENS = 2**20  # tokens read at once
MAX_SEARCH = 2**20  # tokens in which the end of a document is looked for
DECODED = 10_000  # tokens that decoding is tried with

logger = logging.getLogger(__name__)


class TokenSource(Source):
    """A source of token files, read in place. What `documents_by_hash` numbers are tokens of all
    its files, one after another."""

    in_place = True

    def __init__(self, name: str, form: str, files: Sequence[TokenFile], tokenizer: Tokenizer):
        self.form, self.files, self._tokenizer = form, files, tokenizer
        sizes = np.array([file.n_tokens for file in files])
        self._file_ends = sizes.cumsum()
        self._file_begins = self._file_ends - sizes
        self.stores_documents = all(file.ends is not None for file in files)
        n_values = tokenizer.vocab_size
        special = {"vocab_size": n_values, "bos_id": None, "eos_id": None}
        # Wider types than uint32 are not for rows: those tokens are checked before they are cut.
        stored = files[0].dtype
        dtype = "<u4" if stored.itemsize > 4 else stored.str
        manifest = Manifest(FORMAT_VERSION, name, special, False, True, dtype)
        super().__init__(Path(), manifest)
        self._stored, self._names = stored, [file.part.full for file in files]
        self._stats = {f.part.full: (f.part.size, f.part.mtime_ns) for f in files}
        of_file = np.repeat(np.arange(len(files)), [len(file.pieces) for file in files])
        pieces = np.column_stack([of_file, np.concatenate([file.pieces for file in files])])
        pieces = pieces[pieces[:, 2] > 0]
        self._pieces, self._piece_ends = pieces, pieces[:, 2].cumsum()

        with ThreadPoolExecutor(IO_THREADS) as threads:
            samples = list(threads.map(self._sample, range(len(files))))
        eos = tokenizer.eos_id
        if eos is not None and any((sample == eos).any() for sample in samples):
            special["eos_id"] = eos
        self._block = [
            int(np.clip(file.n_tokens // FILE_BLOCKS, MIN_BLOCK, MAX_BLOCK)) for file in files
        ]
        units = [
            -(-file.n_tokens // block) if file.ends is None else len(file.ends)
            for file, block in zip(files, self._block, strict=True)
        ]
        self._units = np.concatenate([[0], np.cumsum(units)])
        self._held_out = self._choose()
        ranges = self._ranges(self._held_out)
        self._hold_out(ranges)
        manifest.shards = list(self._counts(ranges))
        self.n_tokens = manifest.total("train", "tokens")
        content = [special["eos_id"], *map(self._digest, files, samples)]
        self.fingerprint = hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
        manifest.fingerprint = self.fingerprint
        self._decodes: bool | None = None

    @property
    def eos_id(self) -> int | None:
        """The token that ends documents; None where a sample has none."""
        return self.manifest.tokenizer["eos_id"]

    # ---- which tokens are held out

    def _choose(self) -> np.ndarray:
        """The numbers of the documents or blocks that are held out: one at least of HELD_OUT."""
        files = (np.arange(begin, end) for begin, end in pairwise(self._units.tolist()))
        held_out = np.concatenate([part[_hashes(part) < 2**32 // HELD_OUT] for part in files])
        if not len(held_out) and self._units[-1] >= HELD_OUT:
            held_out = np.array([_hashes(np.arange(self._units[-1])).argmin()])
        return held_out

    def _ranges(self, numbers: np.ndarray) -> np.ndarray:
        """int64 [n, 2]: the first token of each document or block, and the one after its last."""
        ranges = np.empty((len(numbers), 2), np.int64)
        of_file = np.searchsorted(self._units, numbers, side="right") - 1
        for i in np.unique(of_file).tolist():
            where = np.flatnonzero(of_file == i)
            inside = numbers[where] - self._units[i]
            bounds = np.stack([inside, inside + 1], 1)  # first and last, as numbers of ends
            ends = self.files[i].ends
            if ends is None:
                ranges[where] = [[self._bound(i, n) for n in pair] for pair in bounds.tolist()]
            else:
                stops = np.where(bounds > 0, ends[np.maximum(bounds - 1, 0)], 0)
                ranges[where] = stops + self._file_begins[i]
        return ranges

    def _bound(self, i: int, block: int) -> int:
        """The token at which block `block` of file i begins."""
        begin, end = int(self._file_begins[i]), int(self._file_ends[i])
        at = begin + block * self._block[i]
        if at <= begin or at >= end or self.eos_id is None:
            return min(max(at, begin), end)
        for first in range(at, min(end, at + MAX_SEARCH), SAMPLE_TOKENS):
            tokens = self.tokens(first - 1, min(SAMPLE_TOKENS, end - first))
            if len(places := np.flatnonzero(tokens == self.eos_id)):
                return first + int(places[0])
        return at

    def _hold_out(self, ranges: np.ndarray) -> None:
        """Make all tokens but those of the ranges, which are in order, the ones to train on."""
        cuts = np.unique(np.concatenate([[0], self._piece_ends, ranges.reshape(-1)]))
        begins, sizes = cuts[:-1], np.diff(cuts)
        stops = np.maximum.accumulate(np.concatenate([[0], ranges[:, 1]]))
        kept = begins >= stops[np.searchsorted(ranges[:, 0], begins, side="right")]
        self._train_begins, self._sizes = begins[kept], sizes[kept]
        self._ends = self._sizes.cumsum()
        pieces, inside = self._locate(self._train_begins)
        self._firsts = self._pieces[pieces, 1] + inside
        self._files = [self._names[i] for i in self._pieces[pieces, 0].tolist()]

    def _locate(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(piece, tokens of it before) of each of `tokens` of all files."""
        pieces = np.searchsorted(self._piece_ends[:-1], tokens, side="right")
        return pieces, tokens - (self._piece_ends[pieces] - self._pieces[pieces, 2])

    def _counts(self, ranges: np.ndarray) -> Iterable[Shard]:
        """A shard for each file. Documents are counted where they are stored."""
        sizes, held = self._file_ends - self._file_begins, self._held_out
        of_file = np.searchsorted(self._units, held, side="right") - 1
        tokens = np.bincount(of_file, ranges[:, 1] - ranges[:, 0], len(sizes)).astype(np.int64)
        documents = np.bincount(of_file, minlength=len(sizes)) * self.stores_documents
        totals = np.diff(self._units) * self.stores_documents
        for i, name in enumerate(self._names):
            held_out = int(tokens[i]), int(documents[i])
            train = int(sizes[i]) - held_out[0], int(totals[i]) - held_out[1]
            yield Shard(name, 1, Split(*train, 0, ""), Split(*held_out, 0, ""))

    # ---- tokens

    def tokens(self, first: int, n: int) -> np.ndarray:
        """Tokens [n] from `first` on, of all files one after another. Raises UserError."""
        out, done = np.empty(n, self.dtype), 0
        (piece,), (skip,) = map(np.ndarray.tolist, self._locate(np.array([first])))
        while done < n:
            i, at, size = self._pieces[piece].tolist()
            size = min(n - done, size - skip)
            tokens = self._read(self._names[i], self._stored, at + skip, size)
            self._check(self._names[i], at + skip, tokens)
            self._check_unchanged(self._names[i])
            out[done : done + size] = tokens
            done, piece, skip = done + size, piece + 1, 0
        return out

    def read(self, starts: np.ndarray, out: np.ndarray, where: np.ndarray) -> None:
        super().read(starts, out, where)
        ends = starts + out.shape[1] - 1
        pieces = np.searchsorted(self._ends, np.concatenate([starts, ends]), side="right")
        for name in {self._files[i] for i in pieces.tolist()}:
            self._check_unchanged(name)
        rows = out if len(where) == len(out) else out[where]
        if rows.max(initial=0) >= self._tokenizer.vocab_size:
            for start in starts.tolist():
                for first, n in self._runs(start, out.shape[1]):
                    self.tokens(first, n)  # raises, with the place

    def check_file(self, i: int) -> None:
        """Read all tokens of a file. Raises UserError where one is outside the vocabulary."""
        begin, end = int(self._file_begins[i]), int(self._file_ends[i])
        for first in range(begin, end, READ_TOKENS):
            self.tokens(first, min(READ_TOKENS, end - first))

    def _read(self, name: str, dtype: np.dtype, begin: int, n: int) -> np.ndarray:
        tokens = super()._read(name, dtype, begin, n)
        if dtype != self.dtype:
            self._check(name, begin, tokens)
        return tokens

    def _check(self, name: str, begin: int, tokens: np.ndarray) -> None:
        """Raise UserError where one of the stored tokens, from item `begin` of its file on, is
        outside the vocabulary."""
        size = self._tokenizer.vocab_size
        if tokens.max(initial=0) >= size:
            i, bits = int(np.argmax(tokens >= size)), 8 * tokens.itemsize
            raise UserError(
                f"{name}: byte {(begin + i) * tokens.itemsize:,}: token {int(tokens[i]):,} is "
                f"outside the vocabulary of {size:,} of the tokenizer {self._tokenizer.name}: it "
                f"was made with another one, or its tokens are not of {bits} bits",
                local=True,
            )

    def _check_unchanged(self, name: str) -> None:
        """Raise UserError where a file, which was read now, is no longer the one that was found."""
        with suppress(OSError):
            info = os.fstat(self.file(name).fileno())
            if (info.st_size, info.st_mtime_ns) == self._stats[name]:
                return
        raise self._lost(name, "has changed since the run was prepared")

    def _lost(self, name: str, reason: str) -> UserError:
        reason = reason.replace("its manifest says", "when the run began")
        need = "token files must stay as they are while a run uses them; start again"
        return UserError(f"{name}: {reason}; {need}", local=True)

    def _sample(self, i: int) -> np.ndarray:
        """Tokens at fixed places of a file."""
        n, size = self.files[i].n_tokens, min(SAMPLE_TOKENS, self.files[i].n_tokens)
        places = np.unique(np.linspace(0, n - size, SAMPLES).astype(np.int64))
        return np.stack([self.tokens(int(self._file_begins[i]) + p, size) for p in places.tolist()])

    @staticmethod
    def _digest(file: TokenFile, sample: np.ndarray) -> tuple[int, str, str]:
        ends = np.empty(0) if file.ends is None else np.ascontiguousarray(file.ends, "<i8")
        arrays = ends, np.ascontiguousarray(sample, "<u4")
        of_ends, of_sample = (xxhash.xxh3_128_hexdigest(array.data) for array in arrays)
        return file.n_tokens, of_ends, of_sample

    # ---- documents

    def documents_by_hash(self, splits: Sequence[str], budget: Budget) -> np.ndarray:
        """As for shards, in the order of a hash of the documents' numbers. Their bytes are those of
        the decoded tokens; none where the tokenizer cannot decode, and `budget` is of tokens."""
        numbers = self._held_out if splits != SPLITS else np.arange(self._units[-1])
        order = np.argsort(_hashes(numbers), kind="stable")
        rows: list[tuple[int, ...]] = []
        n, unit, skip = (*budget, 0)[:3]
        column = ("tokens", "bytes").index(unit) + 3
        for number in numbers[order]:
            begin, end = self._ranges(np.array([number]))[0].tolist()
            for tokens in self._split(self.tokens(begin, end - begin)):
                if n <= 0:
                    return np.array(rows)
                content = self._text(tokens)
                text = np.uint64(xxhash.xxh3_64_intdigest(content or tokens.tobytes()))
                row = 0, 0, begin, len(tokens), len(content), int(text.astype(np.int64))
                begin += len(tokens)
                size = row[column] if content else len(tokens)
                if skip > 0:
                    skip -= size
                else:
                    rows.append(row)
                    n -= size
        return np.array(rows, np.int64).reshape(-1, 6)

    def _split(self, tokens: np.ndarray) -> list[np.ndarray]:
        """The documents of a block, or a stored one as it is."""
        if self.stores_documents or self.eos_id is None:
            return [tokens] if len(tokens) else []
        cuts = np.flatnonzero(tokens == self.eos_id) + 1
        return [part for part in np.split(tokens, cuts) if len(part)]

    def _text(self, tokens: np.ndarray) -> bytes:
        """The UTF-8 of a document; nothing where the tokenizer cannot decode."""
        if self._decodes is None:
            n = len(self._tokenizer.encode(self._tokenizer.decode(tokens[:DECODED])))
            special = {self._tokenizer.bos_id, self._tokenizer.eos_id}
            expected = sum(token not in special for token in tokens[:DECODED].tolist())
            self._decodes = abs(n - expected) <= 0.1 * expected + 1
            if not self._decodes:
                logger.info(
                    f"{self.name}: the tokenizer does not decode (a text of {expected:,} tokens "
                    f"comes back as {n:,}): its loss is measured in nats per token alone"
                )
        return self._tokenizer.decode(tokens).encode() if self._decodes else b""

    def document(self, split: str, shard: int, first: int, n: int) -> np.ndarray:
        return self.tokens(first, n)

    def text_of(self, documents: np.ndarray) -> tuple[int | None, str]:
        n_bytes, text = super().text_of(documents)
        return (n_bytes if self._decodes else None), text

    def window_documents(self, parts: list[np.ndarray], size: tuple[int, ...]) -> np.ndarray:
        """The document of its window, from 0, of each of the tokens of held-out windows, int64
        `size`; `parts` are the documents."""
        inputs = np.repeat(np.arange(len(parts)), [len(part) for part in parts])[:-1]
        index = np.pad(inputs, (0, size[0] * size[1] - len(inputs)), mode="edge").reshape(size)
        return index - index[:, :1]

    def row_documents(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Which document of its row each train token belongs to, counted from 0: int64 [n, length],
        of the rows that begin at `starts` [n]."""
        is_first = np.zeros((len(starts), length), np.int64)
        if not self.stores_documents:
            self.read(starts, rows := np.empty(is_first.shape, self.dtype), np.arange(len(starts)))
            return DocumentMarks(None, self.eos_id, False).index(rows)
        for row, start in zip(is_first, starts.tolist(), strict=True):
            at = 0
            for begin, n in self._runs(start, length):
                row[at] = at > 0  # each run but the first begins where a document does
                row[at + self.documents_at(begin, n)[1]] = 1
                at += n
        return is_first.cumsum(1)

    def _runs(self, start: int, n: int) -> Iterator[tuple[int, int]]:
        """(first of all tokens, tokens) of the runs that n train tokens from `start` on consist of:
        what is held out, or another file, is between them."""
        piece = int(np.searchsorted(self._ends, start, side="right"))
        skip = start - int(self._ends[piece] - self._sizes[piece])
        while n:
            size = min(n, int(self._sizes[piece]) - skip)
            yield int(self._train_begins[piece]) + skip, size
            n, piece, skip = n - size, piece + 1, 0

    def documents_at(self, first: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """(numbers [k + 1] of the stored documents of n tokens of a file, from `first` of all
        files on; which of these tokens begin the last k)."""
        i = int(np.searchsorted(self._file_ends, first, side="right"))
        ends, inside = self.files[i].ends, first - int(self._file_begins[i])
        assert ends is not None
        low, high = np.searchsorted(ends, inside, "right"), np.searchsorted(ends, inside + n)
        begins = np.unique(ends[low:high])
        places = np.concatenate([[inside], begins])
        return self._units[i] + np.searchsorted(ends, places, "right"), begins - inside

    def train_spans(self, start: int, n: int) -> Iterator[tuple[str, int, int, int | None]]:
        """(file, token of the file, tokens, number of the document where it is stored) of each
        document of n consecutive train tokens, in order."""
        for first, size in self._runs(start, n):
            i = int(np.searchsorted(self._file_ends, first, side="right"))
            numbers: list[int | None] = [None]
            begins: list[int] = []
            if self.stores_documents:
                numbers, begins = (a.tolist() for a in self.documents_at(first, size))
            first -= int(self._file_begins[i])
            for number, (begin, end) in zip(numbers, pairwise([0, *begins, size]), strict=True):
                yield self._names[i], first + begin, end - begin, number


_KEY = np.array(0x9E3779B97F4A7C15, np.uint64)


def _hashes(numbers: np.ndarray) -> np.ndarray:
    """32 bits each."""
    return mix(numbers.astype(np.uint64), _KEY) & np.uint64(2**32 - 1)


def documents_of(stream: RowStream, marks: DocumentMarks) -> Documents:
    """The documents of a stream with sources of token files; `marks` are those of the others."""

    def documents(positions: np.ndarray) -> np.ndarray:
        out = np.empty((len(positions), stream.seq_len + stream.n_views - 1), np.int64)
        index, row = stream.source_rows(positions)
        for s in np.unique(index).tolist():
            where = np.flatnonzero(index == s)
            source = stream.sources[stream.names[s]]
            if isinstance(source, TokenSource):
                out[where] = source.row_documents(row[where] * stream.seq_len, out.shape[1])
            else:
                out[where] = marks.index(stream.rows(positions[where]))
        return out

    return documents
