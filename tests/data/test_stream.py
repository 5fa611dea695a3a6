"""The order of rows: a permutation per epoch, a mixture in exact integers, whose weights may change
on the way, any position at once."""

import time
from collections import Counter
from fractions import Fraction
from math import factorial

import numpy as np
import pytest

from lingua.data.args import DataArgs, Stage
from lingua.data.shards import Manifest, Shard, Source, Split
from lingua.data.stream import Mixture, RowStream, Stages, permute, round_keys
from tests.data.sources import make_source
from tests.mistakes import refused

pytestmark = pytest.mark.quick

BESIDE_POWERS_OF_TWO = [2**b + d for b in (2, 5, 10, 13) for d in (-1, 0, 1)]
FIRST_ORDER = [9, 8, 0, 7, 6, 4, 5, 1, 2, 3]
WEIGHTS = [
    {"one": 1.0},
    {"a": 1.0, "b": 1.0},
    {"a": 0.7, "b": 0.2, "c": 0.1},
    {"a": 3, "b": 5, "c": 11, "d": 1.5},
    {"a": 1e-6, "b": 1.0},
    {"a": 1e6, "b": 1.0, "c": 1e6},
    {"a": 0.001, "b": 0.999},
    {"tiny": 1e-6, "big": 1e6, "mid": 1.0},
    {f"s{i}": 1.0 + i for i in range(40)},
]


def order(n: int, seed: int = 42, source: str = "a", epoch: int = 0) -> np.ndarray:
    return permute(np.arange(n), n, round_keys(seed, source, epoch)[:, None])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 97, 7919, *BESIDE_POWERS_OF_TWO])
def test_every_row_comes_exactly_once_an_epoch(n):
    for epoch in range(5):
        assert np.array_equal(np.sort(order(n, epoch=epoch)), np.arange(n))


@pytest.mark.parametrize("n", [10**12, 2**40 + 1, 2**52 - 1, 2**33])
def test_a_huge_permutation_has_no_collisions_and_stays_in_range(n):
    k = np.unique(np.random.default_rng(0).integers(0, n, 200_000))
    rows = permute(k, n, round_keys(1, "a", 0)[:, None])
    assert rows.max() < n
    assert len(np.unique(rows)) == len(k)
    # Uniform over the range: 64 bins, chi-square with 63 degrees of freedom (99.99 %: 115).
    counts = np.bincount((rows.astype(np.float64) / n * 64).astype(int), minlength=64)
    assert ((counts - len(k) / 64) ** 2 / (len(k) / 64)).sum() < 115


def test_each_of_seed_source_and_epoch_gives_another_order():
    n = 1000
    orders = [order(n, seed, name, e) for seed in (1, 2, 3) for name in "ab" for e in (0, 1, 2)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).sum() < 20  # one place in common is expected, by chance


def test_the_order_of_a_seed_never_changes():
    """A fixed order is a promise to every run that will be resumed: these are its first rows."""
    assert order(10, seed=42, source="stdlib", epoch=0).tolist() == FIRST_ORDER


def test_neighbours_are_spread_like_independent_draws():
    n, bins = 2**16 - 3, 16
    for epoch in range(3):
        cells = order(n, epoch=epoch).astype(np.int64) * bins // n
        pairs = np.bincount(cells[:-1] * bins + cells[1:], minlength=bins**2)
        expected = (n - 1) / bins**2
        assert ((pairs - expected) ** 2 / expected).sum() < 350  # 255 degrees of freedom, 99.99 %


