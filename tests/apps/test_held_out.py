"""The loss of sources without documents to hold out, and of files that are for validation alone."""

import random

from tests.apps.runs import prepare


def test_the_loss_of_one_long_document_and_of_validation_sources_is_measured(runs, tmp_path):
    words = random.Random(0).choices(["some ", "words\n", "of ", "a ", "book "], k=15_000)
    (tmp_path / "book.txt").write_text("".join(words))
    (tmp_path / "other.txt").write_text("".join(words[::-1][:100]))
    config = {
        "data.root_dir": tmp_path, "data.sources": "{book: 1}", "validation.sources": "[other]",
        "steps": 2, "stop_at": "null",
    }  # fmt: skip
    run = runs.train((1, 1, 1), prepare(config))
    measured = {line["source"]: line for line in run.held_out}
    assert set(measured) == {"book", "other"}
    assert 0 < measured["book"]["nats_per_byte"] < 8 and measured["book"]["step"] == 2
    assert 1000 < measured["book"]["bytes"] < 2000
    assert measured["other"]["bytes"] == len((tmp_path / "other.txt").read_bytes())
    assert "data.sources.book: 1 document, " in run.log and "held out the end of it" in run.log
