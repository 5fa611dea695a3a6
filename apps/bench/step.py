"""Tokens per second, MFU and peak memory of a training step, beside a bare PyTorch loop of the same
model: each shape, compiled and not, with each attention.

The two take the same steps on the same rows, in turns, each with a model of its own. The bare loop
is that of `apps.bench loop`, with its blocks compiled where the program's are. What a key on the
command line sets is not varied: `config=FILE` measures that model, `distributed.compile=true`
leaves out eager. `reference=nanogpt` measures what apps.bench.nanogpt describes.
"""

import gc
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from apps.bench.launch import logged_losses, training
from apps.bench.loop import Batch, Reference
from apps.bench.report import Report, quotients, spread
from apps.bench.turns import clock, take_turns
from apps.main.config import TrainArgs
from apps.main.transformer import build
from lingua.app import choose_app
from lingua.base.errors import UserError
from lingua.config.load import load, meta_lingua
from lingua.monitor.metrics import mfu
from lingua.monitor.peaks import peak_flops
from lingua.parallel.alone import temporary_process_group
from lingua.parallel.launch import detect_launch, pick_device

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
    "cpu": {"small": [f"config={CONFIGS / 'small.yaml'}", "model.vocab_size=1024"]},
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
    device = pick_device(named.get("device", "auto"), detect_launch())
    shapes = {Path(named["config"]).stem: []} if "config" in named else SHAPES[device.type]
    varied = VARIED[device.type]
    axes = [(named[key],) if key in named else values for key, values in varied.items()]
    cases: list[dict[str, Any]] = []
    errors: list[str] = []
    for shape, *values in product(shapes, *axes):
        case = {"shape": shape, **dict(zip(varied, values, strict=True))}
        title = ", ".join(f"{key} {value}" for key, value in case.items())
        words = [f"{key}={case[key]}" for key in varied]
        torch.compiler.reset()  # else what differs from the last shape would be compiled as dynamic
        try:
            numbers = measure_case([*shapes[shape], *keys, *words], device, repeats, title)
        except (UserError, RuntimeError) as error:  # the others are still measured
            errors.append(f"{title}: {error}")
            continue
        cases.append(case | numbers)
    if not cases:
        raise UserError(errors[0])
    about = f"medians of {repeats} turns of {STEPS} steps, after {WARM_UP} that are not measured; "
    notes = [*(error.splitlines()[0] for error in errors), f"{about}apart: losses (relative)"]
    return Report(cases, notes, {"errors": errors})


def measure_case(keys: list[str], device: torch.device, repeats: int, title: str) -> dict[str, Any]:
    """Spreads over the turns, and the largest relative difference of the losses."""
    taken: list[Steps] = []  # by the program, which begins
    differences: list[float] = []

    def program() -> Stopwatch:
        watch = Stopwatch(device)
        with temporary_process_group():
            taken.append(run_steps([*keys, f"logging.freq={WARM_UP}"], WARM_UP + STEPS, watch))
        return watch

    def bare() -> Stopwatch:
        watch, steps = Stopwatch(device), taken[-1]
        module = build(steps.args).module
        if steps.args.distributed.compile:
            for block in module.get_submodule("layers").children():
                block.compile()
        reference = Reference(module, steps.args, device)
        reference.run(steps.batches[:WARM_UP])
        watch(WARM_UP)
        reference.run(steps.batches[WARM_UP:])
        watch(WARM_UP + STEPS)
        for step, loss in steps.losses.items():
            apart = abs(reference.losses[step - 1].item() - loss)
            differences.append(apart / max(loss, 1e-9))  # on the stub driver all are zero
        return watch

    turns = take_turns({"program": program, "bare": bare}, repeats, title, warm_up=0)
    watches = turns["program"].results, turns["bare"].results
    seconds, bare_seconds = ([watch.seconds for watch in side] for side in watches)
    peak_gib, bare_peak_gib = (max(w.peak_bytes for w in side) / 2**30 or None for side in watches)
    args, name = taken[0].args, torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    tokens = STEPS * args.data.step_rows * args.data.seq_len
    speed, peak = spread(tokens / s for s in seconds), peak_flops(name, args.distributed.dtype)
    return {
        "tokens/s": speed,
        "bare loop": spread(tokens / s for s in bare_seconds),
        "ratio": quotients(bare_seconds, seconds),
        "MFU, %": mfu(build(args).flops_per_token, speed.median, peak),
        "GiB": peak_gib,
        "GiB of it": bare_peak_gib,
        "apart": max(differences),
    }


class Stopwatch:
    """Seconds and peak bytes of the measured steps of a turn, which begins with free memory. Called
    when i steps of the turn have been enqueued."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self.peak_bytes = device, 0.0, 0
        gc.collect()  # the model of the turn before
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def __call__(self, i: int) -> None:
        if i in (WARM_UP, WARM_UP + STEPS):
            self.seconds = clock(self.device)[0] - self.seconds
            if self.device.type == "cuda":
                self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
                torch.cuda.reset_peak_memory_stats(self.device)


class Steps(NamedTuple):
    """Steps that the training program took."""

    args: TrainArgs  # resolved
    batches: list[Batch]  # what each step trained on
    losses: dict[int, float]  # the loss by step, where one was logged


def run_steps(keys: list[str], n: int, at: Callable[[int], None]) -> Steps:
    """Take n steps of the training program with this command line, on a text of its own.

    `at(i)` is called for i from 0 to n, when i steps have been enqueued. The process group is left
    to the caller. Raises KeyboardInterrupt where a signal asks to stop.
    """
    with TemporaryDirectory() as folder:
        text = Path(folder, "text", "text.jsonl")
        text.parent.mkdir()
        document = json.dumps({"text": "A step reads rows of this document, again and again. "})
        text.write_text(f"{document}\n" * 2000)
        fixed = [
            f"dump_dir={folder}/run", f"data.root_dir={folder}", "data.sources={text: 1.0}",
            "data.source_files={}", "data.tokenizer={name: bytes, path: null}",
            "checkpoint.path=null",
        ]  # fmt: skip
        app = choose_app(keys)
        args: TrainArgs = load(app.config, [*keys, *fixed], foreign=meta_lingua)[0]
        if args.model.vocab_size == -1:
            raise UserError("model.vocab_size: must be given, since no tokenizer's file is read")
        batches: list[Batch] = []
        with training(app, args, n) as (run, steps):
            at(0)
            for step in steps:
                batches.append(run.batch)
                at(step)
        return Steps(args, batches, logged_losses(args))
