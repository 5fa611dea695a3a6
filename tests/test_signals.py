"""Asking a process to stop: the first request is a flag, an impatient second one leaves."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lingua.signals import STOPPING, StopRequest

PROGRAM = """
import time
from lingua.signals import StopRequest
stop = StopRequest()
print("ready", flush=True)
seen = None
end = time.monotonic() + 30
while time.monotonic() < end:
    if stop.signal != seen:
        seen = stop.signal
        print(seen, flush=True)
    time.sleep(0.01)
"""


def test_the_first_signal_is_noted_and_a_second_interrupt_leaves_only_after_two_seconds() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR2)
        assert process.stdout.readline() == "SIGUSR2\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)  # the same press, passed on by a launcher
        process.send_signal(signal.SIGTERM)  # a scheduler may insist: the run is still saved
        time.sleep(2)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 128 + signal.SIGINT


def test_a_signal_in_the_seconds_of_importing_is_kept_for_the_program() -> None:
    become = "import sys; from lingua.signals import exec_program; exec_program(sys.argv[1:])"
    slow = "import time; print('importing', flush=True); time.sleep(1)" + PROGRAM
    with subprocess.Popen(
        [sys.executable, "-c", become, sys.executable, "-c", slow],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGUSR2)
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "SIGUSR2\n"]
        process.kill()


def test_the_handlers_of_before_come_back() -> None:
    before = [signal.getsignal(number) for number in STOPPING]
    stop = StopRequest()
    assert all(signal.getsignal(number) == stop._receive for number in STOPPING)
    stop.close()
    assert [signal.getsignal(number) for number in STOPPING] == before


def test_a_process_forked_by_a_library_ends_when_it_is_asked_to() -> None:
    """Pools of processes end their workers by SIGTERM, and wait for them."""
    stop = StopRequest()
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b"1")
        time.sleep(30)
        os._exit(0)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    stop.close()
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGTERM and stop.signal is None
