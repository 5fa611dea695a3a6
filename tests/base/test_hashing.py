"""The hash against published SplitMix64 values and Python's unbounded integers; what the batch hash
sees, and what it must not see."""

import random

import pytest
import torch

from lingua.base.hashing import batch_hash, hash_bits, key_of
from lingua.data import IGNORE

pytestmark = pytest.mark.quick

MASK = 2**64 - 1


def unsigned(t: torch.Tensor) -> list[int]:
    return [x & MASK for x in t.flatten().tolist()]


def split_mix(key: int, index: int) -> int:
    z = (key + index * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_bits_are_those_of_the_published_split_mix_generator():
    """The first five numbers that its authors' C program gives for seed 1234567."""
    assert unsigned(hash_bits(1234567, torch.arange(1, 6))) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_bits_equal_unbounded_arithmetic_for_any_key_and_index():
    draw = random.Random(0)
    numbers = [0, 1, -1, 2**63 - 1, -(2**63), *(draw.randrange(-(2**63), 2**63) for _ in range(99))]
    keys = torch.tensor(numbers)
    for key in numbers[:10]:
        assert unsigned(hash_bits(key, keys)) == [split_mix(key, i) for i in numbers]
    assert unsigned(hash_bits(keys, torch.full_like(keys, 7))) == [split_mix(k, 7) for k in numbers]


def test_a_key_is_the_same_everywhere_and_tells_its_parts_apart():
    assert key_of(42, "layers.0.w", 1) == -8482660513357252342  # `b2sum -l 64`, little endian
    parts = [(1, 2), (12,), (1, 2, ""), (2, 1), ("1", 23), ("12", 3), (-1, 2)]
    assert len({key_of(*p) for p in parts}) == len(parts)
    assert all(-(2**63) <= key_of(i) < 2**63 for i in range(100))


def batch(rows: int = 5, seq: int = 7, views: int = 2):
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 300, (rows, seq), generator=draw)
    targets = torch.randint(0, 300, (views, rows, seq), generator=draw)
    targets[0, 1, 3] = IGNORE
    return torch.tensor([3, 1, 4, 15, 9][:rows]), tokens, targets


def test_the_batch_hash_is_the_sum_over_rows_of_a_hash_of_each():
    ids, tokens, targets = batch()
    total = 0
    for row, id_ in enumerate(ids.tolist()):
        values = tokens[row].tolist() + targets[0, row].tolist() + targets[1, row].tolist()
        words = sum(split_mix(split_mix(0, column), v) for column, v in enumerate(values))
        total += split_mix(words & MASK, id_)
    assert unsigned(batch_hash(ids, tokens, targets)) == [total & MASK]


def test_it_does_not_depend_on_the_order_or_split_of_the_rows_nor_on_padding():
    ids, tokens, targets = batch()
    whole = batch_hash(ids, tokens, targets)
    order = torch.tensor([4, 0, 3, 1, 2])
    assert torch.equal(batch_hash(ids[order], tokens[order], targets[:, order]), whole)
    parts = [batch_hash(ids[s], tokens[s], targets[:, s]) for s in (slice(2), slice(2, 5))]
    assert torch.equal(sum(parts), whole)
    padding = torch.tensor([-1, -1]), tokens[:2], torch.full_like(targets[:, :2], IGNORE)
    assert batch_hash(*padding).item() == 0
    padded = [torch.cat((ids, padding[0])), torch.cat((tokens, padding[1]))]
    assert torch.equal(batch_hash(*padded, torch.cat((targets, padding[2]), 1)), whole)


def plus_one(t: torch.Tensor, *place: int) -> torch.Tensor:
    changed = t.clone()
    changed[place] += 1
    return changed


def test_it_sees_every_change():
    ids, tokens, targets = batch()
    swap, ignored = torch.tensor([1, 0, 2, 3, 4]), targets.clone()
    ignored[0, 0, 5] = IGNORE
    columns = tokens.clone()
    columns[0, :2] = tokens[0, [1, 0]]
    again = torch.tensor([0, *range(5)])
    changes = {
        "token": (ids, plus_one(tokens, 2, 6), targets),
        "target": (ids, tokens, plus_one(targets, 0, 0, 0)),
        "target of the last view": (ids, tokens, plus_one(targets, 1, 4, 6)),
        "ignored target": (ids, tokens, ignored),
        "row id": (plus_one(ids, 0), tokens, targets),
        "ids exchanged": (ids[swap], tokens, targets),
        "tokens of two rows exchanged": (ids, tokens[swap], targets),
        "two tokens of a row exchanged": (ids, columns, targets),
        "views exchanged": (ids, tokens, targets[[1, 0]]),
        "row missing": (ids[1:], tokens[1:], targets[:, 1:]),
        "row twice": (ids[again], tokens[again], targets[:, again]),
        "shifted by one": (ids, tokens.roll(1, 0), targets.roll(1, 1)),
    }
    whole = batch_hash(ids, tokens, targets)
    for name, changed in changes.items():
        assert not torch.equal(batch_hash(*changed), whole), name
