"""The order of training rows, as a pure function of (seed, weights, position).

A position determines which source its row comes from and how many rows that source gave before
(`Mixture`, and `Stages` where the weights change during the run). A permutation keyed by (seed,
source, epoch) determines which row of the source that is (`permute`). None of them keeps state, so
every position costs the same.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import ceil, lcm

import numpy as np

from lingua.data.shards import Source

ROUNDS = 8
MIN_BLOCK = 1024
# Odd constants with well-spread bits (Stafford's "Mix13" variant of the murmur3 finaliser).
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class RowStream:
    """All rows of a run, a lingua.data.rows.Rows: position -> tokens.

    Args:
        sources: the prepared sources by name.
        weights: their shares of rows. A source of weight 0 is not read.
        stages: (from position, weights), in order, for weights that change during the run.
    """

    def __init__(
        self,
        sources: dict[str, Source],
        weights: dict[str, float],
        seq_len: int,
        n_views: int,
        seed: int,
        stages: Sequence[tuple[int, dict[str, float]]] = (),
    ):
        self.stages = Stages([(0, weights), *stages])
        self.names = self.stages.names
        self.seq_len, self.n_views, self.seed = seq_len, n_views, seed
        self.sources = {name: sources[name] for name in self.names}
        opened = self.sources.values()
        self._n_rows = np.array([s.n_rows(seq_len, n_views) for s in opened], np.int64)
        self._dtype = np.result_type(*(source.dtype for source in opened))

    def counts(self, position: int) -> dict[str, int]:
        """Returns how many rows each source gave before `position`."""
        return dict(zip(self.names, self.stages.counts(position), strict=True))

    def source_rows(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(index of the source in `names`, row of that source), int64 [n] each: what `rows` reads
        for `positions` [n]."""
        index, given = self.stages.locate(positions)
        n_rows = self._n_rows[index]
        epoch, k = np.divmod(given, n_rows)
        pairs, which = np.unique(np.stack([index, epoch]), axis=1, return_inverse=True)
        keys = [round_keys(self.seed, self.names[s], e) for s, e in pairs.T.tolist()]
        row = permute(k.astype(np.uint64), n_rows.astype(np.uint64), np.stack(keys, 1)[:, which])
        return index, row.astype(np.int64)

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """Tokens [n, seq_len + n_views - 1] of `positions` [n], in the shards' unsigned type."""
        out = np.empty((len(positions), self.seq_len + self.n_views - 1), self._dtype)
        if not len(positions):
            return out
        index, row = self.source_rows(positions)
        for s in np.unique(index).tolist():
            where = np.flatnonzero(index == s)
            self.sources[self.names[s]].read(row[where] * self.seq_len, out, where)
        return out

    def is_target(self, positions: np.ndarray) -> None:
        """Every token may be a target."""


