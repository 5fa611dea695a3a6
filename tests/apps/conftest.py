"""Fixtures of the tests that run apps."""

import pytest

from tests.apps.runs import Runs, write_sources
from tests.ranks import Ranks


@pytest.fixture(scope="session")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    text = tmp_path_factory.mktemp("text")
    write_sources(text)
    return Runs(ranks, text, tmp_path_factory.mktemp("runs"))
