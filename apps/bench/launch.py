"""Command lines, processes and the training program, as the measurements start them."""

import importlib
import io
import json
import multiprocessing as mp
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from itertools import islice
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

from apps.main import app as main_app
from apps.main.train import build_run, take_steps
from lingua.app import App
from lingua.base.dump_dir import METRICS
from lingua.base.errors import UserError
from lingua.config.load import load, meta_lingua
from lingua.parallel.program import run_program
from lingua.parallel.signals import StopRequest
from lingua.run.args import RunArgs
from lingua.run.program import main as main_of_run
from lingua.run.run import Run
from lingua.run.start import start_run
from lingua.tokenizer.build import build_tokenizer

FAILS_S = 5.0  # for the other ranks once one has failed, to say what they know


def with_defaults(defaults: Sequence[str], keys: Sequence[str]) -> list[str]:
    """`keys`, which override `defaults`, which override the file that `keys` name."""
    files = [key for key in keys if key.startswith(("config=", "app="))]
    return [*files, *defaults, *(key for key in keys if key not in files)]


def read_config(keys: Sequence[str], app: App = main_app) -> Any:
    """The configuration of a command line, with the size of its tokenizer's vocabulary."""
    args: Any = load(app.config, list(keys), foreign=meta_lingua)[0]
    if args.model.vocab_size == -1:
        args.model.vocab_size = build_tokenizer(args.data.tokenizer).vocab_size
    return args


def run(
    module: str,
    words: Sequence[str],
    ranks: int = 0,
    show: bool = False,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run `python -m module words`, by torchrun in that many ranks if any are given, with these
    environment variables over this process's. Its output is shown on stderr, or hidden; UserError
    has the end of a hidden one where it fails."""
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command = [sys.executable, "-m", *(torchrun if ranks else ()), module, *words]
    environment = ({"OMP_NUM_THREADS": "1"} if ranks else {}) | os.environ | dict(variables or {})
    to = (sys.stderr, None) if show else (subprocess.PIPE, subprocess.STDOUT)
    done = subprocess.run(command, stdout=to[0], stderr=to[1], text=True, env=environment)
    if done.returncode != 0:
        output = "\n".join((done.stdout or "").splitlines()[-20:])
        raise UserError(f"{shlex.join(command)}\nhas exit code {done.returncode}\n{output}")


def train_forked(words: Sequence[str], ranks: int) -> None:
    """Run the training program with these words in ranks on this machine, forked from a process
    that has imported it: without torchrun, and the seconds of importing torch. Its output is shown
    on stderr. Raises UserError where a rank fails."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["apps.main.train"])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = [
        context.Process(target=_train, args=(rank, ranks, port, list(words)))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        while (alive := [p.sentinel for p in processes if p.exitcode is None]) and not failed(
            processes
        ):
            wait(alive)
    finally:
        for process in processes:
            process.join(FAILS_S if failed(processes) else None)  # others name the rank
            process.kill()
    if failed(processes):
        codes = [process.exitcode for process in processes]
        raise UserError(f"{shlex.join(words)}: its ranks have exit codes {codes}")


def failed(processes: Iterable[BaseProcess]) -> bool:
    return any(process.exitcode for process in processes)


def _train(rank: int, ranks: int, port: int, words: list[str]) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in (place | meeting).items()})
    os.dup2(2, 1)
    run_program(partial(main_of_run, words))


def train_seed(keys: Sequence[str], folder: Path, seed: int) -> None:
    """A run of the training program in one process, which stays in `folder`."""
    named = [f"name={folder.name}", f"dump_dir={folder}", f"seed={seed}"]
    run("apps.main.train", [*keys, *named])


def on_ranks(ranks: int, function: Callable[..., Any], *words: str) -> Any:
    """What `function(*words)`, a global of its module that every rank of a torchrun launch calls,
    returns on rank 0: a value that JSON has."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        place = [str(out), function.__module__, function.__name__]
        run("apps.bench.launch", [*place, *words], ranks)
        return json.loads(out.read_text(encoding="utf-8"))


@contextmanager
def training(app: App, args: RunArgs, n_steps: int) -> Iterator[tuple[Run, Iterator[int]]]:
    """A run of the training program before its first step, and its first steps: an iterator that
    yields each once it is complete. The run measures nothing held out, saves nothing and prints
    nothing. The iterator raises KeyboardInterrupt where a signal stops the run."""
    args.checkpoint.dump.every = args.checkpoint.eval.every = args.validation.every = 0
    args.steps, args.stop_at = max(args.steps, n_steps + 1), None  # the last step of a run is saved

    def steps() -> Iterator[int]:
        yield from islice(take_steps(run, stop), n_steps)
        if run.signals:
            raise KeyboardInterrupt

    with (
        redirect_stdout(io.StringIO()),
        StopRequest("stopping before the next step") as stop,
        ExitStack() as open_parts,
    ):
        started = start_run(app, args, stop, open_parts)
        run = build_run(app, args, started, stop, open_parts)
        yield run, steps()


def logged_losses(args: RunArgs) -> dict[int, float]:
    """The losses that a run has logged, by step."""
    return {line["step"]: line["loss"] for line in read_lines(args.folder / METRICS)}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of metrics, but for those of events."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if "event" not in line]


def main() -> None:
    out, module, function, *words = sys.argv[1:]
    result = getattr(importlib.import_module(module), function)(*words)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    run_program(main)
