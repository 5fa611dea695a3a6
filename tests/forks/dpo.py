"""Direct preference optimisation (Rafailov et al., 2023, arXiv 2305.18290): pairs of answers for
data, a frozen reference under the same sharding, and a loss of its own.

A row is `data.seq_len` tokens: the prompt with the chosen answer in its first half, with the
rejected one in its second, each padded; only answers are targets. The reference is the checkpoint
that the run starts from, `checkpoint.init_ckpt_path`.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from apps.main import app as main_app
from apps.main.config import TrainArgs as MainArgs
from apps.main.run import Run
from apps.main.train import Objective
from lingua.config.schema import Guarded
from lingua.data import IGNORE
from lingua.data.args import DataArgs
from lingua.data.loader import MicroBatch
from lingua.data.rows import OpenData
from lingua.data.stream import permute, round_keys
from lingua.errors import UserError
from lingua.hashing import batch_hash, key_of
from lingua.inference.trained import Trained, open_trained
from lingua.parallel.gradients import set_gradient_sync
from lingua.parallel.mesh import dp_degree, dp_rank, dp_sum_
from lingua.tokenizer import Tokenizer

HELD_OUT = 8  # pairs at the end of the file that are measured and not trained on


@dataclass
class DPOArgs:
    pairs: Guarded[str] = "pairs.jsonl"  # file of {"prompt": ..., "chosen": ..., "rejected": ...}
    beta: Guarded[float] = 0.1  # weight of the distance to the reference

    def validate(self) -> Iterator[tuple[str, str]]:
        if not self.beta > 0:
            yield "beta", "must be above 0"


@dataclass
class TrainArgs(MainArgs):
    data: DataArgs = field(default_factory=lambda: DataArgs(sources={"pairs": 1.0}))
    dpo: DPOArgs = field(default_factory=DPOArgs)


# ------------------------------------------------------------------------------------------- data


def read_pairs(path: str) -> list[dict[str, str]]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"dpo.pairs = {path}: cannot be read ({error.strerror})") from None
    pairs = [json.loads(line) for line in lines]
    for number, pair in enumerate(pairs, 1):
        if missing := {"prompt", "chosen", "rejected"} - pair.keys():
            raise UserError(f"{path}:{number}: must have the key {min(missing)}")
    return pairs


class PairRows:
    n_views = 2

    def __init__(self, args: TrainArgs, tokenizer: Tokenizer) -> None:
        self.seq_len, self.seed, half = args.data.seq_len, args.seed, args.data.seq_len // 2
        pairs = read_pairs(args.dpo.pairs)
        self.tokens = np.zeros((len(pairs), self.seq_len + 1), np.int64)
        self.targets = np.zeros(self.tokens.shape, bool)
        for i, pair in enumerate(pairs):
            for begin, answer in ((0, "chosen"), (half, "rejected")):
                prompt = tokenizer.encode(pair["prompt"], bos=True)
                ids = [*prompt, *tokenizer.encode(pair[answer], eos=True)][:half]
                self.tokens[i, begin : begin + len(ids)] = ids
                self.targets[i, begin + len(prompt) : begin + len(ids)] = True
        self.n = len(pairs) - HELD_OUT

    def index(self, positions: np.ndarray) -> np.ndarray:
        """The pair of each position: every pair once an epoch, in a random order."""
        epochs, k = np.divmod(positions, self.n)
        keys = np.stack([round_keys(self.seed, "pairs", e) for e in epochs.tolist()], axis=1)
        return permute(k.astype(np.uint64), np.uint64(self.n), keys).astype(np.int64)

    def rows(self, positions: np.ndarray) -> np.ndarray:
        return self.tokens[self.index(positions)]

    def is_target(self, positions: np.ndarray) -> np.ndarray:
        return self.targets[self.index(positions)]


class PairData:
    def check(self, args: TrainArgs, tokenizer: Tokenizer) -> None:
        if len(read_pairs(args.dpo.pairs)) <= HELD_OUT:
            raise UserError(f"dpo.pairs = {args.dpo.pairs}: must have more than {HELD_OUT} pairs")
        if args.checkpoint.init_ckpt_path is None:
            raise UserError("checkpoint.init_ckpt_path: must be given, it is the reference")

    def prepare(self, args: TrainArgs, tokenizer: Tokenizer, report: Callable[[str], None]) -> None:
        pass

    def open(self, args: TrainArgs, tokenizer: Tokenizer) -> OpenData:
        reference = open_reference(args).checkpoint
        fingerprints = {
            "dpo.pairs": str(key_of(Path(args.dpo.pairs).read_text(encoding="utf-8"))),
            "dpo.reference": str(key_of(sorted(map(str, reference.files.items())))),
        }
        return OpenData(PairRows(args, tokenizer), fingerprints)


# ------------------------------------------------------------------------------------------- loss


def open_reference(args: TrainArgs) -> Trained:
    return open_trained("checkpoint.init_ckpt_path", args.checkpoint.init_ckpt_path, app)


class Preferences(Objective):
    def __init__(self, run: Run) -> None:
        self.run = run
        trained = open_reference(run.args)
        self.reference = trained.load(run.args.distributed, run.mesh)
        self.reference.requires_grad_(False)

    def margins(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """beta (log-ratio of the chosen answer - that of the rejected one), float32 B."""
        tokens, targets = tokens.unflatten(1, (2, -1)), targets.unflatten(1, (2, -1))
        ratios = torch.zeros(targets.shape[:2], device=tokens.device)  # B 2
        for sign, model in ((1, self.run.model), (-1, self.reference)):
            losses = model(tokens.flatten(0, 1), targets.flatten(0, 1)[None], per_token=True)
            ratios = ratios - sign * losses.view(targets.shape).sum(-1)
        return self.run.args.dpo.beta * (ratios[:, 0] - ratios[:, 1])

    def gradients(self, batch: list[MicroBatch], valid: Tensor) -> tuple[Tensor, Tensor]:
        run, rows = self.run, self.run.args.data.global_batch_size
        loss = torch.zeros((), device=run.device)
        hashed = torch.zeros((), dtype=torch.int64, device=run.device)
        for i, micro in enumerate(batch):
            ids, tokens, targets = (t.to(run.device) for t in micro.tensors())
            last = i == len(batch) - 1
            set_gradient_sync(run.model, run.args.distributed.grad_sync, last)
            margins = self.margins(tokens, targets[0])
            part = torch.where(ids >= 0, -F.logsigmoid(margins), 0.0).sum() / rows
            part.backward()
            loss += part.detach()
            hashed += batch_hash(ids, tokens, targets)
            run.report.add("accuracy", ((margins > 0) & (ids >= 0)).sum() / rows)
        return loss, hashed

    @torch.no_grad()
    def measure(self) -> float:
        run, rows = self.run, self.run.data.rows
        mine = slice(rows.n + dp_rank(run.mesh), None, dp_degree(run.mesh))
        tokens, allowed = (torch.from_numpy(t[mine]) for t in (rows.tokens, rows.targets))
        targets = torch.where(allowed, tokens, IGNORE)[:, 1:]
        margins = self.margins(tokens[:, :-1].to(run.device), targets.to(run.device))
        sums = torch.stack(((-F.logsigmoid(margins)).sum(), (margins > 0).sum(), margins.sum()))
        loss, accuracy, margin = (dp_sum_(sums, run.mesh) / HELD_OUT).tolist()
        numbers = {"loss": loss, "accuracy": accuracy, "margin": margin}
        run.report.validation(run.progress.step, "pairs", numbers)
        return loss


app = replace(main_app, path=__name__, config=TrainArgs, data=PairData(), objective=Preferences)
