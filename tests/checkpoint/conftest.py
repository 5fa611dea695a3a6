"""Fixtures of the tests of checkpoints."""

from pathlib import Path

import pytest

from tests.checkpoints import save_here
from tests.ranks import Ranks


@pytest.fixture(scope="session")
def saved(ranks: Ranks, tmp_path_factory) -> Path:
    """Steps 1 and 2, saved by two ranks. Tests copy it, or only read."""
    root = tmp_path_factory.mktemp("saved")
    ranks.run(2, save_here, root, [1, 2])
    return root
