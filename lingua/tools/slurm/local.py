"""Runs on this machine, without Slurm: one whose output is shown, or a sweep with several at once,
each with its part of the cores and GPUs and its output in a file."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lingua.base.dump_dir import LOGS
from lingua.base.errors import UserError
from lingua.base.format import counted, printable, short_time
from lingua.parallel.signals import StopRequest
from lingua.tools.runs.records import open_runs
from lingua.tools.runs.settings import differing
from lingua.tools.runs.table import TAIL_BYTES, row_of, shown_keys, table
from lingua.tools.slurm.end import report_end
from lingua.tools.slurm.status import status

POLL_S = 0.1
CONTINUES = "The same command with dirs_exists_ok=true continues"
TORCHRUN_LOG = "launcher.log"  # what torchrun prints, beside the other logs of a run

Command = tuple[Path, list[str]]  # the dump dir of a run, and what starts it


def machine_shares(
    at_once: int, ranks: int, gpus: Sequence[str], cores: int
) -> list[dict[str, str]]:
    """The environment variables that divide this machine among `at_once` runs of `ranks` ranks.
    `gpus` are names as in CUDA_VISIBLE_DEVICES; empty: the runs use the CPU. Raises UserError where
    a run would get fewer GPUs than ranks."""
    threads = {"OMP_NUM_THREADS": str(max(1, cores // (at_once * ranks)))}
    if not gpus or at_once == 1:
        return [threads if at_once > 1 else {}] * at_once
    n_gpus = len(gpus) // at_once
    if n_gpus < ranks:
        need = f"must be at most {max(1, len(gpus) // ranks)}: this machine has "
        raise UserError(
            f"at_once = {at_once}: {need}{counted(len(gpus), 'GPU')}, and a run has "
            f"{counted(ranks, 'rank')}"
        )
    shares = [gpus[i * n_gpus : (i + 1) * n_gpus] for i in range(at_once)]
    return [{**threads, "CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


def visible_gpus() -> list[str]:
    """The GPUs of this process, as CUDA_VISIBLE_DEVICES names them."""
    import torch  # here, since the status of runs needs none

    n = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (named or [str(i) for i in range(n)])[:n]


def run_one(dump_dir: Path, argv: Sequence[str], on_stop: list[str]) -> int:
    """Run a command, whose output is shown, then `on_stop`. A signal stops it. Returns its exit
    code; 128 + the signal where that stopped it."""
    with StopRequest() as stop, subprocess.Popen(argv) as process:
        while process.poll() is None and stop.signal is None:
            time.sleep(POLL_S)
        _pass_on(stop.signal, [process])
        code = process.wait()
    if code and stop.signal:
        print(f"stopped by {stop.signal}. {CONTINUES}", file=sys.stderr)
        code = 128 + signal.Signals[stop.signal]
    report_end(on_stop, code, dump_dir)
    return code


def run_sweep(
    root: Path, commands: Sequence[Command], shares: Sequence[dict[str, str]], on_stop: list[str]
) -> list[int]:
    """Run the commands, one at a time with each share of the machine, and `on_stop` after each. A
    line is printed at the start and at the end of each, and the table of all at the end. A signal
    stops those that run, which save, and starts no other.

    Returns:
        The exit code of each command; 128 + the signal of one that a signal stopped, or kept from
        starting.
    """
    n, at_once = len(commands), len(shares)
    print(f"{counted(n, 'run')}, {at_once} at a time; their output is in {root}/*/logs")
    print(f"  watch   python -m lingua runs {shlex.quote(str(root))} watch=5", flush=True)
    free = list(shares)
    codes: dict[int, int] = {}
    running: dict[int, tuple[subprocess.Popen[bytes], dict[str, str], float]] = {}
    with StopRequest() as stop:
        passed_on = False
        while running or (len(codes) < n and stop.signal is None):
            while free and len(codes) + len(running) < n and stop.signal is None:
                i = len(codes) + len(running)
                print(printable(f"started  {commands[i][0].name}"), flush=True)
                running[i] = _start(*commands[i], free[0]), free.pop(0), time.monotonic()
            if stop.signal is not None and not passed_on:
                passed_on = True
                print(f"{stop.signal}: {counted(len(running), 'run')} will save", flush=True)
                _pass_on(stop.signal, [process for process, _, _ in running.values()])
            time.sleep(POLL_S)
            for i, (process, environment, began) in list(running.items()):
                if (code := process.poll()) is not None:
                    del running[i]
                    codes[i] = code if code >= 0 else 128 - code
                    report_end(on_stop, codes[i], commands[i][0])
                    free.append(environment)
                    seconds = time.monotonic() - began
                    done = f"{len(codes)} of {n}"
                    ended = None if stop.signal else code
                    print(printable(f"{done}  {_outcome(commands[i][0], seconds, ended)}"),
                          flush=True)  # fmt: skip
        stopped = stop.signal
    if codes:
        records = open_runs([dump_dir for dump_dir, _ in commands[: len(codes)]], TAIL_BYTES)
        print(table([row_of(record) for record in records], shown_keys(differing(records))))
    if stopped is not None:
        left = counted(n - len(codes), "run")
        print(f"stopped by {stopped}; {left} not started. {CONTINUES}")
        code = 128 + signal.Signals[stopped]
        return [code if codes.get(i) != 0 else 0 for i in range(n)]
    return [codes[i] for i in range(n)]


def _start(dump_dir: Path, argv: Sequence[str], environment: dict[str, str]) -> subprocess.Popen:
    environment = environment | {k: v for k, v in os.environ.items() if k == "OMP_NUM_THREADS"}
    with (dump_dir / LOGS / TORCHRUN_LOG).open("ab") as output:
        return subprocess.Popen(
            argv,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _pass_on(name: str | None, processes: Sequence[subprocess.Popen]) -> None:
    """A terminal sends its Ctrl-C, and that it is closed, to torchrun too. Children get the signal
    as well: a command of `setup`, and ranks that torchrun is starting and does not know yet."""
    for process in [] if name in (None, "SIGINT", "SIGHUP") else processes:
        with suppress(OSError):  # it has ended
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            process.terminate()
            for child in map(int, children):
                os.kill(child, signal.SIGTERM)


def _outcome(dump_dir: Path, seconds: float, code: int | None) -> str:
    """A line about a run that has ended after `seconds`. Without a `code` a signal ended it."""
    [run] = status(dump_dir)
    # A signal to the run itself: torchrun's code is that of a failure, the last line is not.
    stopped = run.row.state == "stopped" and (run.row.age_s or 0.0) < seconds
    failed = bool(code) and not stopped
    row, parts = run.row, [dump_dir.name, "failed" if failed else run.row.state]
    if row.steps is not None:
        parts.append(f"step {row.step}/{row.steps}")
    for name, loss in (("held-out", row.heldout), ("loss", row.loss)):
        parts += [f"{name} {loss:.4f}"] if loss is not None else []
    parts.append(short_time(seconds))
    if failed:
        parts += [*run.errors[:1]] or [f"see {dump_dir / LOGS}"]
    return "  ".join(parts)
