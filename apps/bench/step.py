"""Tokens per second, MFU and peak memory of a training step, beside a bare PyTorch loop of the same
model: each shape, compiled and not, with each attention.

The two take the same steps on the same rows, in turns, each with a model of its own, so that the
peak is that of one. The bare loop is that of `apps.bench loop`, with its blocks compiled where the
program's are. What a key on the command line sets is not varied: `config=FILE` measures that model,
`distributed.compile=true` leaves out eager. `reference=nanogpt` measures forward and backward on a
CPU beside another model, see apps.bench.nanogpt.
"""

import gc
import io
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from apps.bench import nanogpt
from apps.bench.launch import one_process, read_lines, watched
from apps.bench.loop import Batch, Reference
from apps.bench.report import Report, quotients, spread
from apps.bench.turns import clock, take_round
from apps.main.config import TrainArgs
from apps.main.train import train
from apps.main.transformer import build
from lingua.app import choose_app
from lingua.base.errors import UserError
from lingua.base.format import align
from lingua.config.load import load, meta_lingua
from lingua.monitor.metrics import mfu
from lingua.monitor.peaks import peak_flops
from lingua.parallel.launch import pick_device

CONFIGS = Path(__file__).parents[1] / "main" / "configs"
SMALL = f"config={CONFIGS / 'small.yaml'}"
LLAMA = ["model.vocab_size=128256", "data.seq_len=4096", "data.batch_size=2"]
LLAMA += ["data.global_batch_size=2", "distributed.activation_checkpointing=none"]
# Each at its width, with as many layers as a GPU of 80 GB trains without checkpointing.
SHAPES = {
    "cuda": {
        "1B": [f"config={CONFIGS / 'llama_1B.yaml'}", *LLAMA],
        "3B": [f"config={CONFIGS / 'llama_3B.yaml'}", *LLAMA, "model.n_layers=14"],
        "8B": [f"config={CONFIGS / 'llama_8B.yaml'}", *LLAMA, "model.n_layers=6"],
    },
    "cpu": {"small": [SMALL, "model.vocab_size=1024"]},
}
# Keys that are varied where the command line does not set them.
VARIED = {
    "cuda": {
        "distributed.compile": ("false", "true"),
        "model.attn_impl": ("sdpa", "varlen", "flex_attention", "fmha"),
    },
    "cpu": {"distributed.compile": ("false", "true"), "model.attn_impl": ("sdpa",)},
}
WARM_UP, STEPS = 5, 10  # steps of a turn: not measured, and measured


def measure(keys: list[str], repeats: int) -> Report:
    named = dict(key.partition("=")[::2] for key in keys)
    if (reference := named.get("reference", "nanogpt")) != "nanogpt":
        raise UserError(f"reference = {reference}: must be nanogpt")
    if "reference" in named:
        config = [] if "config" in named else [SMALL]
        return nanogpt.measure(config + [k for k in keys if "reference=" not in k], repeats)
    device = pick_device(named.get("device", "auto"), one_process("a step"))
    shapes = {Path(named["config"]).stem: []} if "config" in named else SHAPES[device.type]
    varied = VARIED[device.type]
    axes = [(named[key],) if key in named else values for key, values in varied.items()]
    cases: list[dict[str, Any]] = []
    for shape, *values in product(shapes, *axes):
        chosen = dict(zip(varied, values, strict=True))
        case = {"shape": shape, **chosen}
        print(", ".join(f"{key} {value}" for key, value in case.items()), file=sys.stderr)
        words = [f"{key}={value}" for key, value in chosen.items()]
        torch.compiler.reset()  # else what differs from the last shape would be compiled as dynamic
        try:
            numbers = measure_case([*shapes[shape], *keys, *words], device, repeats)
        except (UserError, RuntimeError) as error:  # the others are still measured
            numbers = {"error": str(error)}
        cases.append(case | numbers)
    if all("error" in case for case in cases):
        raise UserError(cases[0]["error"])
    return report(cases, repeats, device)


def report(cases: list[dict[str, Any]], repeats: int, device: torch.device) -> Report:
    axes = ["shape", *VARIED[device.type]]
    rows = [(*axes, "tokens/s", "bare loop", "ratio", "MFU, %", "peak GiB", "bare loop")]
    errors = []
    for case in cases:
        named = [case[key] for key in axes]
        if "error" in case:
            errors.append(f"{', '.join(named)}: {case['error'].splitlines()[0]}")
            continue
        speeds = (f"{case[key].median:,.0f}" for key in ("tokens_per_s", "bare_tokens_per_s"))
        more = (case[key] for key in ("mfu", "peak_gib", "bare_peak_gib"))
        shown = ("-" if value is None else f"{value:.1f}" for value in more)
        rows.append((*named, *speeds, f"{case['ratio'].median:.3f}", *shown))
    apart = max(case["loss_difference"] for case in cases if "error" not in case)
    about = f"medians of {repeats} turns of {STEPS} steps, after {WARM_UP} that are not measured"
    about += f"; losses of both: at most {apart:.1e} apart (relative)"
    return Report([*align(rows, left=3), *errors, "", about], {"cases": cases}, device.type)


