"""What the training loop costs over a bare forward, backward and step of the same model.

The real loop, `apps.main.train.train`, runs as it is. A hook on its model stops it after every few
steps while the reference takes the same steps on the same rows. How far two copies of the reference
are apart is the resolution. A round is the steps from one log line to the next.

The reference is a plain script: forward and backward of every micro-batch, torch's
`clip_grad_norm_` and fused AdamW, on rows in memory, without mesh, FSDP, batch hash, metrics, guard
or agreement on stopping. It trains the same run: equal losses show that both did the same work. The
reference sees no documents, so for config=apps/sft/configs/debug.yaml the ratio is that of
instruction tuning to plain training. Saving and evaluating are left out.
"""

import sys
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from apps.bench.launch import one_process, read_config, read_lines, watched
from apps.bench.report import Report, quotients, spread
from apps.bench.turns import clock
from apps.main.config import TrainArgs
from apps.main.train import train
from lingua.app import App, Built, choose_app
from lingua.base.errors import UserError
from lingua.base.format import align
from lingua.data import IGNORE
from lingua.optim.optimizer import build_optimizer
from lingua.optim.schedule import lr_at
from lingua.parallel.init import init_parameters
from lingua.parallel.launch import pick_device

WARM_UP = 4  # turns that are not measured

Batch = list[tuple[Tensor, Tensor]]  # tokens and targets of each micro-batch of a step


def measure(keys: list[str], repeats: int) -> Report:
    app = choose_app(keys)
    args: TrainArgs = read_config(keys, app)
    device = pick_device(args.device, one_process("the loop"))
    if args.distributed.compile or args.distributed.activation_checkpointing != "none":
        plain = "distributed.compile=false and distributed.activation_checkpointing=none"
        raise UserError(f"the reference is a plain model: set {plain}")
    turns = Turns(app, device, repeats, args.logging.freq)
    with TemporaryDirectory() as folder:
        args.dump_dir, args.checkpoint.path = folder, None
        args.checkpoint.dump.every = args.checkpoint.eval.every = args.validation.every = 0
        args.stop_at = turns.steps
        args.steps = max(args.steps, args.stop_at + 1)  # the end of a run evaluates
        console = Path(folder) / "console.txt"
        with console.open("w", encoding="utf-8") as file, redirect_stdout(file):
            train(watched(replace(app, build=turns.build), turns.before_micro_batch), args)
        lines = read_lines(Path(folder) / "metrics.jsonl")
    if len(turns.loop) < WARM_UP + turns.turns_per_round - 1:
        raise UserError("the loop was stopped before a round was complete")
    return report(args, turns, {line["step"]: line["loss"] for line in lines})


class Reference:
    """A plain model and its optimizer, stepped by hand."""

    def __init__(self, module: nn.Module, args: TrainArgs, device: torch.device) -> None:
        init_parameters(module, args.seed, device)
        self.args, self.model, self.device = args, module, device
        self.parameters = list(module.parameters())
        self.optimizer = AdamW(build_optimizer(module, args.optim).param_groups, fused=True)
        self.losses: dict[int, Tensor] = {}

    def run(self, first_step: int, batches: list[Batch]) -> np.ndarray:
        """Take a step on each of the batches; returns the time it took, as `clock` does."""
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
        dtype, kind = self.args.distributed.dtype, self.device.type
        for tokens, targets in batch:
            with torch.autocast(kind, dtype, enabled=dtype != torch.float32):
                sums, *_ = self.model(tokens, targets)
            loss = (sums / valid).sum()
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.parameters, self.args.optim.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


