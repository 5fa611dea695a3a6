"""The data measurement measures what it says, on little data; not how long anything takes."""

from apps.bench import data


def test_every_measurement_has_its_reference_and_both_did_the_same_work(monkeypatch):
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
    counted = []
    real = data.alternate

    def alternate(ours, reference, repeats, **options):
        counted.append((ours(), reference()))
        return real(ours, reference, repeats, **options)

    monkeypatch.setattr(data, "alternate", alternate)
    report = data.measure([], repeats=2)
    assert len(counted) == 4 and all(ours == reference > 0 for ours, reference in counted)
    for name in ("tiktoken", "sentencepiece", "bytes", "two processes", "rows"):
        measured = report.results[name]
        assert measured.keys() == {"ours", "reference", "ratio", "cpu_ratio"}
        assert all(0 < s.low <= s.median <= s.high and s.n == 2 for s in measured.values())
        assert any(line.startswith(name) for line in report.lines)
    assert report.results["first batch, ms"].low > 0
