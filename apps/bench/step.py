"""Tokens per second, MFU and peak memory of a training step, beside a bare PyTorch loop of the same
model: each shape, compiled and not, with each attention.

The two take the same steps on the same rows, in turns. Each turn makes its model anew and frees it,
so that the peak is that of one. The program's turn is its own loop (`set_up` and `take_steps` of
apps.main.train) on a text that is written for it; the bare loop is that of `apps.bench loop`, with
its blocks compiled where the program's are. What a key on the command line sets is not varied:
`config=FILE` measures that model, `distributed.compile=true` leaves out eager.
"""

import gc
import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, redirect_stdout, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from apps.bench.loop import Batch, Reference, clock
from apps.bench.report import Report, spread
from apps.main.config import TrainArgs
from apps.main.run import Run
from apps.main.train import set_up, take_steps
from apps.main.transformer import build
from lingua.app import choose_app
from lingua.data.loader import MicroBatch
from lingua.errors import UserError
from lingua.format import align
from lingua.monitor.metrics import mfu, peak_flops
from lingua.parallel.launch import detect_launch, pick_device
from lingua.run_config import load_run
from lingua.signals import StopRequest

CONFIGS = Path(__file__).parents[1] / "main" / "configs"
LLAMA = ["model.vocab_size=128256", "data.seq_len=4096", "data.batch_size=2"]
LLAMA += ["data.global_batch_size=2", "distributed.activation_checkpointing=none"]
# Each at its width, with as many layers as a GPU of 80 GB trains without checkpointing.
SHAPES = {
    "cuda": {
        "1B": [f"config={CONFIGS / 'llama_1B.yaml'}", *LLAMA],
        "3B": [f"config={CONFIGS / 'llama_3B.yaml'}", *LLAMA, "model.n_layers=14"],
        "8B": [f"config={CONFIGS / 'llama_8B.yaml'}", *LLAMA, "model.n_layers=6"],
    },
    "cpu": {"debug": [f"config={CONFIGS / 'debug.yaml'}", "model.vocab_size=1024"]},
}
# Keys that are varied where the command line does not set them.
VARIED = {
    "cuda": {
        "distributed.compile": ("false", "true"),
        "model.attn_impl": ("sdpa", "varlen", "flex_attention", "fmha"),
    },
    "cpu": {"distributed.compile": ("false", "true"), "model.attn_impl": ("sdpa",)},
}
WARM_UP, STEPS = 5, 10  # of a turn: steps that are not measured, and those that are


def measure(keys: list[str], repeats: int = 3) -> Report:
    """`keys` is the command line of the training program; `repeats` turns of each are measured."""
    launch = detect_launch()
    if launch.world_size != 1:
        raise UserError("a step is measured on one process")
    named = dict(key.partition("=")[::2] for key in keys)
    device = pick_device(named.get("device", "auto"), launch)
    shapes = SHAPES[device.type]
    if "config" in named:
        shapes = {Path(named["config"]).stem: []}
    varied = VARIED[device.type]
    axes = [(named[key],) if key in named else values for key, values in varied.items()]
    cases: list[dict[str, Any]] = []
    for shape, *values in product(shapes, *axes):
        case = {"shape": shape, **dict(zip(varied, values, strict=True))}
        print(", ".join(f"{key} {value}" for key, value in case.items()), file=sys.stderr)
        chosen = [f"{key}={value}" for key, value in zip(varied, values, strict=True)]
        torch.compiler.reset()  # else what differs from the last shape would be compiled as dynamic
        try:
            args, turns = take_turns([*shapes[shape], *keys, *chosen], device, repeats)
        except (UserError, RuntimeError) as error:  # the others are still measured
            cases.append(case | {"error": str(error)})
        else:
            cases.append(case | numbers(args, turns, device))
    if all("error" in case for case in cases):
        raise UserError(cases[0]["error"])
    return report(cases, repeats, device)


# ------------------------------------------------------------------------------ the program's steps


class _Enough(Exception):
    """All steps that were asked for are taken."""


def run_steps(keys: list[str], n: int, at: Callable[[int, Run, list[MicroBatch]], None]) -> Run:
    """Take n steps of the training program with this command line, on a text of its own.

    `at(i, run, batch)` is called for i from 0 to n, when i steps have been enqueued, with the
    micro-batches of the next one. The process group is left to the caller. Raises
    KeyboardInterrupt where a signal asks to stop.
    """
    with TemporaryDirectory() as folder, closing(StopRequest()) as stop, ExitStack() as parts:
        (Path(folder) / "text").mkdir()
        text = json.dumps({"text": "A step reads rows of this document, again and again. "})
        (Path(folder) / "text" / "text.jsonl").write_text(f"{text}\n" * 2000)
        own = [
            f"dump_dir={folder}/run",
            f"data.root_dir={folder}",
            "data.sources={text: 1.0}",
            "data.tokenizer={name: bytes, path: null}",
            "checkpoint.path=null",
            "checkpoint.dump.every=0",
            "checkpoint.eval.every=0",
            "validation.every=0",
        ]
        app = choose_app(keys)
        args: TrainArgs
        args, _ = load_run(app, [*keys, *own])
        if args.model.vocab_size == -1:
            raise UserError("model.vocab_size: must be given, since no tokenizer's file is read")
        begun = set_up(app, args, stop, parts)
        if begun is None:
            raise KeyboardInterrupt
        run, steps, benchmarks = begun

        def batches() -> Iterator[list[MicroBatch]]:
            for i, batch in enumerate(steps):
                if stop.signal is not None:
                    raise KeyboardInterrupt
                at(i, run, batch)
                if i == n:
                    raise _Enough
                yield batch

        with suppress(_Enough):
            take_steps(run, batches(), benchmarks, stop)
        return run


