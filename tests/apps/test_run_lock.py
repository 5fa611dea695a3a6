"""One run a folder: another one is refused, and one that was stopped for long ends."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

from tests.apps.runs import Runs, train_here
from tests.apps.test_resume import start
from tests.apps.test_stopping import ENDLESS, n_lines, text_of, wait_for
from tests.locks import ELSEWHERE, lose
from tests.programs import python


def test_a_run_has_its_folders_alone_and_ends_when_it_loses_them(
    runs: Runs, tmp_path: Path
) -> None:
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    where = {"data.root_dir": runs.text, "dump_dir": run, "checkpoint.dump.every": 1}
    job = start(1, python(), **where, **ENDLESS)
    try:
        wait_for(lambda: n_lines(run) >= 3, job)
        pid = int(text_of(run / "run.lock").split()[1])
        for stopped in (False, True):
            if stopped:
                os.kill(pid, signal.SIGSTOP)
            before = text_of(run / "config.yaml"), n_lines(run)
            for folder, lock in (
                ({"dump_dir": run}, run),
                ({"dump_dir": run, "checkpoint.path": tmp_path / "other"}, run),
                ({"dump_dir": tmp_path / "third", "checkpoint.path": checkpoints}, checkpoints),
            ):
                refused = runs.train((1, 1, 1), folder, refused=True)
                held = f"{lock / 'run.lock'} is held by process {pid} on "
                assert refused.error.startswith(held)
                assert refused.error.endswith(", which is running")
            assert text_of(run / "config.yaml") == before[0] and n_lines(run) >= before[1]
        assert n_lines(run) == before[1]  # it is stopped
        lose(run / "run.lock")  # as if it had been stopped for longer than a lock lives
        published = sorted(checkpoints.glob("?" * 10))
        os.kill(pid, signal.SIGCONT)
        said, _ = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 2, said
    assert f"error: {run / 'run.lock'} is held by process 5 on node-2 now, since " in said
    assert "Traceback" not in said and "stopped by" not in said
    assert n_lines(run) == before[1] and sorted(checkpoints.glob("?" * 10)) == published
    assert text_of(run / "run.lock") == ELSEWHERE and not (checkpoints / "run.lock").exists()


def terminated_while_it_waits_here(overrides: dict[str, Any]) -> dict[str, Any]:
    log = Path(overrides["dump_dir"]) / "train.log"

    def terminate() -> None:
        while "is held by process 5 on node-2: waiting up to 60 s" not in text_of(log):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    if os.environ["RANK"] == "0":
        threading.Thread(target=terminate, daemon=True).start()
    return train_here(overrides)


def test_a_run_that_waits_for_a_lock_can_be_stopped(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text(ELSEWHERE)
    config = runs.config((1, 2, 1), {"dump_dir": tmp_path})
    for seen in runs.ranks.run(2, terminated_while_it_waits_here, config):
        assert seen["error"] is None
    log = text_of(tmp_path / "train.log")
    assert "stopped by SIGTERM while another run had its folder. The same command" in log
    assert not (tmp_path / "config.yaml").exists()
