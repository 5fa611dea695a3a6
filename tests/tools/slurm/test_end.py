"""The end of a job that needs no Slurm: what is queued again, and the command that is run then. On
a real Slurm: test_stool.py."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lingua.tools.slurm import end
from lingua.tools.slurm.end import end_job, report_end
from lingua.tools.slurm.job import JobArgs
from lingua.tools.slurm.launch import launch
from lingua.tools.slurm.status import errors_of
from tests.apps.runs import SMALL, write_sources
from tests.programs import OF_OTHERS, python
from tests.tools.slurm.test_launch import HOSTILE

RUNNING = "RUNNING 0 1 1 None"
ENVIRONMENT = """
import json, os, sys
about = {key.removeprefix("LINGUA_"): os.environ[key] for key in os.environ if "LINGUA_" in key}
with open(sys.argv[1], "a") as file:
    print(json.dumps([about, sys.argv[2:]]), file=file)
sys.exit(9)
"""


@pytest.fixture
def dump_dir(tmp_path: Path) -> Path:
    """Of a job 7, in which nothing has happened yet."""
    dump_dir = tmp_path / "run"
    (dump_dir / "logs" / "7").mkdir(parents=True)
    config = f"name: big\nsteps: 9\ncheckpoint: {{path: {tmp_path}/all}}\n"
    (dump_dir / "base_config.yaml").write_text(config)
    (tmp_path / "all").mkdir()
    return dump_dir


def test_failures_are_limited_in_a_row_without_a_new_checkpoint(dump_dir, tmp_path, capfd):
    def fails(limit: int = 2, code: int = 1, shown: str = RUNNING) -> bool:
        return end_job(code, limit, dump_dir, "7", shown) == "restarted"

    assert [fails() for _ in range(3)] == [True, True, False]
    shown = capfd.readouterr().err
    assert "job 7: failed, exit code 1, failure 3 without a new checkpoint (max" in shown
    (tmp_path / "all" / "0000000005.tmp-01234567").mkdir()  # which is none yet
    assert not fails()
    (tmp_path / "all" / "0000000005").mkdir()
    assert [fails(), fails(code=137), fails(code=143)] == [True, True, False]
    assert fails(limit=3, code=134) is False and fails(limit=9)
    (tmp_path / "all" / "0000000010").mkdir()
    assert not fails(limit=0)  # before the run
    assert not fails(shown="RUNNING 0 0 1 None") and not fails(shown="RUNNING 0 1 0 None")
    assert not fails(shown="")  # Slurm does not answer


def test_a_mistake_of_one_rank_is_seen_where_srun_has_the_exit_code_of_another(dump_dir, capfd):
    def how(lines: str) -> str:
        with (dump_dir / "logs" / "7.log").open("a") as log:
            log.write(lines)
        reason = end_job(143, 5, dump_dir, "7", RUNNING)
        with (dump_dir / "logs" / "7.log").open("a") as log:
            log.write(capfd.readouterr().err)
        return reason

    killed = (
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED ***\nsrun: error: n1: task 0: Killed\n"
    )
    assert how(killed) == "restarted"
    assert how(f"srun: error: n2: tasks 1,3: Exited with exit code 2\n{killed}") == "mistake"
    assert how(f"srun: error: n2: tasks 1,3: Exited with exit code 3\n{killed}") == "differs"
    assert how(killed) == "restarted"  # it was mended, and the job was queued again


@pytest.mark.parametrize(
    ("code", "shown", "restarts", "reason"),
    [
        (2, RUNNING, None, "mistake"),
        (3, RUNNING, None, "differs"),
        (0, RUNNING, None, "stopped"),  # before its last step
        (0, "COMPLETING 1 1 1 None", None, "requeued"),
        (143, "COMPLETING 3 1 1 None", "2", "requeued"),
        (143, "COMPLETING 2 1 1 None", "2", "cancelled"),
        (143, "COMPLETING 0 1 1 TimeLimit", None, "failed"),
    ],
)
def test_what_slurm_or_a_person_ends_and_a_mistake_is_not_queued_again(
    dump_dir, monkeypatch, code, shown, restarts, reason
):
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    if restarts is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    assert end_job(code, 5, dump_dir, "7", shown) == reason
    (dump_dir / "base_config.yaml").write_text("name: a job that trains nothing\n")
    assert end_job(0, 5, dump_dir, "7", RUNNING) == "finished"


def test_the_command_has_the_error_and_changes_nothing(dump_dir, tmp_path, monkeypatch, capfd):
    logs = dump_dir / "logs"
    (logs / "7" / "7_0_log.err").write_text("ConnectionError: lost rank 1\n")
    killed = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0."
    (logs / "7.log").write_text(f"{killed}\nsrun: error: n2: task 1: Exited with exit code 1\n")
    said = tmp_path / "said"
    (tmp_path / "tell.py").write_text(ENVIRONMENT)
    report_end([sys.executable, str(tmp_path / "tell.py"), str(said), HOSTILE], 137, dump_dir, "7")
    [about, words] = json.loads(said.read_text())
    assert words == [HOSTILE] and not list(tmp_path.rglob("pwned"))
    assert about == {
        "REASON": "failed", "EXIT_CODE": "137", "RUN": "big", "JOB_ID": "7",
        "DUMP_DIR": str(dump_dir), "ERROR": killed, "LOG": str(logs / "7.log"),
    }  # fmt: skip
    assert "exit status 9" in capfd.readouterr().err
    limit = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 23:26:02 DUE TO TIME LIMIT ***"
    lines = [limit, "ConnectionError: lost rank 1", "job 7: failed, exit code 143"]
    (logs / "7.log").write_text(f"{limit}\n{lines[-1]}\n")
    assert [line for line, _ in errors_of(dump_dir, "7")] == lines
    monkeypatch.setattr(end, "ON_STOP_S", 0.2)
    for command, problem in ((["sleep", "60"], "timed out"), (["no such command"], "No such file")):
        report_end(command, 0, dump_dir, "7")
        assert problem in capfd.readouterr().err


def test_the_script_of_a_job_queues_it_again_after_its_command(tmp_path, monkeypatch):
    """With programs in place of Slurm's."""
    monkeypatch.setattr(sys, "executable", *python(OF_OTHERS))
    write_sources(tmp_path)
    values = SMALL | {"data.root_dir": tmp_path, "dump_dir": tmp_path / "a run"}
    for name, lines in (
        ("srun", "exit $CODE"),
        ("squeue", f"echo {RUNNING}"),
        ("scontrol", f"echo scontrol $* >>{tmp_path}/said"),
        ("tell", f'echo "$LINGUA_REASON $*" >>{tmp_path}/said'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o700)
    job = JobArgs(launcher="print", max_restarts=1, on_stop=["tell", "'a  b'", "$HOME"])
    job.setup = ["export PYTHONPATH=/nowhere", "$SETUP"]
    script = launch(job, [f"{key}={value}" for key, value in values.items()])
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}

    def ends(code: int, setup: str = "true", as_code: int | None = None) -> list[str]:
        where: dict[str, Any] = {"env": env | {"CODE": str(code), "SETUP": setup}, "cwd": tmp_path}
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, **where)
        assert done.returncode == (as_code or code), done
        said = (tmp_path / "said").read_text().splitlines()
        (tmp_path / "said").unlink()
        return said

    assert ends(1, "false") == ["failed 'a  b' $HOME"]
    assert ends(134) == ["restarted 'a  b' $HOME", "scontrol requeue 7"]
    assert ends(2) == ["mistake 'a  b' $HOME"]
    assert ends(3) == ["differs 'a  b' $HOME"]
    assert ends(137) == ["failed 'a  b' $HOME"]
    log = tmp_path / "a run" / "logs" / "7.log"  # to which Slurm writes what srun prints
    log.write_text("srun: error: n2: task 1: Exited with exit code 2\n")
    assert ends(143, as_code=2) == ["mistake 'a  b' $HOME"]
    log.unlink()
    count = tmp_path / "a run" / "logs" / "7" / "failures.json"
    count.unlink()
    count.mkdir()  # what cannot be counted could go on without an end
    assert ends(1) == ["failed 'a  b' $HOME"]