class Turns:
    """Halts the loop for the reference where the last micro-step of a turn begins, and times both.
    What data threads read ahead meanwhile is not timed: for the debug config 0.06 ms a step."""

    def __init__(self, app: App, device: torch.device, rounds: int, freq: int) -> None:
        # On CUDA a change of turn waits for the device, so it comes but once a round.
        self.turn_steps = freq if device.type == "cuda" else 1
        self.turns_per_round = freq // self.turn_steps
        self.steps = (WARM_UP + rounds * self.turns_per_round) * self.turn_steps
        self.app, self.device, self.rounds = app, device, rounds
        self.references: list[Reference] = []
        self.loop: list[np.ndarray] = []  # time of each turn
        self.copies: list[list[np.ndarray]] = [[], []]  # time of each turn of each reference
        self.batches: list[Batch] = []  # what the steps of this turn train on
        self.n_micro = 0  # micro-batches of a step
        self.since: np.ndarray | None = None  # when the loop last went on

    def build(self, args: TrainArgs) -> Built:
        """The loop's model; beside it the two copies that the reference trains are made."""
        models = (self.app.build(args).module for _ in range(2))
        self.references = [Reference(model, args, self.device) for model in models]
        return self.app.build(args)

    def before_micro_batch(self, step: int, left: int, tokens: Tensor, targets: Tensor) -> None:
        first_step = (step - 1) // self.turn_steps * self.turn_steps + 1
        self.batches += [[] for _ in range(step - first_step + 1 - len(self.batches))]
        self.batches[-1].append((tokens, targets))
        if left or step % self.turn_steps:
            return
        self.n_micro = len(self.batches[-1])
        now = clock(self.device)
        if self.since is not None:
            self.loop.append(now - self.since)
        turn = step // self.turn_steps
        for copy in (0, 1) if turn % 2 else (1, 0):  # neither always follows the loop
            self.copies[copy].append(self.references[copy].run(first_step, self.batches))
        self.batches = []
        measured = turn - WARM_UP
        if measured > 0 and measured % self.turns_per_round == 0:
            print(f"round {measured // self.turns_per_round} of {self.rounds}", file=sys.stderr)
        self.since = clock(self.device)

    def by_round(self) -> np.ndarray:
        """Seconds [rounds, 3, 2]: of the loop and the two copies; wall time and processor time."""
        # The first halt only starts the loop's clock, so the loop has one turn less.
        turns = np.array([self.loop[WARM_UP - 1 :], *(copy[WARM_UP:] for copy in self.copies)])
        n = self.turns_per_round
        turns = turns[:, : turns.shape[1] // n * n]
        return turns.reshape(3, -1, n, 2).sum(2).transpose(1, 0, 2)


def report(args: TrainArgs, turns: Turns, losses: dict[int, float]) -> Report:
    """`losses` are those that the loop logged, by step."""
    seconds = turns.by_round()
    steps = turns.turns_per_round * turns.turn_steps
    bare = seconds[:, 1:].mean(1)
    overhead = 100 * (seconds[:, 0] / bare - 1)
    control = 100 * (seconds[:, 2] / seconds[:, 1] - 1)
    table: dict[str, tuple[str, np.ndarray]] = {
        "overhead_percent": ("overhead, % of time", overhead[:, 0]),
        "control_percent": ("  two copies of the reference apart", control[:, 0]),
        "overhead_cpu_percent": ("overhead, % of processor time", overhead[:, 1]),
        "control_cpu_percent": ("  two copies of the reference apart", control[:, 1]),
        "loop_step_ms": ("loop, ms a step", 1000 * seconds[:, 0, 0] / steps),
        "reference_step_ms": ("reference, ms a step", 1000 * bare[:, 0] / steps),
    }
    results: dict[str, Any] = {}
    rows: list[tuple[str, ...]] = [("", "median", "quartiles", "range")]
    for key, (name, values) in table.items():
        results[key] = s = spread(values)
        form = "+.2f" if key.endswith("percent") else ".1f"
        median, extremes = s.cells(form)
        rows.append((name, median, f"{s.q1:{form}} to {s.q3:{form}}", extremes))
    expected = turns.references[0].losses
    apart = max(abs(expected[step].item() / loss - 1) for step, loss in losses.items())
    results["tokens_ratio"] = ratio = quotients(bare[:, 0], seconds[:, 0, 0])
    median, extremes = ratio.cells(".3f")
    lines = [
        *align(rows, left=1),
        "",
        f"{len(seconds)} rounds of {steps} steps, taken in turns of {turns.turn_steps}; a step is "
        f"{args.data.global_batch_size} rows of {args.data.seq_len} tokens, micro-steps: "
        f"{turns.n_micro};",
        f"losses of loop and reference: at most {apart:.1e} apart (relative)"
        if args.data.document_mask == "none"
        else "documents of a row do not see each other in the loop; in the reference they do",
        f"tokens/s of the loop over the reference's: {median} ({extremes})",
    ]
    results |= {"rounds_s": seconds.tolist(), "steps_per_round": steps, "loss_difference": apart}
    return Report(lines, results, turns.device.type)
