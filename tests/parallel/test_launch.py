"""The outermost frame of a program, in real ranks that meet at a store of rank 0's own, and signals
that stop it (what an interrupt and a later one do: tests/apps/test_stopping.py)."""

import errno
import io
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lingua.base.errors import UserError
from lingua.checkpoint.args import CheckpointArgs
from lingua.checkpoint.saver import Saver
from lingua.parallel import failure
from lingua.parallel.alone import one_process
from lingua.parallel.args import DistributedArgs
from lingua.parallel.heartbeat import LOOK_S, Heartbeat
from lingua.parallel.launch import Launch, detect_launch, start
from lingua.parallel.mesh import on_rank_0, world_sum_
from lingua.parallel.program import run_program
from lingua.parallel.rendezvous import watch
from lingua.parallel.signals import STOPPING, StopRequest
from lingua.parallel.torch_private import default_store
from tests.programs import python


def leave_here(case: str) -> tuple[int, str]:
    """The exit code of a program in this rank, and what it prints as an error."""

    def work() -> None:
        if case == "a mistake":
            raise UserError("steps = 0\x1b[31m: must be at least 1")

    def program() -> None:
        launch = detect_launch()
        start(torch.device("cpu"), launch, DistributedArgs())
        if case == "a mistake of one machine":
            if launch.rank == 1:
                raise UserError("no device here", local=True)
            return
        if case == "a name that is too long":
            Path("n" * 300).read_text()
        if case == "a file of another user" and launch.rank == 1:
            raise PermissionError(errno.EACCES, "Permission denied", "run/config.yaml")
        if case == "a file of another user":
            return
        if launch.rank == 1:
            time.sleep(0.5)  # rank 0 is at its end before this one asks what it found
        on_rank_0(work)

    with redirect_stderr(io.StringIO()) as told:
        try:
            run_program(program)
        except SystemExit as left:
            return left.code, told.getvalue()


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("nothing", (0, ""), (0, "")),
        ("a mistake", (2, "error: steps = 0\\x1b[31m: must be at least 1\n"), (2, "")),
        ("a name that is too long", (2, f"error: {'n' * 300}: File name too long\n"), (2, "")),
        ("a file of another user", (0, ""), (2, "error: run/config.yaml: Permission denied\n")),
        ("a mistake of one machine", (0, ""), (2, "error: no device here\n")),
    ],
)
def test_every_rank_leaves_with_its_code_and_one_tells_the_mistake(ranks, case, first, second):
    ranks.run(2, detect_launch)  # started before the clock is
    began = time.monotonic()
    assert ranks.run(2, leave_here, case) == [first, second]
    assert time.monotonic() - began < 25  # nobody waited in vain


def wait_for_late_ranks() -> list[str]:
    """What this rank logs while it waits in a collective, as a host does in one of NCCL: it raises
    no error. Rank 1 is stopped, rank 2 reads rows; rank 0 ends that once it has named two ranks."""
    args, heart = DistributedArgs(dp_shard=3), Heartbeat()
    mesh = start(torch.device("cpu"), detect_launch(), args, heart=heart)
    pids, logged = [0, 0, 0], []
    dist.all_gather_object(pids, os.getpid())
    heart.patience_s = 1 - LOOK_S
    rank, store = dist.get_rank(), default_store()

    class Log(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())
            if len(logged) == 2 and rank == 0:
                os.kill(pids[1], signal.SIGCONT)
                store.set("named", "")

    def read_rows() -> None:
        end = time.monotonic() + 60
        while not store.check(["named"]) and time.monotonic() < end:
            time.sleep(0.1)

    handler = Log()
    logging.getLogger("lingua").addHandler(handler)
    try:
        heart.at(7, "data")
        if rank == 2:
            read_rows()
        heart.at(7, "step")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(()), group=mesh.get_group("dp_shard"))
    finally:
        logging.getLogger("lingua").removeHandler(handler)
    return logged


def test_ranks_that_a_collective_waits_for_are_logged_while_it_waits(ranks):
    first, _, _ = ranks.run(3, wait_for_late_ranks)
    stopped, behind = first
    late, host = r"step 7, step, takes \d+ s: ", re.escape(socket.gethostname())
    assert re.fullmatch(rf"{late}rank 1 on {host} is silent for \d+ s: .*", stopped)
    where = r"step 7, data, in read_rows \(test_launch.py:\d+\)"
    assert re.fullmatch(rf"{late}rank 2 on {host} is behind: in {where}", behind)


