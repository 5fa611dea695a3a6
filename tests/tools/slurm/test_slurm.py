"""What needs no Slurm: environment variables, and the progress of a run. Jobs are tested in
test_stool.py."""

import numpy as np
import pytest

from lingua.monitor.metrics import append_line
from lingua.tools.runs.records import smooth
from lingua.tools.slurm.jobs import environment_of_another
from lingua.tools.slurm.status import status
from tests.locks import ELSEWHERE

pytestmark = pytest.mark.quick


def test_another_job_does_not_inherit_the_variables_of_this_one(monkeypatch):
    own = ("SLURM_JOB_ID", "SLURM_MEM_PER_CPU", "PMIX_RANK", "RANK", "LOCAL_WORLD_SIZE")
    own += ("MASTER_ADDR", "TORCHELASTIC_RUN_ID", "GROUP_RANK", "CUDA_VISIBLE_DEVICES")
    own += ("ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")
    kept = ("SLURM_CONF", "SBATCH_ACCOUNT", "HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
    for name in (*own, *kept):
        monkeypatch.setenv(name, "1")
    env = environment_of_another()
    assert not env.keys() & set(own) and env.keys() >= set(kept)


def test_status_shows_the_last_complete_line_about_a_step(tmp_path):
    (tmp_path / "base_config.yaml").write_text("steps: 10\nstop_at: 8\n")
    (tmp_path / "run.lock").write_text(ELSEWHERE)
    metrics = tmp_path / "metrics.jsonl"
    for step in (2, 4):
        append_line(metrics, {"step": step, "loss": 1 / step, "step_time_s": 0.5})
    append_line(metrics, {"step": 5, "event": "topology"})
    with metrics.open("a") as file:
        file.write('\n[]\n{"step": 6, "loss": 0.1')
    (tmp_path / "job_id").write_text("")
    [run] = status(tmp_path)
    row = run.row
    assert (row.state, row.step, row.steps, row.left_s) == ("running", 5, 8, 1.5)
    assert row.loss == smooth(np.array([0.5, 0.25]), np.array([2, 4]))[-1]
    assert not run.failed and run.state == "-"
