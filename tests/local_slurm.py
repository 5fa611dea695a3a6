"""A real Slurm of virtual nodes on this machine, for tests."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "setup" / "slurm_local.sh"

# In CI they run, and fail where Slurm is missing.
needs_slurm = pytest.mark.skipif(
    shutil.which("sbatch") is None and os.environ.get("CI") != "true",
    reason="Slurm is not installed (apt-get install slurm-wlm munge)",
)


@contextmanager
def slurm_here(folder: Path, nodes: int) -> Iterator[dict[str, str]]:
    """A cluster while the context lasts; gives the environment in which commands find it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
    start = [SCRIPT, "start", str(nodes), folder]
    started = subprocess.run(start, env=env, capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
    try:
        yield env | {"SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        subprocess.run([SCRIPT, "stop", folder], env=env, check=True, capture_output=True)
