"""A rank that others wait for. The log names one that is stopped or killed, with its host and where
it was, and the others end with a code that launchers restart. One that is slow is in the metrics.
"""

import os
import random
import re
import signal
import socket
import subprocess
from pathlib import Path
from statistics import median

import pytest

from tests.apps.runs import SMALL, Runs, Twist
from tests.programs import python
from tests.ranks import free_port

PROGRAM = """
import os, pathlib, sys, threading, time
from apps.main.train import main
from lingua.parallel.program import run_program
folder, rank, number, delay_s, saving, *argv = sys.argv[1:]
def reached():
    if saving == "False":
        return True
    threads = [thread.ident for thread in threading.enumerate() if thread.name.startswith("save")]
    frames = sys._current_frames()
    return any(ident in frames and frames[ident].f_code.co_name != "_worker" for ident in threads)
def interrupt():
    file = pathlib.Path(folder, "metrics.jsonl")
    while not file.exists() or file.read_text().count('"loss"') < 3:
        time.sleep(0.01)
    time.sleep(float(delay_s))
    while not reached():
        time.sleep(0.0001)
    os.kill(os.getpid(), int(number))
if os.environ["RANK"] == rank:
    threading.Thread(target=interrupt, daemon=True).start()
run_program(lambda: main(argv))
"""
SETTINGS = SMALL | {"steps": 100_000, "stop_at": "null", "distributed.step_timeout_s": 3}
SETTINGS |= {"checkpoint.dump.every": 7, "validation.every": 5}


def interrupted(
    runs: Runs, folder: Path, n: int, rank: int, number: int, s: float, saving: bool = False
) -> list[str]:
    """What each of n ranks prints to stderr where one of them gets a signal, once all others have
    left with code 1."""
    values = SETTINGS | {"data.root_dir": runs.text, "dump_dir": folder}
    values |= {"checkpoint.async_save": saving}
    words = [str(word) for word in (folder, rank, number, s, saving)]
    words += [f"{k}={v}" for k, v in values.items()]
    return run_ranks(n, ["-c", PROGRAM, *words], folder, {}, rank)


def run_ranks(
    n: int, program: list[str], folder: Path, env: dict[str, str], stays: int = -1
) -> list[str]:
    """What each of n ranks without a launcher prints to stderr, once all but the rank that `stays`
    have left with code 1."""
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env |= {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n), "OMP_NUM_THREADS": "1"}
    files = [folder.with_suffix(f".{r}") for r in range(n)]
    processes = []
    try:
        for r, file in enumerate(files):
            place = os.environ | env | {"RANK": str(r), "LOCAL_RANK": str(r)}
            with file.open("w") as err:
                command = [*python(), *program]
                processes.append(subprocess.Popen(command, env=place, stdout=-3, stderr=err))
        for r, process in enumerate(processes):
            if r != stays:
                assert process.wait(180) == 1, files[r].read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [file.read_text() for file in files]


def check_named(told: list[str], rank: int) -> None:
    """One rank prints its traceback and names the silent one; each of the others prints a line."""
    others = [text for r, text in enumerate(told) if r != rank]
    if rank == 0:  # it has the store, for which a rank may wait without an error
        assert any("rank 0 on 127.0.0.1 is silent, or its torchrun" in text for text in others)
        return
    traced = [text for text in others if "Traceback (most recent call last)" in text]
    assert len(traced) == 1, told
    host = re.escape(socket.gethostname())
    named = rf"rank {rank} on {host} is silent for \d+ s: .*; last seen in step \d+, \w+, in "
    assert re.search(named, traced[0]), told
    assert len(re.findall(" is silent for ", traced[0])) == 1, told
    for text in others:
        if text is not traced[0]:
            lines = [line for line in text.splitlines() if line.startswith("error: ")]
            assert len(lines) == 1 and "Traceback" not in text, told
            assert re.match(rf"error: rank \d on {host}: lost its connection after", lines[0])


