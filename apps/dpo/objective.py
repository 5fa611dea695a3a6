"""The loss of direct preference optimisation, and what is logged of it.

For a pair with log-ratio r of the policy and r0 of the reference (log p(chosen answer) - log
p(rejected answer), of their tokens after the prompt), the margin is beta (r - r0) and the loss
-log sigmoid(margin); the mean of a global batch is over its pairs.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from apps.dpo.reference import Reference, held_out_ratios, log_ratios
from apps.main.run import Run
from apps.main.train import Objective
from lingua.base.hashing import batch_hash, hash_bits, key_of
from lingua.data.loader import MicroBatch
from lingua.parallel.gradients import set_gradient_sync
from lingua.parallel.tensors import to_device


class Preferences(Objective):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        # lingua plan traces a step without data: one pair, and zeros as ratios of the reference.
        self.reference = None if run.data is None else Reference(run)

    def gradients(self, batch: list[MicroBatch], valid: Tensor) -> tuple[Tensor, Tensor]:
        run, args = self.run, self.run.args
        reference, n_pairs = self.reference, 1
        if reference is not None:
            n_pairs = reference.count(run.progress.position, args.data.step_rows)
        noise = key_of(args.seed, "noise", run.progress.step + 1) if args.model.dropout else None
        loss = torch.zeros((), device=run.device)
        hashed = torch.zeros((), dtype=torch.int64, device=run.device)
        for i, micro in enumerate(batch):
            ids, tokens, targets, starts = (
                t.to(run.device, non_blocking=True) for t in micro.tensors()
            )
            known = torch.zeros(len(starts), starts.shape[1] // 2)
            if reference is not None:
                known = reference.known_ratios(micro.row_ids, starts.shape[1] // 2)
            last = i == len(batch) - 1
            set_gradient_sync(run.model, args.distributed.grad_sync, last)
            random = {} if noise is None else {"noise": hash_bits(noise, ids)}
            ratios, is_pair = log_ratios(run.model, tokens, targets, starts, **random)
            margins = args.dpo.beta * (ratios - to_device(known, run.device))
            part = torch.where(is_pair, -F.logsigmoid(margins), 0.0).sum() / n_pairs
            part.backward()
            loss += part.detach()
            hashed += batch_hash(ids, tokens, targets)
            run.report.add("accuracy", ((margins > 0) & is_pair).sum() / n_pairs)
            run.report.add("margin", torch.where(is_pair, margins, 0.0).sum() / n_pairs)
        return loss, hashed

    def measure(self) -> float | None:
        """Measure and report the held-out loss, accuracy and margin of every source. Returns the
        mean loss of their pairs, None where nothing is held out."""
        run, every = self.run, [np.empty(0)]
        assert self.reference is not None
        for name, windows in run.data.held_out.items():
            ratios = np.concatenate(held_out_ratios(run, run.model, windows))
            margins = run.args.dpo.beta * (ratios - np.concatenate(self.reference.held_out[name]))
            losses = np.logaddexp(0, -margins)
            numbers = {
                "loss": losses.mean(),
                "accuracy": (margins > 0).mean(),
                "margin": margins.mean(),
            }
            numbers = {key: float(value) for key, value in numbers.items()}
            run.report.validation(run.progress.step, name, numbers)
            every.append(losses)
        losses = np.concatenate(every)
        return float(losses.mean()) if len(losses) else None
