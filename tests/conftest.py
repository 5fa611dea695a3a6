"""Fixtures shared by the tests."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.ranks import Ranks

# Read when torch is imported. The tensors of tests are too small for several threads, which would
# take the cores from other processes while they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# nohup and a script's background ignore signals, and so would the programs that tests start.
for number, handler in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)


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
