"""Fixtures shared by the tests."""

import os
import signal
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


@pytest.fixture
def bounded() -> Iterator[None]:
    """A wait in this process that does not end is a failure after a minute."""

    def fail(*_: object) -> None:
        raise TimeoutError("the test still waits after a minute")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
