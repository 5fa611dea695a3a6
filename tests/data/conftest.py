from pathlib import Path

import pytest

from tests.data.prepared import TEXTS, write_jsonl


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of jsonl in subfolders, in an order that sorting must find."""
    write_jsonl(tmp_path / "a" / "b" / "2.jsonl", TEXTS[300:500])
    write_jsonl(tmp_path / "a" / "a.jsonl", TEXTS[:300])
    write_jsonl(tmp_path / "a" / "z.jsonl", TEXTS[500:], key="content")
    return tmp_path