def test_an_abort_prints_the_stacks_of_all_threads():
    """The watchdog of NCCL aborts a process whose collective timed out."""
    program = """
import os, threading
from lingua.parallel.program import run_program
def wait_for_rows(): threading.Event().wait()
def program():
    threading.Thread(target=wait_for_rows, daemon=True).start()
    os.abort()
run_program(program)
"""
    done = subprocess.run([*python(), "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in done.stderr
    assert "in wait_for_rows" in done.stderr and "in program" in done.stderr


def open_files_here(folder: Path) -> tuple[int, bool]:
    """Descriptors that a start opens, with what sends between hosts; whether all may be used."""

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    start(torch.device("cpu"), detect_launch(), DistributedArgs())
    with Saver(folder, CheckpointArgs(async_save=True)):
        world_sum_(torch.ones(3))
        dist.all_gather_object([None] * dist.get_world_size(), "a host")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return count() - before, soft == hard


def test_the_connections_of_a_rank_do_not_grow_with_the_ranks(ranks, tmp_path):
    """But for rank 0, to which each connects for the store. A mesh of each with each has 16 more
    with 8 ranks than with 4: two groups of the world."""
    _, *few = ranks.run(4, open_files_here, tmp_path)
    first, *many = ranks.run(8, open_files_here, tmp_path)
    assert all(raised for _, raised in [*few, first, *many])
    assert max(n for n, _ in many) <= min(n for n, _ in few) + 4
    assert max(n for n, _ in [*many, first]) <= 18 + 2 * (8 + 1)


def start_rank(**place: object) -> subprocess.Popen[str]:
    command = [*python(), "-m", "apps.main.train", "config=apps/main/configs/debug.yaml"]
    command += ["distributed.rendezvous_s=1"]
    env = os.environ | {"WORLD_SIZE": "2"} | {key: str(value) for key, value in place.items()}
    return subprocess.Popen(command, env=env, stdout=-1, stderr=-1, text=True)


def test_a_limit_of_open_files_that_is_too_low_is_refused():
    program = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
import torch
from lingua.parallel.launch import DistributedArgs, detect_launch, start
from lingua.parallel.program import run_program
run_program(lambda: start(torch.device("cpu"), detect_launch(), DistributedArgs()))
"""
    env = os.environ | {"RANK": "1", "WORLD_SIZE": "64"}
    done = subprocess.run([*python(), "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    for part in ("open 300 files", "needs up to 320", "ulimit -Hn", "LimitNOFILE"):
        assert part in done.stderr


def test_ranks_that_cannot_meet_print_one_line_and_leave_with_2():
    here = {"MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("", 0)) as taken, socket.socket() as free:
        free.bind(("", 0))  # and does not listen
        ports = [s.getsockname()[1] for s in (taken, free)]
        started = {
            "another program uses this port; set MASTER_PORT to a free one": start_rank(
                RANK=0, MASTER_PORT=ports[0], **here
            ),
            "[Errno 111] Connection refused (distributed.rendezvous_s = 1)": start_rank(
                RANK=1, MASTER_PORT=ports[1], **here
            ),
        }
        for i, (reason, process) in enumerate(started.items()):
            out, error = process.communicate(timeout=60)
            place = f"MASTER_ADDR:MASTER_PORT = 127.0.0.1:{ports[i]}"
            line = f"error: rank {i} of 2 cannot meet the others at {place}: {reason}\n"
            first = "debug: training apps.main in runs/debug\n" if i == 0 else ""
            assert (process.returncode, out, error) == (2, first, line)


def test_a_torchrun_whose_restarts_would_not_meet_is_refused():
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": 3}
    process = start_rank(RANK=0, GROUP_WORLD_SIZE=2, **env)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2 and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("restarts", ["3", "0"])
def test_torchrun_does_not_wait_for_a_rank_that_still_starts(restarts):
    """It sends SIGTERM to start all again, with others. Without restarts a user has sent it."""
    program = """
import time
from lingua.parallel.signals import StopRequest
with StopRequest("stopping before the next step") as stop:
    print("starts", flush=True)
    time.sleep(3)
"""
    place = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": restarts}
    command, env = [*python(), "-c", program], os.environ | place
    with subprocess.Popen(command, env=env, stdout=-1, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "starts\n"
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code = process.wait(20)
    left_at_once = time.monotonic() - begin < 2
    assert (code, left_at_once) == ((143, True) if restarts == "3" else (0, False))


MISTAKEN = """
import os, time
from lingua.base.errors import UserError
from lingua.parallel.program import run_program
def program():
    while os.environ["RANK"] == "0" and not os.path.exists("rank 1 raises"):
        time.sleep(0.1)
    open("rank 1 raises", "w").close()
    time.sleep(1 - int(os.environ["RANK"]))  # rank 1 is first
    raise UserError("this is wrong")
run_program(program)
"""


def test_torchruns_report_does_not_hide_a_mistake(tmp_path):
    """The traceback of another error: tests/apps/test_late.py."""
    (tmp_path / "program.py").write_text(MISTAKEN)
    torchrun = [*python(), "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    done = subprocess.run(
        [*torchrun, *python(), tmp_path / "program.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
    )
    before, report = done.stderr.split(" FAILED\n")
    # The root cause is rank 1, which waited for rank 0 to print what both found.
    assert before.splitlines().count("error: this is wrong") == 1
    assert "traceback : error: this is wrong\n" in report.partition("Root Cause")[2]


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2"}
SLURM = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
SLURM |= {"SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "1"}


@pytest.mark.parametrize(
    ("env", "code"),
    [
        ({}, 128 + 15),
        (TORCHRUN, 128 + 15),
        (TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "0"}, 128 + 15),
        (TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "3"}, 0),
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, 128 + 15),  # of a launcher further out
        (SLURM, 0),
    ],
)
def test_a_stopped_run_exits_with_its_signal_unless_it_would_be_restarted(env, code):
    program = "from lingua.parallel.program import exit_stopped; exit_stopped('SIGTERM')"
    assert subprocess.run([*python(), "-c", program], env=env).returncode == code


IMPORTING = """
import time
print("importing", flush=True)
time.sleep(1)
from lingua.parallel.signals import StopRequest
stop = StopRequest()
while stop.signal is None:
    time.sleep(0.01)
print(stop.signal, flush=True)
"""


def test_a_signal_while_a_program_imports_is_delivered_once_it_handles_signals():
    hold = ["env", "--block-signal=USR2,TERM,INT,HUP"]  # as in a batch script of lingua stool
    with subprocess.Popen(
        [*hold, sys.executable, "-c", IMPORTING],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGUSR2)
        assert process.stdout.readline() == "SIGUSR2\n"
        process.kill()


MISTAKEN_TOO = """
from lingua.base.errors import UserError
from lingua.parallel.program import run_program
def program():
    print("raising", flush=True)
    raise UserError("this is wrong")
run_program(program)
"""


@pytest.mark.parametrize("hold", [[], ["env", "--block-signal=USR2,TERM,INT,HUP"]])
def test_a_rank_with_a_mistake_keeps_its_code_where_its_launcher_ends_it(hold):
    """The other one has printed it, and left. With srun the code of a killed rank would prevail."""
    rank_1 = os.environ | SLURM | {"SLURM_PROCID": "1"}
    command = [*hold, *python(), "-c", MISTAKEN_TOO]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=rank_1, **pipes) as process:
        assert process.stdout.readline() == "raising\n"
        time.sleep(0.3)  # now it waits
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=5)
    assert (process.returncode, error) == (2, "")


FAILING = """
import os
import signal
from lingua.parallel.program import run_program
from lingua.parallel.rendezvous import watch
from lingua.parallel.signals import StopRequest

def program():
    try:
        with StopRequest():
            raise ValueError("the cause")
    finally:
        os.kill(os.getpid(), signal.SIGTERM)

run_program(program)
"""


@pytest.mark.parametrize(("env", "code"), [({}, -15), (TORCHRUN, 1), (SLURM, 1)])
def test_a_signal_of_the_launcher_does_not_end_a_rank_that_has_failed_before_it_says_why(env, code):
    """Another rank failed with it, and its launcher ends all. A single process just ends."""
    command = [*python(), "-c", FAILING]
    done = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True)
    assert done.returncode == code
    assert ("ValueError: the cause" in done.stderr) == (code == 1)


@pytest.fixture
def process_restored(monkeypatch) -> Iterator[None]:
    """What a rank that fails sets for the rest of its process is set back."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("process_restored")
def test_a_rank_that_knows_who_failed_first_says_so_where_the_store_has_ended_since():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # of rank 0
    with one_process():
        heart = Heartbeat()
        watch(heart, dist.TCPStore("127.0.0.1", store.port), Launch(rank=1, world_size=2))
        store.set(failure.FIRST, "0")  # which does not wait for an answer
        heart.store.wait([failure.FIRST])
        assert heart.first_failure() == "0"
        del store
        line = failure.explain(heart, TimeoutError("a collective timed out"))
    assert line is not None and line.endswith("lost its connection after rank 0 failed")


BEAT = b'[1.5, 10, 11, "step", "step (train.py:1)", "node"]'


@pytest.mark.usefixtures("process_restored")
@pytest.mark.parametrize(
    "written",
    [b"x", b"null", b"[]", b"{}", b"\xff", b"[" * 10**5, b"[1, 2, 3, 4, 5, 6]", BEAT[:-10]]
    + [BEAT.replace(value, b"null") for value in (b"1.5", b"10", b"11", b'"node"')],
)
def test_a_heartbeat_that_is_none_does_not_hide_the_first_error(monkeypatch, written):
    monkeypatch.setattr(failure, "SILENT_S", 0.01)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with one_process():
        heart, printed = Heartbeat(), list[BaseException]()
        watch(heart, dist.TCPStore("127.0.0.1", store.port), Launch(rank=1, world_size=2))
        store.set(heart.keys[0], written)
        error = TimeoutError("a collective timed out")
        failure.report(heart, lambda *error: printed.append(error[1]), error)
        store.set(failure.FIRST, b"\xff")
        assert heart.first_failure() == "\ufffd"
    assert printed == [error]
    assert any("rank 0 on ? is silent: " in note for note in error.__notes__)
    assert str(failure.Beat.of_json(BEAT)) == "step 11, step, in step (train.py:1)"


def test_a_process_forked_by_a_library_ends_by_a_signal():
    """Process pools end their workers by SIGTERM and wait for them."""
    with StopRequest() as stop:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, b"1")
            time.sleep(30)
            os._exit(0)
        os.read(reader, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGTERM and stop.signal is None
