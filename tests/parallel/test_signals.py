"""Asking a process to stop. What an interrupt and a later one do: tests/apps/test_stopping.py."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lingua.parallel.signals import STOPPING, StopRequest

PROGRAM = """
import time
from lingua.parallel.signals import STOPPING, StopRequest
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


def test_a_signal_while_a_program_imports_is_delivered_once_it_handles_signals():
    hold = ["env", "--block-signal=USR2,TERM,INT,HUP"]  # as in a batch script of lingua stool
    slow = "import time; print('importing', flush=True); time.sleep(1)" + PROGRAM
    with subprocess.Popen(
        [*hold, sys.executable, "-c", slow],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGUSR2)
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "SIGUSR2\n"]
        process.kill()


def test_close_restores_the_previous_handlers():
    before = [signal.getsignal(number) for number in STOPPING]
    stop = StopRequest()
    assert all(signal.getsignal(number) == stop._receive for number in STOPPING)
    stop.close()
    assert [signal.getsignal(number) for number in STOPPING] == before


def test_a_process_forked_by_a_library_ends_by_a_signal():
    """Process pools end their workers by SIGTERM and wait for them."""
    stop = StopRequest()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"1")
        time.sleep(30)
        os._exit(0)
    os.read(reader, 1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    stop.close()
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGTERM and stop.signal is None
