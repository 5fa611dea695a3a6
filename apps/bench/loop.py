"""What the training loop costs over a bare forward, backward and step of the same model.

The real loop, `apps.main.train.train`, runs as it is. A hook on its model stops it after every few
steps while the reference takes the same steps on the same rows: the two alternate in one process,
so that other work of the machine affects both equally. There are two copies of the reference; the
difference between them is the resolution of the measurement.

The reference is what a plain script would be: forward and backward of every micro-batch, torch's
`clip_grad_norm_`, torch's fused AdamW, `zero_grad`. Its rows are in memory, and it has no mesh,
FSDP, schedule, batch hash, metrics, non-finite guard or agreement on stopping. It trains the same
run from the same weights: that its losses are the loop's shows that both did the same work. Saving
and evaluating are left out, as the loop's own throughput leaves them out.

The reference sees no documents. So where the loop trains on conversations (config=apps/sft/configs/
debug.yaml), the ratio is that of instruction tuning to plain training of the same rows.
"""

import json
import sys
import time
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from apps.bench.report import Report, Spread, spread
from apps.main.config import TrainArgs
from apps.main.train import train
from lingua.app import App, Built, choose_app
from lingua.config.load import load
from lingua.config.meta_lingua import META_LINGUA
from lingua.data import IGNORE
from lingua.data.loader import micro_steps
from lingua.errors import UserError
from lingua.format import align
from lingua.init import init_parameters
from lingua.optim.optimizer import build_optimizer
from lingua.optim.schedule import lr_at
from lingua.parallel.launch import detect_launch, pick_device

WARM_UP = 4  # turns that are not measured

Batch = list[tuple[Tensor, Tensor]]  # tokens and targets of each micro-batch of a step
Seconds = np.ndarray  # float64 [2]: of wall time, and of processor time of all threads


def measure(keys: list[str], repeats: int = 8) -> Report:
    """`keys` is the command line of the training program. A round is the steps from one log line
    to the next; `repeats` rounds are measured."""
    app = choose_app(keys)
    args: TrainArgs = load(app.config, keys, foreign=META_LINGUA)[0]
    launch = detect_launch()
    if launch.world_size != 1:
        raise UserError("the loop is measured on one process")
    if args.distributed.compile or args.distributed.activation_checkpointing != "none":
        raise UserError(
            "the reference is a plain model: set distributed.compile=false and "
            "distributed.activation_checkpointing=none"
        )
    turns = Turns(app, pick_device(args.device, launch), repeats, args.logging.freq)
    with TemporaryDirectory() as folder:
        args.dump_dir, args.checkpoint.path = folder, None
        args.checkpoint.dump.every = args.checkpoint.eval.every = args.validation.every = 0
        args.stop_at = turns.steps
        args.steps = max(args.steps, args.stop_at + 1)  # the end of a run evaluates
        console = Path(folder) / "console.txt"
        with console.open("w", encoding="utf-8") as file, redirect_stdout(file):
            train(replace(app, build=turns.build), args)
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line}
    return report(args, turns, losses)


