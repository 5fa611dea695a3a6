"""The folder of a run: no other run has it, and a run refuses one that it cannot use."""

import os
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from apps.main import app as main
from apps.main.train import Objective
from lingua.base import lock
from lingua.checkpoint.args import CheckpointArgs
from lingua.checkpoint.saver import Saver
from lingua.data.loader import MicroBatch
from lingua.monitor.metrics import append_line
from lingua.run.files import read_lines
from lingua.run.start import check_dump_dir
from tests.apps.runs import train_here
from tests.apps.test_resume import start
from tests.apps.test_saves import set_privileged
from tests.apps.test_stopping import ENDLESS, n_lines, text_of
from tests.locks import ELSEWHERE, lose
from tests.mistakes import refused
from tests.programs import python, state_of, wait_for


def test_a_run_has_its_folders_alone_and_ends_when_it_loses_them(runs, tmp_path):
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    where = {"data.root_dir": runs.text, "dump_dir": run, "checkpoint.dump.every": 1}
    job = start(1, python(), where | ENDLESS)
    try:
        wait_for(lambda: n_lines(run) >= 3, job)
        pid = int(text_of(run / "run.lock").split()[1])
        os.kill(pid, signal.SIGSTOP)  # stopped, it lives
        wait_for(lambda: state_of(pid) == "T", job)
        before = text_of(run / "config.yaml"), n_lines(run)
        for folder, held in (
            ({"dump_dir": run, "checkpoint.path": tmp_path / "other"}, run),
            ({"dump_dir": tmp_path / "third", "checkpoint.path": checkpoints}, checkpoints),
        ):
            error = runs.train((1, 1, 1), folder, refused=True).error
            assert error.startswith(f"{held / 'run.lock'} is held by process {pid} on ")
            assert error.endswith(", which is running")
        assert (text_of(run / "config.yaml"), n_lines(run)) == before
        lose(run / "run.lock")  # as if it had been stopped for longer than a lock lives
        published = sorted(checkpoints.glob("?" * 10))
        os.kill(pid, signal.SIGCONT)
        said, _ = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 2, said
    assert f"error: {run / 'run.lock'} is held by process 5 on node-2 now: it was" in said
    assert "; the same command continues once it is free\n" in said
    assert "Traceback" not in said and "stopped by" not in said
    assert n_lines(run) == before[1] and sorted(checkpoints.glob("?" * 10)) == published
    assert text_of(run / "run.lock") == ELSEWHERE and not (checkpoints / "run.lock").exists()


class LosesItsFolder(Objective):
    """In step 2, to a later start, which writes samples of its own."""

    def gradients(self, batch: list[MicroBatch], counts: Tensor) -> tuple[Tensor, Tensor]:
        if self.run.progress.step == 1:
            lose(self.run.args.folder / "run.lock")
            append_line(self.run.args.folder / "samples.jsonl", THEIRS)
        return super().gradients(batch, counts)


THEIRS = {"step": 9, "source": "a", "prompt": "b", "text": "c"}


def test_a_run_that_has_lost_its_folder_leaves_the_samples_of_the_later_one(runs, tmp_path):
    app = replace(main, objective=LosesItsFolder)
    settings = {"dump_dir": tmp_path / "run", "samples.every": 1, "stop_at": 3}
    run = runs.train((1, 1, 1), settings, app=app, refused=True)
    assert "is held by process 5 on node-2 now" in run.error
    steps = [line["step"] for line in read_lines(tmp_path / "run/samples.jsonl")]
    assert steps[-1] == 9 and set(steps) == {1, 9}


def test_both_folders_of_a_lost_run_are_free_after_one_life_of_a_lock(tmp_path, monkeypatch):
    """Which of several that wait for one lock gets it: tests/base/test_lock.py."""
    monkeypatch.setattr(lock, "LIFETIME_S", 1.0)
    for folder in (tmp_path, tmp_path / "checkpoints"):
        folder.mkdir(exist_ok=True)
        (folder / "run.lock").write_text(ELSEWHERE)
    begin = time.monotonic()
    with Saver(tmp_path / "checkpoints", CheckpointArgs()) as saver:
        saver.claim(tmp_path)
        assert saver.is_alone() and 1 <= time.monotonic() - begin < 1.9