@pytest.mark.parametrize("n", [3, 4, 5])
def test_small_permutations_are_all_about_equally_likely(n):
    trials = 200 * factorial(n)
    keys = np.stack([round_keys(seed, "a", 0) for seed in range(trials)], axis=1)
    places = np.tile(np.arange(n), trials)
    orders = permute(places, n, keys.repeat(n, axis=1)).reshape(trials, n)
    _, seen = np.unique(orders, axis=0, return_counts=True)
    assert len(seen) == factorial(n)
    assert seen.min() > 100 and seen.max() < 320


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_counts_at_every_block_end_are_within_one_row_of_the_shares(weights):
    """Also in a stage that begins on the way."""
    stages = Stages([(0, {"a": 1.0, "b": 2.0}), (777, weights)])
    total, block = sum(Fraction(w) for w in weights.values()), Mixture(weights).block
    at_start = stages.counts(777)
    for b in [*range(1, 40), 10**6 + 7, 10**15 // block]:
        n = b * block
        counts = [c - s for c, s in zip(stages.counts(777 + n), at_start, strict=True)]
        assert sum(counts) == n
        for name, count in zip(stages.names, counts, strict=True):
            assert abs(count - n * Fraction(weights.get(name, 0)) / total) < 1


def check_counts(mixture: Mixture | Stages, start: int, n: int) -> None:
    """From `start` on they are those of counting one position after another."""
    index, given = mixture.locate(np.arange(start, start + n))
    counts = mixture.counts(start)
    for i, (s, g) in enumerate(zip(index.tolist(), given.tolist(), strict=True)):
        assert g == counts[s]
        counts[s] += 1
        if i % 97 == 0:
            assert mixture.counts(start + i + 1) == counts
    assert mixture.counts(start + n) == counts


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_counts_and_locate_agree_with_counting_one_position_after_another(weights):
    mixture = Mixture(weights)
    # From the start, across a block's end, and far out.
    for start in (0, max(mixture.block - 1500, 0), 7 * mixture.block - 20, 10**15):
        check_counts(mixture, start, 3000)


def test_a_source_is_spread_over_its_block():
    index, _ = Mixture({"a": 0.75, "b": 0.25}).locate(np.arange(1024))
    per_32 = (index == 1).reshape(-1, 32).sum(1)
    assert per_32.min() == per_32.max() == 8


@pytest.mark.parametrize("n_stages", [1, 1000])
def test_position_1e15_costs_about_what_position_0_costs(n_stages):
    weights = [{"a": 0.7, "b": 0.2, "d": 0.1}, {"b": 0.5, "c": 0.5}]
    stages = Stages([(i * 10**12, weights[i % 2]) for i in range(n_stages)])

    def seconds(start: int) -> float:
        times = []
        for i in range(20):
            begin = time.perf_counter()
            stages.locate(np.arange(start + i * 512, start + i * 512 + 512))
            stages.counts(start + i * 512)
            times.append(time.perf_counter() - begin)
        return min(times)

    assert seconds(10**15) < 3 * seconds(0)
    check_counts(stages, 10**15 - 10**12 - 700, 1400)


def test_the_order_of_the_config_does_not_matter_and_weight_zero_is_not_read():
    one, other = Mixture({"a": 1, "b": 2, "z": 0}), Mixture({"b": 2.0, "a": 1.0})
    for x, y in zip(one.locate(np.arange(5000)), other.locate(np.arange(5000)), strict=True):
        assert np.array_equal(x, y)
    middle = Mixture({"a": 1, "aa": 0, "b": 2}).locate(np.arange(5000))
    assert np.array_equal(np.minimum(middle[0], 1), other.locate(np.arange(5000))[0])
    assert Stages([(0, {"a": 1.0, "z": 0.0})]).names == ("a",)


PLANS = [
    [(0, {"a": 1.0, "b": 1.0}), (1, {"b": 1.0})],
    [(0, {"a": 0.7, "b": 0.3}), (1500, {"b": 0.9, "a": 0.1}), (4096, {"c": 1.0, "a": 3.0})],
    [(0, {"b": 1.0}), (333, {"a": 1.0}), (334, {"b": 1.0}), (2000, {"b": 1e-3, "c": 1, "a": 1})],
    [(0, {"a": 1.0}), (1024, {"a": 1.0}), (3000, {"z": 0.0, "a": 2.0})],
]


def one_after_another(plan: list[tuple[int, dict[str, float]]], n: int) -> list[tuple[str, int]]:
    """(source, rows it gave before) of the first n positions, walked: each stage is a mixture of
    its own, and a counter for each source runs through all of them."""
    given: Counter[str] = Counter()
    walked = []
    for (start, weights), (end, _) in zip(plan, [*plan[1:], (n, {})], strict=True):
        mixture = Mixture(weights)
        for source in mixture.locate(np.arange(end - start))[0].tolist():
            name = sorted(weights)[source]
            walked.append((name, given[name]))
            given[name] += 1
    return walked


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{len(plan)} stages")
def test_stages_equal_walking_through_them_row_by_row(plan):
    stages = Stages(plan)
    n = 6000
    expected = one_after_another(plan, n)
    index, given = stages.locate(np.arange(n))
    found = [(stages.names[s], g) for s, g in zip(index.tolist(), given.tolist(), strict=True)]
    assert found == expected
    # In any order, alone, and as counts.
    for p in [0, *(start + d for start, _ in plan[1:] for d in (-1, 0, 1)), n - 1]:
        (s,), (g,) = stages.locate(np.array([p]))
        assert (stages.names[s], g) == expected[p]
        before = Counter(name for name, _ in expected[:p])
        counts = dict(zip(stages.names, stages.counts(p), strict=True))
        assert counts == {name: before[name] for name in stages.names}
        assert stages.stage_of(p) == sum(start <= p for start, _ in plan) - 1


def test_the_sources_of_all_stages_are_used():
    stages = [Stage(5, {"b": 1.0, "c": 0.0}), Stage(7, {"d": 1.0, "a": 1.0})]
    args = DataArgs(sources={"a": 1.0, "e": 0.0}, stages=stages)
    assert args.used_sources() == ["a", "b", "d"]


@pytest.mark.parametrize("seq_len, n_views", [(8, 2), (5, 1), (7, 4), (1, 2)])
def test_rows_are_slices_of_the_concatenated_shards(tmp_path, seq_len, n_views):
    rng = np.random.default_rng(0)
    shards = [rng.integers(0, 60000, n).astype(np.uint16) for n in (53, 0, 3, 1, 0, 200, 2)]
    source = make_source(tmp_path, "a", shards)
    whole = np.concatenate(shards)
    n_rows = source.n_rows(seq_len, n_views)
    assert n_rows == (len(whole) - n_views + 1) // seq_len
    stream = RowStream({"a": source}, {"a": 1.0}, seq_len, n_views, seed=7)
    positions = np.arange(3 * n_rows)
    rows = stream.rows(positions)
    for epoch in range(3):
        permuted = order(n_rows, 7, "a", epoch).astype(int).tolist()
        for k, row in zip(permuted, rows[epoch * n_rows : (epoch + 1) * n_rows], strict=True):
            expected = whole[k * seq_len : k * seq_len + seq_len + n_views - 1]
            assert np.array_equal(row, expected)


def test_a_mixture_reads_each_source_in_its_own_order(tmp_path):
    sources = {
        name: make_source(tmp_path, name, [np.arange(n, dtype=np.uint32) + base])
        for name, n, base in (("a", 1001, 0), ("b", 401, 10**6))
    }
    stream = RowStream(sources, {"b": 0.25, "a": 0.75}, 10, 2, seed=1)
    rows = stream.rows(np.arange(2000))
    firsts = {"a": [], "b": []}
    for first in rows[:, 0].tolist():
        firsts["ab"[first >= 10**6]].append(first % 10**6 // 10)
    assert len(firsts["a"]) == 1500 and len(firsts["b"]) == 500
    for name, n in (("a", 100), ("b", 40)):
        expected = [k for e in range(15) for k in order(n, 1, name, e).astype(int).tolist()]
        assert firsts[name] == expected[: len(firsts[name])]


def test_no_row_of_an_epoch_is_repeated_or_left_out_where_the_stages_change(tmp_path):
    sources = {
        name: make_source(tmp_path, name, [np.arange(n * 4 + 1, dtype=np.uint32) + base])
        for name, n, base in (("a", 500, 0), ("b", 300, 10**6), ("new", 200, 2 * 10**6))
    }
    plan = [(150, {"b": 1.0, "new": 3.0}), (151, {"a": 1.0}), (400, {"a": 5.0, "b": 3.0})]
    stream = RowStream(sources, {"a": 0.9, "b": 0.1}, 4, 2, 7, plan)
    rows = stream.rows(np.arange(2000))[:, 0].tolist()
    for base, n in ((0, 500), (10**6, 300)):
        read = [row for row in rows if base <= row < base + 10**6]
        assert len(read) > 1.5 * n
        every = [base + 4 * k for k in range(n)]
        assert sorted(read[:n]) == every  # the first epoch, across every change
        assert len(set(read[n : 2 * n])) == len(
            read[n : 2 * n]
        )  # and the second, as far as it goes
    # The control: stages that forget what was given before do repeat rows.
    late = RowStream(sources, plan[0][1], 4, 2, 7).rows(np.arange(1, 400))[:, 0]
    assert set(late.tolist()) & set(rows[:150])


def test_any_position_of_a_sparse_corpus_of_ten_billion_tokens_is_there_at_once(tmp_path):
    shards = []
    for i in range(5):
        with open(tmp_path / f"{i}.train.tokens", "wb") as f:
            f.truncate(2 * 2 * 10**9)
        shards.append(Shard(str(i), 1, Split(2 * 10**9, 1, 1, ""), Split(0, 0, 0, "")))
    begin = time.perf_counter()
    source = Source(tmp_path, Manifest(2, "a", {}, True, True, "<u2", [], shards, {}, 0, ""))
    stream = RowStream({"a": source}, {"a": 1.0}, 2048, 2, seed=1)
    rows = stream.rows(np.arange(10**15, 10**15 + 32))
    assert time.perf_counter() - begin < 0.5
    assert rows.shape == (32, 2049) and not rows.any()


def test_a_source_too_small_for_one_row_says_what_it_has_and_needs(tmp_path):
    source = make_source(tmp_path, "tiny", [np.zeros(16, np.uint16)])
    assert source.n_rows(15, 2) == 1
    read = lambda: RowStream({"tiny": source}, {"tiny": 1.0}, 16, 2, seed=1)  # noqa: E731
    refused(read, "data.sources.tiny", "16", "17")
