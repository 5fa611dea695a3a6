"""What a run will take, before it is launched: memory, traffic, time and checkpoints.

    python -m lingua plan config=apps/main/configs/llama_7B.yaml nodes=2 ngpu=8 gpu=h100
    python -m lingua plan config=my.yaml ngpu=64 gpu=my_gpu.yaml tokens=100e9 model.vocab_size=32000

It takes one step of the run's own model and layout on tensors without memory, as rank 0 of ranks
that do not exist. It needs no device and no data, and no tokenizer where model.vocab_size is given.
Keys that are not listed here are those of the run.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from lingua.app import App, choose_app
from lingua.base.errors import UserError, all_of
from lingua.config.help import print_help_if_asked
from lingua.config.load import load
from lingua.config.schema import Free, bounds, require
from lingua.parallel.args import DistributedArgs, mesh_sizes
from lingua.parallel.float8 import check_float8
from lingua.parallel.plan import check_layout
from lingua.run.args import RunArgs
from lingua.tools.plan.choice import choice_as_json, choice_lines, choices, estimate
from lingua.tools.plan.device import Device, find_device, unknown_device
from lingua.tools.plan.report import Plan, lines
from lingua.tools.plan.step import build, degree_of, read_config
from lingua.tools.plan.trace import trace

T = TypeVar("T")


@dataclass
class PlanArgs:
    nodes: Free[int] = 1  # machines
    ngpu: Free[int] = 1  # processes, one for each device, of a machine
    # a100, h100, h200, b200, l40s, or a YAML file with the keys of a Device (lingua.tools.plan.
    # device); null: no time, and nothing is refused
    gpu: Free[str | None] = None
    # how many of the best other meshes, micro-batches and checkpointing modes are traced, after all
    # are ranked by a formula; 0: none. Needs gpu
    choices: Free[int] = 0
    tokens: Free[float | None] = None  # tokens of the whole run; null: those of its steps
    json: Free[str | None] = None  # file that is written with all numbers
    # hours of a device between failures that end a run: 419 on 16,384 devices in 54 days (Llama
    # team, 2024, arXiv 2407.21783, section 3.3.4)
    failure_hours: Free[float] = 50_000.0
    storage_gb_per_s: Free[float] = 5.0  # speed at which all ranks together write a checkpoint

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 1, "nodes", "ngpu", maximum=65535)
        yield from bounds(self, 0, "choices")
        if self.choices and self.gpu is None:
            yield "gpu", f"must be given, since choices = {self.choices}"
        if self.gpu is not None and (need := unknown_device(self.gpu)):
            yield "gpu", need
        if self.json is not None and not Path(self.json).parent.is_dir():
            yield "json", "must be in a folder that exists"
        positive = ("tokens", "failure_hours", "storage_gb_per_s")
        yield from require(self, "above 0 and finite", lambda v: 0 < v < math.inf, *positive)


def main(argv: list[str]) -> None:
    print_help_if_asked(PlanArgs, argv, __doc__)
    made, options = make_plan(argv)
    print("\n".join(lines(made)), flush=True)  # others may take minutes
    others = choices(choose_app(split_words(argv)[1]), made, options.choices)
    numbers = made.as_json() | {"choices": [choice_as_json(c) for c in others]}
    if options.json is not None:
        try:
            Path(options.json).write_text(json.dumps(numbers, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"json = {options.json}: cannot be written: {error}") from None
    if others:
        print("\n".join(["", *choice_lines(others)]))


def make_plan(argv: list[str], quick: bool = False) -> tuple[Plan, PlanArgs]:
    """The plan of a command line; a `quick` one is an estimate.
    Raises UserError, with all mistakes together."""
    plan_words, run_words = split_words(argv)
    mistakes: list[str] = []

    def attempt(work: Callable[[], T]) -> T | None:
        try:
            return work()
        except UserError as error:
            several = str(error).split("\n  ")
            mistakes.extend(
                several[1:] if several[0].endswith("in the configuration:") else several
            )
            return None

    options = attempt(lambda: load(PlanArgs, plan_words)[0])
    read = attempt(lambda: read_config(run_words))
    if any("unknown key" in mistake for mistake in mistakes):
        mistakes[-1] += f"\n  keys of lingua plan: {', '.join(f.name for f in fields(PlanArgs))}"
    device: Device | None = None
    if options is not None and options.gpu is not None:
        device = attempt(lambda: find_device(str(options.gpu)))
    sizes = None
    with suppress(UserError):  # loading all options has reported it
        mesh_words = [word for word in plan_words if word.startswith(("nodes=", "ngpu="))]
        counts, _ = load(PlanArgs, mesh_words)
        if read is not None:
            ranks = counts.nodes * counts.ngpu
            sizes = attempt(lambda: sizes_on(ranks, read[1].distributed))
    if read is not None and sizes is not None:
        attempt(lambda: check_sizes(read[0], read[1], sizes))
    if mistakes:
        raise all_of(mistakes)
    assert options is not None and read is not None and sizes is not None
    app, args = read
    if device is not None:
        device.node_size = options.ngpu
        if args.distributed.float8 is not None and device.float8_tflops is None:
            raise UserError(f"distributed.float8: {device.name} has no float8_tflops")
    compiled = args.distributed.compile
    follow = estimate if quick else trace
    traced = follow(app, args, sizes, "cpu" if args.device == "cpu" else "cuda")
    return Plan(args, traced, device, options, compiled), options


def split_words(argv: list[str]) -> tuple[list[str], list[str]]:
    """The arguments of the plan, and those of the run."""
    names = {f.name for f in fields(PlanArgs)}
    plan_words = [word for word in argv if word.partition("=")[0] in names]
    return plan_words, [word for word in argv if word not in plan_words]


def sizes_on(ranks: int, args: DistributedArgs) -> tuple[int, ...]:
    """The sizes of a run's mesh, as `lingua.parallel.mesh.sizes_of`. Raises UserError."""
    sizes = mesh_sizes(args, ranks)
    return (*sizes, args.cp_size) if args.cp_size > 1 else sizes


def check_sizes(app: App, args: RunArgs, sizes: tuple[int, ...]) -> None:
    """Raise UserError where the model cannot be laid out on a mesh of these sizes."""
    built = build(app, args, degree_of(sizes))
    check_layout(built.module, built.plan, sizes[2], (*sizes, 1)[3])
    if args.distributed.float8 is not None:
        seq_len, cp_size = args.data.seq_len, args.distributed.cp_size
        check_float8(built.module, built.plan, sizes[:3], seq_len, cp_size, "cpu")
