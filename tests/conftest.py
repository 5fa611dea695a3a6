"""Fixtures shared by the tests."""

import os
from collections.abc import Iterator

import pytest

from tests.ranks import Ranks

# Read when torch is imported. The tensors of tests are too small for several threads, which would
# take the cores from other processes while they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked soak run only where `-m` names them: `-m quick` is without those of a module."""
    if "soak" not in config.option.markexpr:
        soak = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if item not in soak]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    group = Ranks()
    yield group
    group.close()
