"""How a run is asked to stop, and what it answers: a terminal that is closed, Ctrl-C while a rank
is stuck, saves by the clock, a finished run that is given another config, and what is resumed."""

import fcntl
import itertools
import os
import shutil
import signal
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from apps.main import app
from apps.main.config import TrainArgs
from apps.main.transformer import build
from lingua.app import Built
from tests.apps.runs import Interrupt, opened, train_here
from tests.apps.test_resume import process_of_rank, start
from tests.programs import python, state_of, wait_for

ENDLESS = {"steps": 100_000, "stop_at": "null"}


def n_lines(dump_dir: Path) -> int:
    file = dump_dir / "metrics.jsonl"
    return file.read_text().count('"loss"') if file.exists() else 0


def text_of(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def test_a_run_whose_terminal_is_closed_saves(runs, tmp_path):
    run = tmp_path / "run"
    ours, terminal = os.openpty()
    job = start(
        1,
        python(),
        ENDLESS | {"data.root_dir": runs.text, "dump_dir": run},
        **dict.fromkeys(("stdin", "stdout", "stderr"), terminal),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(terminal)
    try:
        wait_for(lambda: n_lines(run) >= 2, job)
        os.close(ours)
        job.wait(60)
    finally:
        job.kill()
    assert job.returncode == 128 + signal.SIGHUP
    log = text_of(run / "train.log")
    step = n_lines(run)
    assert "SIGHUP: saving after the next step" in log
    assert f"stopped by SIGHUP after step {step}, which is saved" in log
    assert (run / "checkpoints" / f"{step:010d}").is_dir()


def train_without_hangups_here(overrides: dict[str, Any]) -> dict[str, Any]:
    """As nohup starts it."""
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        return train_here(overrides, Interrupt(signal.SIGHUP, forward=2, rank=None))
    finally:
        signal.signal(signal.SIGHUP, former)


def test_a_run_under_nohup_ignores_hangups(runs, tmp_path):
    config = runs.config((1, 1, 1), {"dump_dir": tmp_path, "stop_at": 4})
    runs.ranks.run(1, train_without_hangups_here, config)
    log = text_of(tmp_path / "train.log")
    assert "stopped after step 4, as stop_at asks" in log and "SIGHUP" not in log


def test_an_interrupt_is_acknowledged_in_a_collective_and_a_later_one_leaves(runs, tmp_path):
    where = {"data.root_dir": runs.text, "dump_dir": tmp_path / "run"}
    job = start(2, [sys.executable], where | ENDLESS)
    log = tmp_path / "run" / "train.log"
    try:
        wait_for(lambda: n_lines(tmp_path / "run") >= 2, job)
        first, stuck = (process_of_rank(tmp_path / "run", rank) for rank in (0, 1))
        os.kill(stuck, signal.SIGSTOP)
        time.sleep(0.5)  # rank 0 now waits for it in a collective
        n = n_lines(tmp_path / "run")
        os.kill(first, signal.SIGINT)
        note = "SIGINT: saving after the next step; press Ctrl-C again after 2 s to leave now"
        wait_for(lambda: note in text_of(log), job, seconds=1.0)
        os.kill(first, signal.SIGINT)  # the same press, which torchrun passes on
        time.sleep(2.1)
        os.kill(first, signal.SIGTERM)  # a scheduler asks too: the run may still be saved
        time.sleep(0.2)
        assert state_of(first) != "Z" and n_lines(tmp_path / "run") == n
        os.kill(first, signal.SIGINT)
        wait_for(lambda: state_of(first) == "Z", seconds=1.0)
        assert text_of(log).count(note) == 1
    finally:
        os.kill(stuck, signal.SIGKILL)
        job.communicate(timeout=60)
    assert job.returncode != 0 and not list((tmp_path / "run" / "checkpoints").glob("0*"))


class ClockAhead:
    """A builder of the model in whose n-th forward one rank's clock gains two hours."""

    def __init__(self, rank: int, forward: int) -> None:
        self.rank, self.forward = rank, forward

    def __call__(self, args: TrainArgs) -> Built:
        built, forwards = build(args), itertools.count(1)
        clock = time.monotonic

        def forward_pre(module: Any, inputs: Any) -> None:
            if len(inputs) > 1 and next(forwards) == self.forward:
                time.monotonic = lambda: clock() + 7200

        if int(os.environ["RANK"]) == self.rank:
            built.module.register_forward_pre_hook(forward_pre)
        return built


def train_with_clock_here(overrides: dict[str, Any], rank: int) -> dict[str, Any]:
    clock = time.monotonic
    try:
        return train_here(overrides, ClockAhead(rank, forward=3))
    finally:
        time.monotonic = clock


@pytest.mark.parametrize(
    ("rank", "minutes", "saved"),
    [(0, 60, [4, 6]), (0, "null", [6]), (0, 0, [6]), (1, 60, [6])],
    ids=["after an hour", "null", "off", "another rank's clock"],
)
def test_a_run_saves_after_minutes_by_the_clock_of_rank_0(runs, tmp_path, rank, minutes, saved):
    settings = {"stop_at": 6, "checkpoint.dump.every": 0, "data.batch_size": 4}
    settings |= {"dump_dir": tmp_path, "checkpoint.dump.every_minutes": minutes}
    config = runs.config((1, 2, 1), settings)
    for seen in runs.ranks.run(2, train_with_clock_here, config, rank):
        assert seen["error"] is None
    found = [int(path.name) for path in (tmp_path / "checkpoints").glob("0*")]
    assert sorted(found) == saved


def step_from_folders_here(overrides: dict[str, Any], folders: list[Path]) -> int:
    former = Path.cwd()
    os.chdir(folders[int(os.environ["RANK"])])
    try:
        with opened(app, overrides) as run:
            return run.progress.step
    finally:
        os.chdir(former)


def test_what_is_loaded_is_decided_by_rank_0(runs, tmp_path):
    """Another rank sees a newer checkpoint, as on a file system whose view is late."""
    folders = [tmp_path / "a", tmp_path / "b"]
    runs.train((1, 1, 1), {"stop_at": 2}, dump_dir=folders[0] / "run")
    shutil.copytree(*folders)
    runs.train((1, 1, 1), {"stop_at": 4}, dump_dir=folders[1] / "run")
    config = runs.config((2, 1, 1), {"dump_dir": "run"})
    assert runs.ranks.run(2, step_from_folders_here, config, folders) == [2, 2]
