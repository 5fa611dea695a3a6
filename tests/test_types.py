"""What the type checker is told to ignore."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]


def test_each_ignored_type_error_has_a_code_and_a_reason():
    files = [f for folder in ("lingua", "apps", "setup") for f in (ROOT / folder).rglob("*.py")]
    lines = [(file, line) for file in files for line in file.read_text().splitlines()]
    comment = re.compile(r"#\s*(type|mypy):\s*ignore")
    ignored = [(file, line) for file, line in lines if comment.search(line)]
    assert ignored
    for file, line in ignored:
        assert re.search(r"# type: ignore\[[\w-]+\]  # \w+", line), f"{file}: {line}"