@dataclass
class Steps:
    """Steps that were taken, by the program or by the bare loop."""

    args: TrainArgs  # resolved
    batches: list[Batch]  # what each step trained on
    losses: dict[int, float]  # the loss by step, where one was logged
    seconds: float = 0.0  # duration of the measured steps
    peak_bytes: int = 0  # peak memory of tensors on CUDA; 0 on the CPU


def measure_case(keys: list[str], device: torch.device, repeats: int) -> dict[str, Any]:
    """Spreads over the turns, and the largest relative difference of the losses."""
    program = program_turn(keys, device)
    args, bare = program.args, partial(bare_turn, program.args, program.batches, device)
    turns = [(program, bare())]
    sides = {"program": partial(program_turn, keys, device), "bare": bare}
    for i in range(1, repeats):
        taken = take_round(sides, i)
        turns.append((taken["program"].result, taken["bare"].result))
    tokens = STEPS * args.data.step_rows * args.data.seq_len
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = peak_flops(name, args.distributed.dtype)
    seconds, bare_seconds = ([turn.seconds for turn in side] for side in zip(*turns, strict=True))
    speed = spread(tokens / s for s in seconds)
    return {
        "tokens_per_s": speed,
        "bare_tokens_per_s": spread(tokens / s for s in bare_seconds),
        "ratio": quotients(bare_seconds, seconds),
        "mfu": mfu(build(args).flops_per_token, speed.median, peak),
        "peak_gib": max(program.peak_bytes for program, _ in turns) / 2**30 or None,
        "bare_peak_gib": max(bare.peak_bytes for _, bare in turns) / 2**30 or None,
        "loss_difference": max(
            abs(bare.losses[step] - loss) / max(loss, 1e-9)  # on the stub driver all are zero
            for program, bare in turns
            for step, loss in program.losses.items()
        ),
    }


class Stopwatch:
    """Seconds and peak bytes of the measured steps of a turn, which begins with free memory."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self.peak_bytes = device, 0.0, 0
        gc.collect()  # the model of the turn before
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def __call__(self, i: int) -> None:
        """Called when i steps of the turn have been enqueued."""
        is_cuda = self.device.type == "cuda"
        if i == WARM_UP:
            if is_cuda:
                torch.cuda.reset_peak_memory_stats(self.device)
            self.seconds = -clock(self.device)[0]
        elif i == WARM_UP + STEPS:
            self.seconds += clock(self.device)[0]
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) if is_cuda else 0


def program_turn(keys: list[str], device: torch.device) -> Steps:
    watch = Stopwatch(device)
    try:
        with redirect_stdout(io.StringIO()):
            steps = run_steps([*keys, f"logging.freq={WARM_UP}"], WARM_UP + STEPS, watch)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return replace(steps, seconds=watch.seconds, peak_bytes=watch.peak_bytes)


def bare_turn(args: TrainArgs, batches: list[Batch], device: torch.device) -> Steps:
    watch = Stopwatch(device)
    module = build(args).module
    if args.distributed.compile:
        for block in module.get_submodule("layers").children():
            block.compile()
    reference = Reference(module, args, device)
    reference.run(1, batches[:WARM_UP])
    watch(WARM_UP)
    reference.run(1 + WARM_UP, batches[WARM_UP:])
    watch(WARM_UP + STEPS)
    losses = {step: loss.item() for step, loss in reference.losses.items()}
    return Steps(args, batches, losses, watch.seconds, watch.peak_bytes)


class _Enough(Exception):
    """All steps are taken."""


def run_steps(keys: list[str], n: int, at: Callable[[int], None]) -> Steps:
    """Take n steps of the training program with this command line, on a text of its own.

    `at(i)` is called for i from 0 to n, when i steps have been enqueued. The process group is left
    to the caller. Raises KeyboardInterrupt where a signal asks to stop.
    """
    with TemporaryDirectory() as folder:
        (Path(folder) / "text").mkdir()
        text = json.dumps({"text": "A step reads rows of this document, again and again. "})
        (Path(folder) / "text" / "text.jsonl").write_text(f"{text}\n" * 2000)
        fixed = [
            f"dump_dir={folder}/run", f"data.root_dir={folder}", "data.sources={text: 1.0}",
            "data.source_files={}", "data.tokenizer={name: bytes, path: null}",
            "checkpoint.path=null", "checkpoint.dump.every=0", "checkpoint.eval.every=0",
            "validation.every=0",
        ]  # fmt: skip
        app = choose_app(keys)
        args: TrainArgs = load(app.config, [*keys, *fixed], foreign=meta_lingua)[0]
        if args.model.vocab_size == -1:
            raise UserError("model.vocab_size: must be given, since no tokenizer's file is read")
        args.steps, args.stop_at = max(args.steps, n + 1), None
        batches: list[Batch] = []

        def look(step: int, left: int, tokens: Tensor, targets: Tensor) -> None:
            if step > len(batches):
                at(step - 1)
                if step > n:
                    raise _Enough
                batches.append([])
            batches[-1].append((tokens, targets))

        with suppress(_Enough):
            train(watched(app, look), args)
            raise KeyboardInterrupt  # a signal ended it
        lines = read_lines(args.folder / "metrics.jsonl")
        return Steps(args, batches, {line["step"]: line["loss"] for line in lines})
