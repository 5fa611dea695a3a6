"""Command lines, processes and the training program, as the measurements start them."""

import importlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from apps.main import app as main_app
from lingua.app import App, Built
from lingua.base.errors import UserError
from lingua.config.load import load, meta_lingua
from lingua.parallel.launch import Launch, detect_launch
from lingua.parallel.program import run_program
from lingua.tokenizer import build_tokenizer

# (step from 1 on, micro-batches of the step that follow this one, tokens, targets)
Look = Callable[[int, int, Tensor, Tensor], object]


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


def one_process(what: str) -> Launch:
    """The place of this process. Raises UserError where a launcher started several."""
    launch = detect_launch()
    if launch.world_size != 1:
        raise UserError(f"{what} is measured on one process")
    return launch


def run(module: str, words: Sequence[str], ranks: int = 0, show: bool = False) -> None:
    """Run `python -m module words`, by torchrun in that many ranks if any are given. Its output is
    shown on stderr, or hidden; UserError has the end of a hidden one where it fails."""
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command = [sys.executable, "-m", *(torchrun if ranks else ()), module, *words]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ if ranks else None
    to = (sys.stderr, None) if show else (subprocess.PIPE, subprocess.STDOUT)
    done = subprocess.run(command, stdout=to[0], stderr=to[1], text=True, env=environment)
    if done.returncode != 0:
        output = "\n".join((done.stdout or "").splitlines()[-20:])
        raise UserError(f"{shlex.join(command)}\nhas exit code {done.returncode}\n{output}")


def on_ranks(ranks: int, function: Callable[..., Any], *words: str) -> Any:
    """What `function(*words)`, a global of its module that every rank of a torchrun launch calls,
    returns on rank 0: a value that JSON has."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        place = [str(out), function.__module__, function.__name__]
        run("apps.bench.launch", [*place, *words], ranks)
        return json.loads(out.read_text(encoding="utf-8"))


def watched(app: App, look: Look) -> App:
    """The app, with a model that calls `look` before every micro-batch that it trains on."""

    def build(args: Any) -> Built:
        built = app.build(args)
        n_micro, _ = args.micro_steps(dist.get_world_size() // args.distributed.tp_size)
        numbers = count()

        def before_forward(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if module.training:  # neither measured nor sampled from
                step, i = divmod(next(numbers), n_micro)
                look(step + 1, n_micro - 1 - i, inputs[0], inputs[1])

        built.module.register_forward_pre_hook(before_forward)
        return built

    return replace(app, build=build)


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