def terminated_while_it_waits_here(overrides: dict[str, Any]) -> dict[str, Any]:
    log = Path(overrides["dump_dir"]) / "train.log"

    def terminate() -> None:
        while "is held by process 5 on node-2: waiting up to 60 s" not in text_of(log):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    if os.environ["RANK"] == "0":
        threading.Thread(target=terminate, daemon=True).start()
    return train_here(overrides)


def test_a_run_that_waits_for_a_lock_can_be_stopped(runs, tmp_path):
    (tmp_path / "run.lock").write_text(ELSEWHERE)
    config = runs.config((1, 2, 1), {"dump_dir": tmp_path})
    for seen in runs.ranks.run(2, terminated_while_it_waits_here, config):
        assert seen["error"] is None
    log = text_of(tmp_path / "train.log")
    assert "stopped by SIGTERM while another run had its folder. The same command" in log
    assert not (tmp_path / "config.yaml").exists()


def test_checkpoints_are_one_runs(runs, tmp_path):
    shared, first, second = (tmp_path / name for name in ("shared", "first", "second"))
    where = {"checkpoint.path": shared, "stop_at": 2}

    def refused(folder: Path, mark: Path) -> None:
        settings = where | {"checkpoint.path": folder}
        run = runs.train((1, 2, 1), settings, dump_dir=second, refused=True)
        assert run.error.startswith(f"{folder}: has checkpoints of another run, as {mark} shows; ")
        assert run.error.endswith(f"copy that file to {second}") and not run.lines

    runs.train((1, 1, 1), where, dump_dir=first)
    refused(shared, shared / "run.id")
    # The run itself goes on, also in a folder of another name.
    moved = first.rename(tmp_path / "moved")
    run = runs.train((1, 2, 1), where | {"stop_at": 3}, dump_dir=moved)
    assert run.column("step") == [1, 2, 3]
    # What an earlier version left has no mark, and gets one.
    for folder in (moved, shared):
        (folder / "run.id").unlink()
    run = runs.train((1, 1, 1), where | {"stop_at": 4}, dump_dir=moved)
    assert run.column("step") == [1, 2, 3, 4]
    refused(shared, shared / "run.id")
    plain = runs.train((1, 1, 1), {"stop_at": 2})  # whose checkpoints lie in its dump dir
    refused(plain.checkpoint(2).parent, plain.dump_dir / "run.id")
    # As the message says; and a folder without checkpoints is nobody's.
    shutil.copy(shared / "run.id", second)
    assert runs.train((1, 1, 1), where | {"stop_at": 5}, dump_dir=second).column("step") == [5]
    for path in shared.glob("0*"):
        shutil.rmtree(path)
    assert runs.train((1, 1, 1), where, dump_dir=tmp_path / "third").column("step") == [1, 2]


ODD = {
    "config.yaml": Path.mkdir,
    "train.log": os.mkfifo,
    "metrics.jsonl": Path.mkdir,
    "metrics.validation.jsonl": os.mkfifo,
    "samples.jsonl": lambda path: path.symlink_to("nowhere"),
    "checkpoints": Path.touch,
    "profiling": os.mkfifo,
}


def test_what_is_in_the_place_of_a_runs_files_is_named(runs, tmp_path):
    for name, make in ODD.items():
        folder = tmp_path / f"of {name}"
        folder.mkdir()
        make(folder / name)
        refused(lambda folder=folder: check_dump_dir(folder), f"{folder / name}: must be a f")
        assert [path.name for path in folder.iterdir()] == [name]
    (tmp_path / "a file").touch()
    for name in ("a file", "a file/run", "x" * 300):
        place = tmp_path / name
        refused(lambda place=place: check_dump_dir(place), f"dump_dir = {place}: cannot be used: ")
    run = runs.train((1, 2, 1), dump_dir=folder, refused=True)  # all ranks are told
    assert run.error.startswith(f"{folder / 'profiling'}: must be a f")
    # Also what may not be read.
    path = tmp_path / "private" / "metrics.jsonl"
    path.parent.mkdir()
    path.touch()
    check_dump_dir(path.parent)
    path.chmod(0o200)
    set_privileged(False)
    try:
        need = "must be a file that can be read and written"
        refused(lambda: check_dump_dir(path.parent), f"{path}: {need}")
    finally:
        set_privileged(True)