def test_a_rank_that_is_stopped_is_named(runs, tmp_path):
    check_named(interrupted(runs, tmp_path / "run", 3, 1, signal.SIGSTOP, 0.3), 1)


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_stopped_while_it_saves_is_named(runs, tmp_path, rank):
    """In the background: the wait for that has no error before distributed.timeout_s."""
    told = interrupted(runs, tmp_path / "run", 3, rank, signal.SIGSTOP, 0, saving=True)
    check_named(told, rank)


@pytest.mark.soak
@pytest.mark.parametrize("trial", [0, 2, 4, 5])  # each rank is stopped, one is killed
def test_a_rank_that_is_stopped_or_killed_at_random_is_named(runs, tmp_path, trial):
    chance = random.Random(trial)
    rank, number = chance.randrange(3), signal.SIGKILL if trial % 5 == 4 else signal.SIGSTOP
    check_named(interrupted(runs, tmp_path / "run", 3, rank, number, chance.uniform(0, 2)), rank)


def test_a_failure_prints_the_traceback_of_the_first_rank_and_a_line_of_the_others(runs, tmp_path):
    torchrun = [*python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    values = SMALL | {"data.root_dir": runs.text, "dump_dir": tmp_path / "run"}
    words = [f"{k}={v}" for k, v in values.items()]
    done = subprocess.run(
        [*torchrun, "--no-python", *python(), "-m", "tests.slurm_app", *words],
        env=os.environ | {"FAIL_RANK": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    before, report = done.stderr.split(" FAILED\n")
    assert re.findall(r"^\[rank(\d)\]: Traceback", before, re.M) == ["1"], before
    assert before.count("RuntimeError: this rank fails, as FAIL_RANK asks") == 1
    lost = rf"^error: rank (\d) on {re.escape(socket.gethostname())}: lost its connection after "
    assert set(re.findall(lost + "rank 1 failed$", before, re.M)) == {"0", "2"}, before
    cause = report.partition("Root Cause")[2]
    assert "rank      : 1" in cause and "RuntimeError: this rank fails" in cause


def test_where_rank_0_fails_whose_process_has_the_store_the_others_know_it(runs, tmp_path):
    values = SMALL | {"data.root_dir": runs.text, "dump_dir": tmp_path / "run"}
    words = [f"{k}={v}" for k, v in values.items()]
    program = ["-m", "tests.slurm_app", *words]
    first, *others = run_ranks(3, program, tmp_path / "run", {"FAIL_RANK": "0"})
    assert first.count("Traceback (most recent call last)") == 1
    assert "RuntimeError: this rank fails, as FAIL_RANK asks" in first and "error: " not in first
    for r, text in enumerate(others, 1):
        lines = [line for line in text.splitlines() if "error: " in line or "Traceback" in line]
        lost = f"error: rank {r} on {socket.gethostname()}: lost its connection after rank 0 failed"
        assert lines == [lost], text


LONG = {"data.workers": 0, "steps": 60, "stop_at": "null", "logging.freq": 10}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("rank", "work_s", "rows_s"),
    [(3, 0.05, 0.0), (2, 0.0, 0.05), (-1, 0.0, 0.0)],
)
def test_a_rank_that_is_slow_is_in_the_metrics_and_named_once(runs, rank, work_s, rows_s):
    """By CPU time, of one rank of a tp group, or by its wait for rows."""
    run = runs.train((1, 2, 2), LONG, twist=Twist(slow=(rank, work_s, rows_s)))
    lines = run.lines[1:]  # operators are compiled and threads started in the first steps
    longer_s = [line["host_time_s"] * (line["slowest_ratio"] - 1) for line in lines]
    named = re.findall(r"warning: rank (\d) on (\S+) has been slow for 50 steps", run.log)
    if rank < 0:
        assert median(line["slowest_ratio"] for line in lines) < 1.2 and not named
    else:
        assert {line["slowest_rank"] for line in lines} == {rank}
        assert 0.4 < median(longer_s) / (work_s + rows_s) < 2  # other work delays all ranks
        assert named == [(str(rank), socket.gethostname())]