def clock(device: torch.device) -> Seconds:
    """The time, once the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return np.array([time.perf_counter(), time.process_time()])


# --------------------------------------------------------------------------------- the reference


class Reference:
    """A plain model and its optimizer, stepped by hand."""

    def __init__(self, module: nn.Module, args: TrainArgs, device: torch.device) -> None:
        init_parameters(module, args.seed, device)
        self.args, self.model, self.device = args, module, device
        self.parameters = list(module.parameters())
        self.optimizer = AdamW(build_optimizer(module, args.optim).param_groups, fused=True)
        self.losses: dict[int, Tensor] = {}

    def run(self, first_step: int, batches: list[Batch]) -> Seconds:
        """Take a step on each of the batches; returns the time it took."""
        valid = [
            torch.stack([(targets != IGNORE).sum((1, 2)) for _, targets in batch]).sum(0)
            for batch in batches
        ]
        start = clock(self.device)
        for step, batch, targets in zip(count(first_step), batches, valid, strict=False):
            for group in self.optimizer.param_groups:
                group["lr"] = lr_at(step - 1, self.args.optim, self.args.steps)
            self.losses[step] = self._step(batch, targets)
        return clock(self.device) - start

    def _step(self, batch: Batch, valid: Tensor) -> Tensor:
        total = torch.zeros((), device=self.device)
        for tokens, targets in batch:
            with self._precision():
                sums, *_ = self.model(tokens, targets)
            loss = (sums / valid).sum()
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.parameters, self.args.optim.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def _precision(self) -> AbstractContextManager:
        dtype = self.args.distributed.dtype
        return nullcontext() if dtype == torch.float32 else torch.autocast(self.device.type, dtype)


# ------------------------------------------------------------------------------------- the turns


class Turns:
    """Halts the loop for the reference, and keeps everyone's time.

    The loop is halted where the last micro-step of a turn begins, and its time is from one halt to
    the next. What its data threads read ahead while it is halted is nobody's time: for the debug
    config 0.06 ms a step.
    """

    def __init__(self, app: App, device: torch.device, rounds: int, freq: int) -> None:
        # On CUDA a change of turn waits for the device, so it comes but once a round.
        self.turn_steps = freq if device.type == "cuda" else 1
        self.turns_per_round = freq // self.turn_steps
        self.steps = (WARM_UP + rounds * self.turns_per_round) * self.turn_steps
        self.app, self.device, self.rounds = app, device, rounds
        self.references: list[Reference] = []
        self.loop: list[Seconds] = []  # of each turn
        self.copies: list[list[Seconds]] = [[], []]  # of each turn, for each copy
        self._batches: list[Batch] = [[]]  # of this turn
        self._step = 0  # steps whose last micro-step has begun
        self._since: Seconds | None = None

    def build(self, args: TrainArgs) -> Built:
        """The loop's own model, and beside it the two copies that the reference trains."""
        models = (self.app.build(args).module for _ in range(2))
        self.references = [Reference(model, args, self.device) for model in models]
        data = args.data
        self.n_micro, _ = micro_steps(data.step_rows, 1, data.batch_size, args.grad_acc_steps)
        built = self.app.build(args)
        built.module.register_forward_pre_hook(self._before_micro_step)
        return built

    def _before_micro_step(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not module.training:  # text is generated
            return
        self._batches[-1].append((inputs[0], inputs[1]))
        if len(self._batches[-1]) < self.n_micro:
            return
        self._step += 1
        if len(self._batches) < self.turn_steps:
            self._batches.append([])
            return
        now = clock(self.device)
        if self._since is not None:
            self.loop.append(now - self._since)
        turn = self._step // self.turn_steps
        for copy in (0, 1) if turn % 2 else (1, 0):  # neither always follows the loop
            first_step = self._step - self.turn_steps + 1
            self.copies[copy].append(self.references[copy].run(first_step, self._batches))
        self._batches = [[]]
        measured = turn - WARM_UP
        if measured > 0 and measured % self.turns_per_round == 0:
            print(f"round {measured // self.turns_per_round} of {self.rounds}", file=sys.stderr)
        self._since = clock(self.device)

    def by_round(self) -> np.ndarray:
        """Seconds [rounds, 3, 2]: of the loop and the two copies; wall time and processor time."""
        # The first halt only starts the loop's clock, so the loop has one turn less.
        turns = np.array([self.loop[WARM_UP - 1 :], *(copy[WARM_UP:] for copy in self.copies)])
        rounds = turns.shape[1] // self.turns_per_round
        turns = turns[:, : rounds * self.turns_per_round]
        return turns.reshape(3, rounds, self.turns_per_round, 2).sum(2).transpose(1, 0, 2)


# ------------------------------------------------------------------------------------ the result


def report(args: TrainArgs, turns: Turns, losses: dict[int, float]) -> Report:
    if len(turns.loop) < WARM_UP + turns.turns_per_round - 1:
        raise UserError("the loop was stopped before a round was complete")
    seconds = turns.by_round()
    steps = turns.turns_per_round * turns.turn_steps
    bare = seconds[:, 1:].mean(1)
    overhead = 100 * (seconds[:, 0] / bare - 1)
    control = 100 * (seconds[:, 2] / seconds[:, 1] - 1)
    expected = turns.references[0].losses
    results = {
        "overhead_percent": spread(overhead[:, 0]),
        "control_percent": spread(control[:, 0]),
        "overhead_cpu_percent": spread(overhead[:, 1]),
        "control_cpu_percent": spread(control[:, 1]),
        "loop_step_ms": spread(1000 * seconds[:, 0, 0] / steps),
        "reference_step_ms": spread(1000 * bare[:, 0] / steps),
    }
    names = (
        "overhead, % of time",
        "  two copies of the reference apart",
        "overhead, % of processor time",
        "  two copies of the reference apart",
        "loop, ms a step",
        "reference, ms a step",
    )
    rows = [("", "median", "quartiles", "range")]
    for name, (key, values) in zip(names, results.items(), strict=True):
        rows.append((name, *_cells(values, "+.2f" if key.endswith("percent") else ".1f")))
    apart = max(abs(expected[step].item() / loss - 1) for step, loss in losses.items())
    ratio = spread(bare[:, 0] / seconds[:, 0, 0])
    lines = [
        *align(rows, left=1),
        "",
        f"{len(seconds)} rounds of {steps} steps, taken in turns of {turns.turn_steps}; a step is "
        f"{args.data.global_batch_size} rows of {args.data.seq_len} tokens, micro-steps: "
        f"{turns.n_micro};",
        f"losses of loop and reference: at most {apart:.1e} apart (relative)"
        if args.data.document_mask == "none"
        else "documents of a row do not see each other in the loop; in the reference they do",
        f"tokens/s of the loop over the reference's: {ratio.median:.3f} ({ratio.low:.3f} to "
        f"{ratio.high:.3f})",
    ]
    found: dict[str, Any] = {
        "tokens_ratio": ratio,
        "rounds_s": seconds.tolist(),
        "steps_per_round": steps,
    }
    return Report(lines, results | found | {"loss_difference": apart}, turns.device.type)


def _cells(s: Spread, form: str) -> tuple[str, str, str]:
    quartiles, extremes = (f"{a:{form}} to {b:{form}}" for a, b in ((s.q1, s.q3), (s.low, s.high)))
    return f"{s.median:{form}}", quartiles, extremes
