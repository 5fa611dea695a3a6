"""The data measurement measures what it promises, on little data; not how long anything takes."""

import pytest

from apps.bench import data


@pytest.mark.soak
def test_every_measurement_has_its_reference(monkeypatch):
    small = {
        "TEXT_BYTES": 400_000,
        "TEXT_REPEATS": {"tiktoken": 1, "sentencepiece": 1, "bytes": 1},
        "TRAINED_ON": 200_000,
        "VOCABULARY": 700,
        "SHARED_PARTS": 4,
        "GATHERED_TOKENS": 2**21,
        "SPARSE_TOKENS": 10**8,
    }
    for name, value in small.items():
        monkeypatch.setattr(data, name, value)
    report = data.measure([], repeats=2)
    for name in ("tiktoken", "sentencepiece", "bytes", "two processes", "rows"):
        measured = report.results[name]
        assert measured.keys() == {"ours", "reference", "ratio", "cpu_ratio"}
        assert all(0 < s.low <= s.median <= s.high and s.n == 2 for s in measured.values())
        assert any(line.startswith(name) for line in report.lines)
    assert report.results["first batch, ms"].low > 0


def test_sides_that_did_not_do_the_same_are_not_compared():
    with pytest.raises(AssertionError):
        data.alternate(lambda: 1000, lambda: 1001, [0])
    with pytest.raises(AssertionError):
        data.alternate(lambda: 0, lambda: 0, [0])
