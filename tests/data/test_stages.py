"""Weights that change on the way: every source goes on where it was, at any position at once."""

import time
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from lingua.data.args import DataArgs, Stage
from lingua.data.stream import Mixture, RowStream, Stages
from tests.data.sources import make_source

pytestmark = pytest.mark.quick

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


@pytest.mark.parametrize("weights", [{"a": 0.7, "b": 0.2, "c": 0.1}, {"a": 1e-6, "b": 1e6, "d": 1}])
def test_quotas_are_kept_within_every_stage(weights):
    plan = [(0, {"a": 1.0, "b": 2.0}), (777, weights), (10**15 + 1, {"a": 1.0, "c": 1.0})]
    stages = Stages(plan)
    total = sum(Fraction(w) for w in weights.values())
    block = Mixture(weights).block
    at_start = stages.counts(777)
    for b in (1, 2, 5, (10**15 - 777) // block):
        n = b * block
        counts = np.subtract(stages.counts(777 + n), at_start)
        assert counts.sum() == n
        for name, count in zip(stages.names, counts.tolist(), strict=True):
            assert abs(count - n * Fraction(weights.get(name, 0)) / total) < 1


def test_a_thousand_stages_and_position_1e15_cost_about_what_position_0_costs():
    weights = [{"a": 0.7, "b": 0.3}, {"b": 0.5, "c": 0.5}]
    stages = Stages([(i * 10**12, weights[i % 2]) for i in range(1000)])

    def seconds(start: int) -> float:
        times = []
        for i in range(20):
            begin = time.perf_counter()
            stages.locate(np.arange(start + i * 512, start + i * 512 + 512))
            stages.counts(start + i * 512)
            times.append(time.perf_counter() - begin)
        return min(times)

    assert seconds(10**15) < 3 * seconds(0)
    index, given = stages.locate(np.arange(10**15 - 700, 10**15 + 700))
    counts = stages.counts(10**15 - 700)
    for s, g in zip(index.tolist(), given.tolist(), strict=True):
        assert g == counts[s]
        counts[s] += 1
    assert counts == stages.counts(10**15 + 700)


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


# ---- what the user says


def test_the_sources_of_all_stages_are_used():
    stages = [Stage(5, {"b": 1.0, "c": 0.0}), Stage(7, {"d": 1.0, "a": 1.0})]
    args = DataArgs(sources={"a": 1.0, "e": 0.0}, stages=stages)
    assert args.used_sources() == ["a", "b", "d"]
