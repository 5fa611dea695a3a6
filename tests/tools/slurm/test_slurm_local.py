"""setup/slurm_local.sh: Slurm on this machine, which leaves nothing behind."""

import os
import subprocess
import time
from pathlib import Path

from tests.local_slurm import SCRIPT, needs_slurm, slurm_here

pytestmark = needs_slurm


def processes_of(folder: Path) -> list[str]:
    """Command lines of all processes with the folder in their arguments or environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
            if str(folder).encode() in words + (process / "environ").read_bytes():
                found.append(words.decode().replace("\0", " "))
        except OSError:  # it has ended
            continue
    return found


def test_a_cluster_runs_jobs_on_its_nodes_and_stopping_it_leaves_nothing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("local") / "cluster"  # Slurm's paths must be short
    with slurm_here(folder, 2) as env:
        where = {"env": env, "capture_output": True, "text": True}
        srun = ["srun", "--nodes=2", "sh", "-c", 'echo "$SLURMD_NODENAME"']
        assert sorted(subprocess.run(srun, **where).stdout.split()) == ["n1", "n2"]
        again = subprocess.run([SCRIPT, "start", "1", folder], **where)
        assert again.returncode == 2 and f"{folder} exists" in again.stderr
        # A job that still runs, on a node whose daemon is dead, when the cluster is stopped.
        seconds = "1234.5"
        sbatch = ["sbatch", "--parsable", "--nodelist=n2", "--output=/dev/null"]
        subprocess.run([*sbatch, f"--wrap=sleep {seconds}"], env=env, check=True, text=True)
        while not any(f"sleep {seconds}" in words for words in processes_of(folder)):
            time.sleep(0.1)
        os.kill(int((folder / "slurmd.n2.pid").read_text()), 9)
    assert not folder.exists()
    assert processes_of(folder) == []


def test_a_folder_that_is_no_cluster_is_not_deleted(tmp_path):
    (tmp_path / "slurm.conf").write_text("ClusterName=serious\n")
    subprocess.run([SCRIPT, "stop", tmp_path], check=True, capture_output=True)
    assert (tmp_path / "slurm.conf").exists()