class Stages:
    """A mixture for each part of a run, at O(sources + stages) for any position.

    `mixtures` are [(from position, weights)], in order, the first from 0. The first block of a
    mixture begins where the mixture does. Each source continues with the row after its last one:
    how many rows earlier stages took of it is computed exactly, without visiting them.
    """

    def __init__(self, mixtures: Sequence[tuple[int, dict[str, float]]]):
        self.names = tuple(sorted({name for _, weights in mixtures for name in shares(weights)}))
        self._starts = np.array([start for start, _ in mixtures], np.int64)
        self._mixtures = [
            Mixture({name: weights.get(name, 0) for name in self.names}) for _, weights in mixtures
        ]
        # The rows each source gave before each stage.
        self._before = [np.zeros(len(self.names), np.int64)]
        for mixture, length in zip(self._mixtures, np.diff(self._starts).tolist(), strict=False):
            self._before.append(self._before[-1] + mixture.counts(length))

    def stage_of(self, positions: np.ndarray) -> np.ndarray:
        """The number of the stage, from 0, of each of `positions` [n]: int64 [n]."""
        return np.searchsorted(self._starts, positions, side="right") - 1

    def counts(self, position: int) -> list[int]:
        """Returns how many rows each source, in the order of `names`, gave before `position`."""
        stage = int(self.stage_of(np.array(position)))
        inside = int(position - self._starts[stage])
        return (self._before[stage] + self._mixtures[stage].counts(inside)).tolist()

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(index in `names`, rows that source gave before), int64 [n] each, of `positions` [n]."""
        positions = np.asarray(positions, np.int64)
        index, given = np.empty_like(positions), np.empty_like(positions)
        stage_of = self.stage_of(positions)
        for stage in np.unique(stage_of).tolist():
            where = np.flatnonzero(stage_of == stage)
            inside = positions[where] - self._starts[stage]
            index[where], given_inside = self._mixtures[stage].locate(inside)
            given[where] = self._before[stage][index[where]] + given_inside
        return index, given


class Mixture:
    """Assigns positions to sources, in exact integers, at O(sources) for any position.

    With exact shares w_s (summing to 1) and their prefix sums F_s, the first N positions hold
    count_s(N) = floor(N F_s) - floor(N F_{s-1}) rows of source s whenever N is a multiple of the
    block length B. These telescope to N, and each is within one row of N w_s, being a difference
    of two floors. B >= 1/min(w) makes a block's quota q_s = count_s(N + B) - count_s(N) exceed
    B w_s - 2 >= -1, so it is never negative.

    Inside a block a chain of two-way splits spreads the quotas evenly: of the Q places that are
    left, source s takes place n if floor((n + 1) q_s / Q) steps over an integer, that is q_s of
    Q places, and c = floor(n q_s / Q) of those before n. The others are renumbered n - c and
    offered to the next source with Q - q_s places. So the rows a source gave before a place are
    its c, without visiting the places between.

    Sources are in the order of their names; one of weight 0 gives no row.
    """

    def __init__(self, weights: dict[str, float]):
        exact = shares(weights)
        self._total = lcm(*(share.denominator for share in exact.values()))
        parts = [int(exact.get(name, Fraction()) * self._total) for name in sorted(weights)]
        self._prefix = np.array([0, *accumulate(parts)], object)  # Python integers, unbounded
        self.block = max(MIN_BLOCK, ceil(1 / min(exact.values())))
        self._block_start = functools.lru_cache(maxsize=64)(self._quotas)

    def counts(self, position: int) -> list[int]:
        """Returns how many rows each source gave before `position`."""
        b, n = divmod(int(position), self.block)
        places, counts = self.block, []
        for offset, quota in zip(*self._block_start(b), strict=True):
            c = n * quota // places if places else 0
            counts.append(offset + c)
            n, places = n - c, places - quota
        return counts

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(index of the source, rows it gave before), int64 [n] each, of `positions` [n]."""
        positions = np.asarray(positions, np.int64)
        index, given = np.empty_like(positions), np.empty_like(positions)
        # n * quota < B^2 must fit; a block this long means a tiny share, and is rare.
        exact = positions if self.block < 2**31 else positions.astype(object)
        block_of = exact // self.block
        for b in np.unique(block_of).tolist():
            where, places = np.flatnonzero(block_of == b), self.block
            n = exact[where] - b * self.block
            for s, (offset, quota) in enumerate(zip(*self._block_start(b), strict=True)):
                c = n * quota // places
                taken = (n + 1) * quota // places > c
                index[where[taken]] = s
                given[where[taken]] = offset + c[taken]
                where, n, places = where[~taken], (n - c)[~taken], places - quota
                if not len(where):
                    break
        return index, given

    def _quotas(self, b: int) -> tuple[list[int], list[int]]:
        """(rows each source gave before block b, rows it gives inside the block)."""
        ends = (b * self.block, (b + 1) * self.block)
        begin, end = (np.diff(n * self._prefix // self._total) for n in ends)
        return begin.tolist(), (end - begin).tolist()


def shares(weights: dict[str, float]) -> dict[str, Fraction]:
    """The exact share of rows of each source with a weight above 0: what a mixture depends on."""
    exact = {name: Fraction(weights[name]) for name in sorted(weights) if weights[name] > 0}
    total = sum(exact.values())
    return {name: weight / total for name, weight in exact.items()}


@functools.lru_cache(maxsize=4096)
def round_keys(seed: int, source: str, epoch: int) -> np.ndarray:
    """The uint64 [ROUNDS] keys of one source's order in one epoch.

    A hash of all three, so that no two (seed, epoch) pairs share an order, as seed + epoch would.
    """
    message = json.dumps([seed, source, epoch]).encode()
    digest = hashlib.blake2b(message, digest_size=8 * ROUNDS, person=b"lingua rows").digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def permute(k: np.ndarray, size: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Element k of a keyed pseudo-random permutation of range(size): uint64 [n] -> uint64 [n].

    `size` is [n] or a scalar, `keys` [ROUNDS, n] or [ROUNDS, 1]. A Feistel network permutes the
    smallest power of two >= size. Its halves take turns and may differ by a bit: each round xors
    one half with a keyed hash of the other, which is its own inverse, hence a bijection. A result
    beyond `size` is permuted again until it falls inside (cycle walking, under two rounds each
    on average), which keeps it a bijection on range(size).
    """
    k = np.asarray(k, np.uint64)
    size = np.broadcast_to(np.asarray(size, np.uint64), k.shape)
    keys = np.broadcast_to(keys, (ROUNDS, len(k)))
    bits = np.frexp((size - 1).astype(np.float64))[1].astype(np.uint64)
    out = _feistel(k, bits, keys)
    outside = np.flatnonzero(out >= size)
    while len(outside):
        again = _feistel(out[outside], bits[outside], keys[:, outside])
        out[outside] = again
        outside = outside[again >= size[outside]]
    return out


def _feistel(x: np.ndarray, bits: np.ndarray, keys: np.ndarray) -> np.ndarray:
    low_bits = bits >> 1
    low_mask = (1 << low_bits) - 1
    high_mask = (1 << (bits - low_bits)) - 1
    low, high = x & low_mask, x >> low_bits
    for r in range(0, ROUNDS, 2):
        high ^= mix(low, keys[r]) & high_mask
        low ^= mix(high, keys[r + 1]) & low_mask
    return (high << low_bits) | low


def mix(x: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Hash of (x, key), uint64, of which the low 32 bits are good. `x` below 2^32."""
    h = x ^ key
    h *= _MIX_1
    h ^= h >> 32
    h *= _MIX_2
    h >>= 32
    return h
