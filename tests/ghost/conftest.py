"""A CUDA build of torch on the stub driver, for tests that are skipped without it.

tests/ghost/setup.sh DIR && GHOST_DIR=DIR pytest tests/ghost
"""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Ghost = Callable[..., str]


@pytest.fixture
def ghost() -> Ghost:
    """Runs a command on the stub driver, in the root of the repository; returns its output."""
    folder = os.environ.get("GHOST_DIR")
    if not folder:
        pytest.skip("GHOST_DIR does not name the folder that tests/ghost/setup.sh made")

    def run(*command: str, **variables: str) -> str:
        done = subprocess.run(
            [ROOT / "tests/ghost/run", folder, *command],
            cwd=ROOT,
            env=os.environ | variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done.stdout

    return run