# -------------------------------------------------------------------------------------- the turns


@dataclass
class Turn:
    """What the measured steps of a turn took."""

    seconds: float = 0.0
    peak_bytes: int = 0  # of tensors on CUDA; 0 on the CPU
    losses: dict[int, float] = field(default_factory=dict)  # by step, of some steps


def take_turns(
    keys: list[str], device: torch.device, repeats: int
) -> tuple[TrainArgs, list[tuple[Turn, Turn]]]:
    """The resolved configuration, and turns of the program and of the bare loop."""
    program, args, rows = program_turn(keys, device)
    turns = [(program, bare_turn(args, rows, device))]
    for i in range(1, repeats):
        if i % 2:  # neither always follows the other
            bare = bare_turn(args, rows, device)
            program, *_ = program_turn(keys, device)
        else:
            program, *_ = program_turn(keys, device)
            bare = bare_turn(args, rows, device)
        turns.append((program, bare))
    return args, turns


def program_turn(keys: list[str], device: torch.device) -> tuple[Turn, TrainArgs, list[Batch]]:
    """A turn of the program, its resolved configuration and the rows of its steps."""
    turn, begin = Turn(), 0.0
    rows: list[Batch] = []

    def at(i: int, run: Run, batch: list[MicroBatch]) -> None:
        nonlocal begin
        rows.append([(micro.tokens, micro.targets) for micro in batch])
        if i == WARM_UP:
            begin = start_clock(device)
        elif i == WARM_UP + STEPS:
            turn.seconds, turn.peak_bytes = stop_clock(device, begin)
            text = (run.args.folder / "metrics.jsonl").read_text(encoding="utf-8")
            lines = map(json.loads, text.splitlines())
            turn.losses = {x["step"]: x["loss"] for x in lines if "event" not in x}

    free(device)
    try:
        with redirect_stdout(io.StringIO()):
            args = run_steps([*keys, f"logging.freq={WARM_UP}"], WARM_UP + STEPS, at).args
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return turn, args, rows[:-1]


def bare_turn(args: TrainArgs, rows: list[Batch], device: torch.device) -> Turn:
    """A turn of the bare loop on these rows."""
    free(device)
    module = build(args).module
    if args.distributed.compile:
        for block in module.get_submodule("layers").children():
            block.compile()
    reference = Reference(module, args, device)
    batches = [[(x.to(device), targets.to(device)) for x, targets in batch] for batch in rows]
    reference.run(1, batches[:WARM_UP])
    begin = start_clock(device)
    reference.run(1 + WARM_UP, batches[WARM_UP:])
    seconds, peak_bytes = stop_clock(device, begin)
    return Turn(seconds, peak_bytes, {i: loss.item() for i, loss in reference.losses.items()})


def start_clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return clock(device)[0]


def stop_clock(device: torch.device, begin: float) -> tuple[float, int]:
    """Seconds and peak bytes since `begin`."""
    seconds = clock(device)[0] - begin
    return seconds, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def free(device: torch.device) -> None:
    """Give back the memory of the turn before this one."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------- the result


def numbers(
    args: TrainArgs, turns: list[tuple[Turn, Turn]], device: torch.device
) -> dict[str, Any]:
    """Of one case: Spreads over the turns, and of the losses the largest relative difference."""
    tokens = STEPS * args.data.step_rows * args.data.seq_len
    flops = build(args).flops_per_token
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = peak_flops(name, args.distributed.dtype)
    speeds = [spread(tokens / turn.seconds for turn in of) for of in zip(*turns, strict=True)]
    apart = [
        abs(bare.losses[step] - loss) / max(loss, 1e-9)  # on the stub driver all are zero
        for program, bare in turns
        for step, loss in program.losses.items()
    ]
    return {
        "tokens_per_s": speeds[0],
        "bare_tokens_per_s": speeds[1],
        "ratio": spread(bare.seconds / program.seconds for program, bare in turns),
        "mfu": mfu(flops, speeds[0].median, peak),
        "peak_gib": max(program.peak_bytes for program, _ in turns) / 2**30 or None,
        "bare_peak_gib": max(bare.peak_bytes for _, bare in turns) / 2**30 or None,
        "loss_difference": max(apart),
    }


def report(cases: list[dict[str, Any]], repeats: int, device: torch.device) -> Report:
    axes = ["shape", *VARIED[device.type]]
    heading = *axes, "tokens/s", "bare loop", "ratio", "MFU, %", "peak GiB", "bare loop"
    rows, errors = [heading], []
    for case in cases:
        named = [case[key] for key in axes]
        if "error" in case:
            errors.append(f"{', '.join(named)}: {case['error'].splitlines()[0]}")
            continue
        speeds = (f"{case[key].median:,.0f}" for key in ("tokens_per_s", "bare_tokens_per_s"))
        more = (case[key] for key in ("mfu", "peak_gib", "bare_peak_gib"))
        shown = ("-" if value is None else f"{value:.1f}" for value in more)
        rows.append((*named, *speeds, f"{case['ratio'].median:.3f}", *shown))
    apart = [case["loss_difference"] for case in cases if "error" not in case]
    about = f"medians of {repeats} turns of {STEPS} steps, after {WARM_UP} that are not measured"
    if apart:
        about += f"; losses of both: at most {max(apart):.1e} apart (relative)"
    return Report([*align(rows, left=3), *errors, "", about], {"cases": cases}, device.type)
