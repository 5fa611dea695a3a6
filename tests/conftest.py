"""Fixtures shared by the tests."""

import os
from collections.abc import Iterator

import pytest

from tests.ranks import Ranks

# Read when torch is imported. The tensors of tests are too small for several threads, which would
# take the cores from other processes while they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    group = Ranks()
    yield group
    group.close()
