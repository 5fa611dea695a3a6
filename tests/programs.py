"""Starts the programs of this repository without the seconds that importing torch takes.

    subprocess.run([*python(), "-m", "apps.main.train", ...], cwd=..., env=..., stdout=...)

`python()` stands for sys.executable in a command. Its process has a server, which has imported what
the programs share, fork one that is given its arguments, folder, environment and standard files. It
passes signals on, ends as the program does, and killed takes the program with it. What Python reads
from the environment when it starts (PYTHONUTF8, OMP_NUM_THREADS) has no effect on a fork. In a fork
sys.executable is such a command too, so that the ranks of torchrun and of a job start like this.
"""

import gc
import importlib
import json
import os
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

SHARED = ("torch.distributed.run", "torch._dynamo", "apps.main.train", "apps.main.generate")
# For programs that import this repository from a copy of it, and have all of it still to import.
OF_OTHERS = ("torch.distributed.run", "torch._dynamo", "torch.distributed.fsdp")
OF_OTHERS += ("torch.distributed.checkpoint", "torch.distributed.tensor.parallel")
OF_OTHERS += ("pyarrow",)
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


def python(modules: tuple[str, ...] = SHARED) -> list[str]:
    """The beginning of a command, whose server has imported `modules`."""
    return [start_server(modules)[0]]


@cache
def start_server(modules: tuple[str, ...]) -> tuple[str, subprocess.Popen[bytes]]:
    """The command for its forks. It ends with this process, which has the other end of its standard
    input."""
    folder = tempfile.mkdtemp(prefix="lingua-python-")
    command = Path(folder, "python")
    ask = shlex.join([sys.executable, "-IS", __file__, folder])
    command.write_text(f'#!/bin/sh\nexec {ask} "$@"\n')
    command.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{folder}")  # without a file
        listener.listen()
        words = ["serve", str(listener.fileno()), str(command), *modules]
        server = subprocess.Popen(
            [sys.executable, __file__, *words],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    return str(command), server


def wait_for(condition: Callable[[], Any], job: Any = None, seconds: float = 60.0) -> Any:
    """What `condition` returns, once that is true; fails where a process ends before."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert job is None or job.poll() is None, "the process has ended"
        assert time.monotonic() < end, f"it took more than {seconds} s"
        time.sleep(0.005)
    return value


def state_of(pid: int) -> str:
    """The state of a process in the process table, of one that is gone Z like a zombie's."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def ask(address: str, argv: list[str]) -> None:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # by a batch script
    with socket.socket(socket.AF_UNIX) as server, server.makefile() as answers:
        server.connect(f"\0{address}")
        socket.send_fds(server, [b"\n"], [0, 1, 2])
        request = {"argv": argv, "cwd": os.getcwd(), "env": dict(os.environ)}
        request["blocked"] = list(map(int, blocked))
        server.sendall(json.dumps(request).encode() + b"\n")
        pid = int(answers.readline())

        def pass_on(number: int, frame: object) -> None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, number)

        for number in PASSED_ON:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        code = int(answers.readline())
    if code < 0:
        if -code in PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def serve(listener: socket.socket, command_file: Path, modules: list[str]) -> list[str]:
    """Returns in every fork, with the arguments of its program."""
    sys.path[0] = str(Path(__file__).parents[1])
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    commands: dict[int, socket.socket] = {}  # by the program's process
    with selectors.DefaultSelector() as events:
        for source in (0, listener, ended):
            events.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                if key.fileobj == 0:
                    for pid in commands:
                        os.kill(pid, signal.SIGKILL)
                    shutil.rmtree(command_file.parent)
                    sys.exit()
                elif key.fileobj is listener:
                    command, _ = listener.accept()
                    _, files, *_ = socket.recv_fds(command, 1, 3)
                    asked = command.makefile().readline()
                    pid = os.fork() if asked.endswith("\n") else None  # or it was killed
                    if pid == 0:
                        break
                    for file in files:
                        os.close(file)
                    if pid is None:
                        command.close()
                        continue
                    with suppress(OSError):
                        command.sendall(b"%d\n" % pid)
                    commands[pid] = command
                    events.register(command, selectors.EVENT_READ, pid)
                elif key.fileobj == ended:
                    os.read(ended, 4096)
                else:  # the process of a command was killed
                    os.kill(key.data, signal.SIGKILL)
                    events.unregister(key.fileobj)
            else:
                while commands and (found := os.waitpid(-1, os.WNOHANG))[0]:
                    command = commands.pop(found[0])
                    if command in events.get_map():
                        events.unregister(command)
                        with suppress(OSError):
                            command.sendall(b"%d\n" % os.waitstatus_to_exitcode(found[1]))
                    command.close()
                continue
            break
    request = json.loads(asked)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for file in (listener, command, *commands.values()):
        file.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, max(files) + 1)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # which has been read from the environment
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    return request["argv"]


def run(argv: list[str]) -> None:
    """As Python does with these arguments."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    here = [] if os.environ.get("PYTHONSAFEPATH") else [os.getcwd()]
    sys.path[:1] = [*here, *filter(None, paths)]
    if argv[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        argv = argv[1:]
    match argv:
        case "-m", module, *words:
            sys.argv = [module, *words]
            sys.modules.pop(module, None)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case "-c", code, *words:
            sys.argv = ["-c", *words]
            exec(code, {"__name__": "__main__"})
        case script, *words:
            sys.path[0] = str(Path(script).parent)
            sys.argv = [script, *words]
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _, _, listener, command, *modules = sys.argv
        argv = serve(socket.socket(fileno=int(listener)), Path(command), modules)
        sys.executable = command
        run(argv)
    else:
        ask(sys.argv[1], sys.argv[2:])
