"""Counter-based hashing in tensor arithmetic: bits that depend on a key and an index alone.

Initial weights, dropout masks, sampled tokens and the batch hash, which shows that two runs used
the same rows, are built on it: the same on every device, for any split of the work.
"""

import hashlib

import torch
from torch import Tensor


def key_of(*parts: object) -> int:
    """A 64-bit signed key of the parts, for `hash_bits`: equal on every machine."""
    text = "\0".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def hash_bits(key: int | Tensor, index: Tensor) -> Tensor:
    """64 pseudo-random bits for each counter in `index` (int64, any shape), as int64: the finaliser
    of SplitMix64 (Steele, Lea and Flood, 2014) over `key + index * golden ratio`, modulo 2^64."""

    def shift(x: Tensor, n: int) -> Tensor:  # a logical shift: int64 has only the arithmetic one
        return (x >> n) & ((1 << (64 - n)) - 1)

    x = index * -7046029254386353131 + key
    x = (x ^ shift(x, 30)) * -4658895280553007687
    x = (x ^ shift(x, 27)) * -7723592293110705685
    return x ^ shift(x, 31)


def batch_hash(row_ids: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
    """Sum over rows, modulo 2^64, of a hash of (row id, its tokens and targets).

    row_ids is int64 B, -1 for a padding row, which is left out; tokens is int64 B S, targets
    int64 V B S. The result, an int64 scalar on their device, can be summed over micro-steps and
    ranks.
    """
    values = torch.cat((tokens[None], targets)).transpose(0, 1).flatten(1)  # B (V+1)*S
    column = torch.arange(values.shape[1], device=values.device)
    words = hash_bits(hash_bits(0, column), values)
    rows = hash_bits(words.sum(1), row_ids)
    return torch.where(row_ids >= 0, rows, 0).sum()
