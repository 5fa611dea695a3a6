"""What the training loop costs over a bare forward, backward and step of the same model.

The loop of `apps.main.train` waits after every few steps while the reference takes the same steps
on the same rows. How far two copies of the reference are apart is the resolution. A round is as
many steps as from one log line to the next. Saving and evaluating are left out.

The reference is a plain script: forward and backward of every micro-batch, torch's
`clip_grad_norm_` and fused AdamW, on rows in memory. Equal losses show that both did the same work.
It sees no documents, so for config=apps/sft/configs/debug.yaml the ratio is that of instruction
tuning to plain training.
"""

import sys
from collections.abc import Sequence
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from apps.bench.launch import logged_losses, read_config, training
from apps.bench.report import Report, spread
from apps.bench.turns import clock
from apps.main.config import TrainArgs
from lingua.app import App, choose_app
from lingua.base.errors import UserError
from lingua.data import IGNORE
from lingua.data.loader import MicroBatch
from lingua.optim.optimizer import build_optimizer
from lingua.optim.schedule import lr_at
from lingua.parallel.init import init_parameters
from lingua.parallel.launch import detect_launch, pick_device

WARM_UP = 4  # turns that are not measured

Batch = Sequence[MicroBatch]  # micro-batches of a step


class Reference:
    """A plain model and its optimizer, stepped by hand."""

    def __init__(self, module: nn.Module, args: TrainArgs, device: torch.device) -> None:
        init_parameters(module, args.seed, device)
        self.args, self.model, self.device = args, module, device
        self.parameters = list(module.parameters())
        self.optimizer = AdamW(build_optimizer(module, args.optim).param_groups, fused=True)
        self.losses: list[Tensor] = []  # of every step so far

    def run(self, batches: Sequence[Batch]) -> np.ndarray:
        """Take a step on each of the batches; returns the time it took, as `clock` does."""
        batches = [[micro.to(self.device) for micro in batch] for batch in batches]
        masks = [torch.cat([m.targets != IGNORE for m in batch], dim=1) for batch in batches]
        valid = [mask.sum((1, 2)) for mask in masks]  # targets of each view
        start = clock(self.device)
        for batch, counts in zip(batches, valid, strict=True):
            for group in self.optimizer.param_groups:
                group["lr"] = lr_at(len(self.losses), self.args.optim, self.args.steps)
            self.losses.append(self._step(batch, counts))
        return clock(self.device) - start

    def _step(self, batch: Batch, valid: Tensor) -> Tensor:
        total = torch.zeros((), device=self.device)
        dtype, kind = self.args.distributed.dtype, self.device.type
        for micro in batch:
            with torch.autocast(kind, dtype, enabled=dtype != torch.float32):
                sums, *_ = self.model(micro.tokens, micro.targets)
            loss = (sums / valid).sum()
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.parameters, self.args.optim.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def measure(keys: list[str], repeats: int) -> Report:
    app = choose_app(keys)
    args: TrainArgs = read_config(keys, app)
    device = pick_device(args.device, detect_launch())
    if args.distributed.compile or args.distributed.activation_checkpointing != "none":
        plain = "distributed.compile=false and distributed.activation_checkpointing=none"
        raise UserError(f"the reference is a plain model: set {plain}")
    # On CUDA a change of turn waits for the device, so it comes but once a round.
    turn_steps = args.logging.freq if device.type == "cuda" else 1
    with TemporaryDirectory() as folder:
        args.dump_dir, args.checkpoint.path = folder, None
        references = [Reference(app.build(args).module, args, device) for _ in range(2)]
        seconds = take_turns_with_loop(app, args, references, turn_steps, repeats)
        losses = logged_losses(args)
    expected = references[0].losses
    apart = max(abs(expected[step - 1].item() / loss - 1) for step, loss in losses.items())
    bare = seconds[:, 1:].mean(1)
    overhead = 100 * (seconds[:, 0] / bare - 1)
    control = 100 * (seconds[:, 2] / seconds[:, 1] - 1)
    freq = args.logging.freq
    figures = {
        "overhead, % of time": overhead[:, 0],
        "  two copies of the reference apart": control[:, 0],
        "overhead, % of processor time": overhead[:, 1],
        "  its two copies apart": control[:, 1],
        "loop, ms a step": 1000 * seconds[:, 0, 0] / freq,
        "reference, ms a step": 1000 * bare[:, 0] / freq,
        "tokens/s of the loop over the reference's": bare[:, 0] / seconds[:, 0, 0],
    }
    spreads = {name: spread(values) for name, values in figures.items()}
    rows = [{"": name, "median": s, "quartiles": s.quartiles()} for name, s in spreads.items()]
    notes = [
        f"{repeats} rounds of {freq} steps, taken in turns of {turn_steps}; a step is "
        f"{args.data.global_batch_size} rows of {args.data.seq_len} tokens, micro-steps: "
        f"{args.micro_steps(1)[0]};",
        f"losses of loop and reference: at most {apart:.1e} apart (relative)"
        if args.data.document_mask == "none"
        else "documents of a row do not see each other in the loop; in the reference they do",
    ]
    results = {"rounds_s": seconds.tolist(), "loss_difference": apart}
    return Report(rows, notes, results)


def take_turns_with_loop(
    app: App, args: TrainArgs, references: Sequence[Reference], turn_steps: int, repeats: int
) -> np.ndarray:
    """Seconds [rounds, 3, 2]: of the loop and of two references; wall time and processor time. What
    data threads read ahead in the references' turns is not timed: for the debug config 0.06 ms a
    step."""
    per_round, device = args.logging.freq // turn_steps, references[0].device
    turns: list[list[np.ndarray]] = []
    batches: list[Batch] = []  # of the loop's turn
    with training(app, args, (WARM_UP + repeats * per_round) * turn_steps) as (run, steps):
        since = clock(device)
        for step in steps:
            batches.append(run.batch)
            if step % turn_steps:
                continue
            loop = clock(device) - since
            order = (0, 1) if len(turns) % 2 else (1, 0)  # neither always follows the loop
            copies = {i: references[i].run(batches) for i in order}
            turns.append([loop, copies[0], copies[1]])
            batches = []
            n_rounds, rest = divmod(len(turns) - WARM_UP, per_round)
            if n_rounds > 0 and rest == 0:
                print(f"round {n_rounds} of {repeats}", file=sys.stderr)
            since = clock(device)
    return np.array(turns[WARM_UP:]).reshape(repeats, per_round, 3, 2).sum(1)
