"""Benchmarks as jobs of a real Slurm: launched while a run trains, never waited for."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lingua.checkpoint.folder import find
from lingua.checkpoint.retention import marks
from lingua.monitor.evaluation import WAITING
from tests.apps.runs import SMALL, write_sources
from tests.apps.tasks import write_tasks
from tests.apps.test_eval import results_in
from tests.local_slurm import needs_slurm, slurm_here

pytestmark = needs_slurm


REPO = Path(__file__).parents[2]
WAIT_S = 180.0  # of a job, where others run too


def until(found: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not found():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.2)


@pytest.mark.soak
def test_a_run_launches_its_evaluations_and_logs_those_that_fail(tmp_path, tmp_path_factory):
    text, dump_dir = tmp_path / "text", tmp_path / "run"
    text.mkdir()
    write_sources(text)
    task_dir = write_tasks(tmp_path / "tasks", n=3)
    settings = SMALL | {"dump_dir": dump_dir, "data.root_dir": text, "steps": 6}
    settings |= {"checkpoint.dump.every": 6, "checkpoint.dump.keep": 1, "eval.every": 2}
    checkpoints = tmp_path / "elsewhere"
    settings |= {"checkpoint.path": checkpoints, "logging.wandb.mode": "offline"}
    settings |= {"eval.launcher": "slurm", "eval.tasks": "[reply]", "eval.task_dir": task_dir}

    def evaluation(step: int) -> Path:
        return dump_dir / "evals" / f"{step:010d}"

    def marked(step: int) -> list[str]:
        return marks(checkpoints / f"{step:010d}")

    with slurm_here(tmp_path_factory.mktemp("jobs") / "cluster", 1) as env:

        def train(stop_at: int, job: str) -> str:
            """The output of a process that is itself in a job; each of them ends well."""
            words = (settings | {"stop_at": stop_at, "eval.job": job}).items()
            command = [sys.executable, "-m", "apps.main.train", *(f"{k}={v}" for k, v in words)]
            place = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SLURM_MEM_PER_CPU": "1"}
            done = subprocess.run(
                command, cwd=REPO, env=env | place, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        def state(job_id: str) -> str:
            command = ["scontrol", "show", "job", "--oneliner", job_id]
            shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            return dict(w.split("=", 1) for w in shown.stdout.split() if "=" in w)["JobState"]

        # A job that fails: the task needs more room than it is given there.
        output = train(2, "{gpus: none, time: 5, context: 12}")
        [failed] = re.findall(r"step 2 is evaluated by a job: job (\d+) was submitted", output)
        until(lambda: state(failed) == "FAILED", "the first job to fail")
        assert marked(2) == [WAITING] and marked(4) == []

        # The next evaluation logs it; its own job completes.
        output = train(4, "{gpus: none, time: 5}")
        assert f"error: job {failed}, which evaluates 0000000002, is FAILED: error: " in output
        assert "must be below the context of 12 tokens" in output
        [good] = re.findall(r"step 4 is evaluated by a job: job (\d+) was submitted", output)
        until(lambda: state(good) == "COMPLETED", "the second job to end well")
        [line] = (dump_dir / "metrics.eval.jsonl").read_text().splitlines()
        assert (json.loads(line)["step"], json.loads(line)["task"]) == (4, "reply")
        assert results_in(evaluation(4))["config"]["num_fewshot"] is None
        assert len(list(evaluation(4).glob("wandb/offline-run-*/run-*.wandb"))) == 1
        assert marked(4) == [] and marked(2) == [WAITING]

        # One that cannot be launched.
        output = train(6, "{gpus: none, time: 5, partition: nowhere}")
        assert "error: step 6 is not evaluated: its job was not launched: error: " in output
        assert "nowhere" in output and "done: 6 steps" in output
        assert not list(evaluation(6).glob("results_*")) and WAITING not in marked(6)
        saved = sorted(c.step for c in find(checkpoints))
        assert saved == [2, 6]  # 4 is evaluated, 2 was never