# The front door, for which modes of files matter also where it is started by root.
AS_OTHERS = """
from lingua.__main__ import run
from tests.apps.test_saves import set_privileged
set_privileged(False)
run()
"""


@pytest.mark.soak
def test_the_folder_of_another_user_is_read_where_that_is_allowed_and_named_where_not(tmp_path):
    samples = Path(__file__).parents[1] / "samples/0.1.0"
    run = shutil.copytree(samples / "run", tmp_path / "run")
    checkpoint = run / "checkpoints/0000000006"
    train = f"train config={samples}/config.yaml data.root_dir={samples}/text"

    def answer(words: str) -> tuple[int, list[str]]:
        command = [*python(), "-c", AS_OTHERS, *words.split()]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = done.stderr.splitlines()
        return done.returncode, [line for line in lines if not line.endswith("importing torch")]

    def refused(words: str, *named: object) -> None:
        code, lines = answer(words)
        assert code == 2 and len(lines) == 1 and lines[0].startswith("error: "), lines
        assert all(str(name) in lines[0] for name in named), lines

    run.chmod(0o555)
    checkpoint.parent.chmod(0o555)
    for words in (f"runs {run}", f"report {run} out={tmp_path}/a.html", f"checkpoint show {run}"):
        assert answer(words)[0] == 0, words
    assert answer(f"generate ckpt={run} prompt=a max_gen_tokens=2")[0] == 0
    refused(f"{train} dump_dir={run}", f"dump_dir = {run}: this user may not read and write in it")
    refused(f"{train} dump_dir={run}/below", f"{run}/below", "Permission denied")
    refused(f"checkpoint mark {checkpoint} good", f"{checkpoint}.good: Permission denied")
    refused(f"report {run} out={run}/a.html", f"{run}/a.html", "Permission denied")
    run.chmod(0)
    init = f"{train} dump_dir=below checkpoint.init_from="
    words = ("generate prompt=a ckpt=", "eval tasks=[a] ckpt=", f"{train} dump_dir=", init)
    for before in ("runs ", "report ", "audit ", "checkpoint show ", *words):
        refused(f"{before}{run}", run)
    run.chmod(0o755)
    checkpoint.parent.chmod(0o755)


def test_a_run_resumes_beside_garbled_files(runs, tmp_path):
    settings = {"stop_at": 2, "data.global_batch_size": "null"}
    config, metrics = tmp_path / "config.yaml", tmp_path / "metrics.jsonl"
    config.write_bytes(b"data: {global_batch_size: [\xff")
    run = runs.train((1, 1, 1), settings, dump_dir=tmp_path, refused=True)
    assert str(config) in run.error
    for rows in ("few", "-1", "[1]"):
        config.write_text(f"name: x\ndata:\n  global_batch_size: {rows}\n")
        run = runs.train((1, 1, 1), settings, dump_dir=tmp_path, refused=True)
        assert run.error.startswith("data.global_batch_size = ")
        assert f"({config})" in run.error
    config.write_text("name: of another version\n")
    runs.train((1, 1, 1), settings, dump_dir=tmp_path)
    with metrics.open("ab") as file:
        file.write(b'[1]\n5\n{"step": "x"}\n\0\0\xff\n' + b"[" * 100_000 + b"\n{}\n{")
    run = runs.train((1, 1, 1), settings | {"stop_at": 3}, dump_dir=tmp_path)
    assert [line["step"] for line in run.lines if line] == [1, 2, 3]
