"""Forks as a stranger writes them: each is short, and a launcher validates it. That each trains, is
stopped, and resumes on another mesh is in tests/apps/test_matrix.py."""

from importlib import import_module

import pytest

from apps.main.check import check
from tests.apps.runs import SMALL, write_sources
from tests.mistakes import refused

FORKS = (
    "adafactor", "looped", "mingru", "moe", "modular", "optimizer", "probe", "soap", "synthetic"
)  # fmt: skip


@pytest.mark.parametrize("fork", FORKS)
def test_a_launcher_validates_a_fork(tmp_path, fork):
    write_sources(tmp_path)
    settings = SMALL | {"data.root_dir": tmp_path, "dump_dir": tmp_path / "run"}
    if import_module(f"tests.forks.{fork}").app.data is not None:  # its rows are no text
        settings |= {"data.sources": "{}"}
    argv = [f"app=tests.forks.{fork}", *(f"{key}={value}" for key, value in settings.items())]
    assert check(argv, 2)[0].app == f"tests.forks.{fork}"
    refused(lambda: check([*argv, "distributed.tp_size=3"], 3), "distributed.tp_size = 3")
