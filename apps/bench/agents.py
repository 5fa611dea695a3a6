"""torchrun agents of one elastic job on this machine, each in the place of a machine: killed,
stopped and started again, with or without their workers."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The store of the rendezvous, in a process that no agent ends.
STORE = """import signal, sys, torch.distributed as dist
store = dist.TCPStore("localhost", int(sys.argv[1]), is_master=True, wait_for_workers=False)
signal.pause()"""
# What docs/machines.md gives.
PAGE = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=5"
OPTIONS = ("--max-restarts=100",)


@dataclass
class Agents:
    """The agents of a job of up to `n` machines of `ranks` ranks. Used as a context, it ends all of
    its processes, also workers whose agent was killed."""

    folder: Path  # of what each agent and its workers print
    words: Sequence[str]  # the worker: `-m MODULE key=value ...`
    n: int
    ranks: int = 1
    minimum: int = 1
    conf: str = PAGE
    options: Sequence[str] = OPTIONS
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.id = f"{os.getpid()}-{self.port}"  # of the rendezvous, in the environment of workers
        command = [sys.executable, "-c", STORE, str(self.port)]
        self.store = subprocess.Popen(command, start_new_session=True)

    def start(self, *which: int) -> None:
        """Start these agents, which do not run."""
        settings = {
            "nnodes": f"{self.minimum}:{self.n}",
            "nproc-per-node": self.ranks,
            "rdzv-backend": "c10d",
            "rdzv-endpoint": f"localhost:{self.port}",
            "rdzv-id": self.id,
            "rdzv-conf": self.conf,
            "local-addr": "localhost",
        }
        torchrun = [sys.executable, "-m", "torch.distributed.run", *self.options]
        torchrun += [f"--{name}={value}" for name, value in settings.items() if value != ""]
        own = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        for i in which:
            with (self.folder / f"agent{i}.txt").open("ab") as out:
                self.running[i] = subprocess.Popen(
                    [*torchrun, *self.words],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=os.environ | own,
                    start_new_session=True,
                )

    def workers(self, i: int) -> list[int]:
        """The processes of the ranks of an agent that runs, by local rank."""
        ranks = {pid: environment(pid) for pid in children(self.running[i].pid)}
        found = {int(env["LOCAL_RANK"]): pid for pid, env in ranks.items() if "LOCAL_RANK" in env}
        return [found[rank] for rank in sorted(found)]

    def kill(self, i: int, workers: bool = True) -> None:
        """Kill an agent with its workers, as a machine dies, or alone."""
        self.send(i, signal.SIGSTOP) if workers else None  # so that it starts no other
        agent = self.running.pop(i)
        pids = children(agent.pid) if workers else []
        agent.kill()
        agent.wait()
        for pid in pids:
            send(pid, signal.SIGKILL)

    def send(self, i: int, number: int) -> None:
        """Send a signal, such as SIGSTOP, to an agent, then to its workers."""
        agent = self.running[i].pid
        send(agent, number)
        for pid in children(agent):
            send(pid, number)

    def ranks_alive(self) -> list[int]:
        """Ranks of this job, also of agents that have ended."""
        name = "TORCHELASTIC_RUN_ID"
        return [pid for pid in processes() if environment(pid).get(name) == self.id]

    def __enter__(self) -> "Agents":
        return self

    def __exit__(self, *error: object) -> None:
        for agent in self.running.values():
            agent.kill()
            agent.wait()
        for pid in self.ranks_alive():
            send(pid, signal.SIGKILL)
        self.store.kill()
        self.store.wait()


def send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def children(pid: int) -> list[int]:
    found = []
    with suppress(OSError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def environment(pid: int) -> dict[str, str]:
    """The variables that a process was started with, empty where it has ended."""
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    return dict(
        word.split("=", 1) for word in content.decode(errors="replace").split("\0") if "=" in word
    )


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """What `condition` returns, once that is true. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.01)
    return value
