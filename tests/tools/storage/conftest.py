import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from lingua.tools.storage import fetch
from tests.object_store import ObjectStore


@pytest.fixture(scope="package")
def server() -> Iterator[ObjectStore]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line a request
    opened = ObjectStore()
    yield opened
    opened.close()


@pytest.fixture
def store(
    server: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ObjectStore]:
    """An empty store, which this process and those that it starts use, and their own cache."""
    monkeypatch.setattr(fetch, "PAUSES_S", (0.01, 0.02, 0.05))
    for name, value in {**server.environment, "LINGUA_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    server.reset()
    yield server
    server.go_on.set()
