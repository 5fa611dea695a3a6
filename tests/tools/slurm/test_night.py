"""The batch scripts of docs/machines.md, as they are printed there, on a real Slurm: a run goes on
after one of its ranks was killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.apps.runs import SMALL, write_sources
from tests.local_slurm import needs_slurm, slurm_here
from tests.test_docs import ROOT, blocks

pytestmark = [needs_slurm, pytest.mark.soak]
SETTINGS = SMALL | {"steps": 100_000, "stop_at": "null", "checkpoint.dump.every": 5}


def process_of(folder: Path, place: str) -> int:
    """The process of the run in this folder that has this variable in its environment."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            variables = (process / "environ").read_bytes().split(b"\0")
            where = (process / "cwd").readlink()
        except OSError:  # it has ended
            continue
        ours = where == folder and b"apps.main.train" in words and place.encode() in variables
        if ours and b"torchrun" not in words[1]:
            return int(process.name)
    raise AssertionError(f"no process has {place}")


@pytest.mark.parametrize(
    ("name", "place", "restarts", "ranks"),
    [
        pytest.param("night.slurm", "SLURM_PROCID=1", "1", 2, id="night"),
        pytest.param("elastic.slurm", "RANK=1", "0", 2, id="elastic"),
        pytest.param("elastic.slurm", "RANK=1", "0", 1, id="elastic, with its torchrun"),
    ],
)
def test_a_run_goes_on_after_a_rank_was_killed(tmp_path_factory, name, place, restarts, ranks):
    """On `ranks` ranks then."""
    folder = tmp_path_factory.mktemp("night")
    [script] = [b.text for b in blocks(ROOT / "docs" / "machines.md") if b.info == name]
    (folder / name).write_text(script)
    (folder / "text").mkdir()
    write_sources(folder / "text")
    values = SETTINGS | {"data.root_dir": folder / "text"}
    lines = [f"{key}: {value}\n" for key, value in values.items() if key != "name"]
    (folder / "night.yaml").write_text("".join(lines))
    metrics = folder / "runs" / "night" / "metrics.jsonl"

    def steps() -> int:
        return metrics.read_text().count('"loss"') if metrics.exists() else 0

    def until(condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 180
        while not condition():
            assert time.monotonic() < end, f"{what}\n{log.read_text()[-5000:]}"
            time.sleep(0.2)

    with slurm_here(folder / "cluster", 2) as env:
        bin_folder = str(Path(sys.executable).parent)
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env |= {"PATH": f"{bin_folder}{os.pathsep}{env['PATH']}"}
        where = {"cwd": folder, "env": env, "capture_output": True, "text": True, "check": True}
        small = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--time=30"]
        job = subprocess.run(["sbatch", "--parsable", *small, name], **where).stdout.strip()
        log = folder / f"night_{job}.log"
        until(lambda: steps() >= 8, "it does not train")
        rank = process_of(folder, place)
        if ranks == 1:
            os.kill(int(Path(f"/proc/{rank}/stat").read_text().split()[3]), signal.SIGKILL)
        os.kill(rank, signal.SIGKILL)
        until(lambda: "resuming runs/night/checkpoints/" in log.read_text(), "it does not resume")
        resumed = steps()
        until(lambda: steps() > resumed, "it does not go on")
        shown = subprocess.run(["scontrol", "show", "job", "--oneliner", job], **where).stdout
        assert f" Restarts={restarts} " in shown and "JobState=RUNNING" in shown
        subprocess.run(["scancel", job], **where)
    assert f" on {ranks} x CPU (" in log.read_text().rpartition("resuming")[2]
    assert log.read_text().count("resuming runs/night/checkpoints/") == 1
    assert "rank 1 on " in log.read_text() and " is silent for " in log.read_text()
