"""Small runs for tests: the real `train(app, args)` in real ranks, on a little text.

What a test changes inside a rank (a wrong row, a NaN, moments lost on resume) is a `Twist` of the
app: the fault that the test must notice.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor

from apps.main import app as main_app
from apps.main.config import TrainArgs
from apps.main.train import Objective, build_run, train
from apps.main.transformer import build
from lingua.app import App, Built
from lingua.base.errors import UserError
from lingua.config.load import load
from lingua.data import IGNORE
from lingua.data.loader import MicroBatch
from lingua.data.rows import Data, OpenData, Rows
from lingua.data.sources import TextData, open_sources, prepare_sources
from lingua.data.stream import RowStream
from lingua.optim.whole import WholeOptimizer
from lingua.parallel.init import canonical_name, named_tensors
from lingua.parallel.mesh import dp_degree, dp_rank
from lingua.parallel.signals import StopRequest
from lingua.parallel.tensors import as_shard, local, whole
from lingua.run import samples
from lingua.run.run import Run
from lingua.run.start import start_run
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import Tokenizer
from tests.apps.meshes import Sizes, mesh
from tests.data.prepared import is_held_out
from tests.ranks import Ranks

# Nothing divides: 7 rows, 259 tokens, 22 features, a hidden size of 53.
GLOBAL_BATCH = 7
SMALL: dict[str, Any] = {
    "name": "small",
    "device": "cpu",
    "steps": 20,
    "stop_at": 6,
    "logging.freq": 1,
    "data.sources": "{one: 2, two: 1}",
    "data.seq_len": 16,
    "data.batch_size": GLOBAL_BATCH,
    "data.global_batch_size": GLOBAL_BATCH,
    "model.vocab_size": 259,
    "model.dim": 22,
    "model.n_heads": 4,
    "model.n_kv_heads": 2,
    "model.head_dim": 6,
    "model.n_layers": 2,
    "model.multiple_of": 1,
    "model.ffn_dim_multiplier": 0.92,
    "optim.lr": 4e-3,
    "optim.warmup": 3,
    "distributed.model_dtype": "fp32",
    "validation.tokens": 200,
}


def arguments(overrides: dict[str, Any], app: App = main_app) -> TrainArgs:
    words = [f"{key}={value}" for key, value in (SMALL | overrides).items()]
    return load(app.config, [f"app={app.path}", *words])[0]


def prepare(settings: dict[str, Any], app: App = main_app) -> dict[str, Any]:
    """The settings, whose text is tokenized: a rank of the pool is daemonic, and starts nobody."""
    args = arguments(settings, app)
    tokenizer = build_tokenizer(args.data.tokenizer)
    prepare_sources(args.data, tokenizer, str, processes=1, validation=args.validation.sources)
    return settings


def write_sources(folder: Path) -> None:
    """Two sources of words, each with a document that is held out by its own hash."""
    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefghijklmnop", k=chance.randint(2, 7))) for _ in range(80)]
    for name, n in (("one", 120), ("two", 60)):
        documents = [" ".join(chance.choices(words, k=9)) for _ in range(n)]
        if not any(map(is_held_out, documents)):
            more = (f"{i} {' '.join(words[:9])}" for i in range(1000))
            documents.append(next(filter(is_held_out, more)))
        lines = [json.dumps({"text": document}) + "\n" for document in documents]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    prepare({"data.root_dir": folder})


@dataclass
class Twist:
    """What one or all ranks do differently. Each is a fault, or an input that text never gives."""

    wrong_token_on: int | None = None  # rank that reads another token in step 3; -1: all ranks
    some_targets: bool = False  # ignore a number of targets that differs from row to row
    without_targets: int | None = None  # step whose rows have no target
    shift: int = 0  # the position that rows are read from is off by this
    own_divisor: bool = False  # every rank divides by its own targets, as averaging ranks do
    count_padding: bool = False  # padding rows count as rows
    lose_moments: bool = False  # on resume
    # (rank, seconds of CPU that it works longer in a step, seconds that its rows take)
    slow: tuple[int, float, float] = (-1, 0.0, 0.0)
    # where each rank writes, into a file of its own, the rows that it puts through forward
    consumed: Path | None = None

    def apply(self, app: App) -> App:
        """The app with these faults, for the program of this process."""
        samples.SAMPLE_TOKENS = 8  # that a finished run shows
        data = TwistedData(self, app.data or TextData())
        objective = functools.partial(TwistedObjective, self, app.objective or Objective)
        return dataclasses.replace(app, data=data, objective=objective)


class TwistedRows:
    def __init__(self, twist: Twist, rows: Rows) -> None:
        self.twist, self.untwisted = twist, rows
        self.seq_len, self.n_views = rows.seq_len, rows.n_views

    def rows(self, positions: np.ndarray) -> np.ndarray:
        rows = self.untwisted.rows(positions + self.twist.shift)
        time.sleep(self.twist.slow[2] if self.twist.slow[0] == int(os.environ["RANK"]) else 0)
        if self.twist.wrong_token_on in (-1, int(os.environ["RANK"])):
            of_step_3 = positions // GLOBAL_BATCH == 2
            rows[np.flatnonzero(of_step_3)[:1], 5] ^= 1
        return rows

    def is_target(self, positions: np.ndarray) -> np.ndarray | None:
        counts = np.ones((len(positions), self.seq_len + self.n_views - 1), bool)
        if self.twist.without_targets is not None:
            counts[positions // GLOBAL_BATCH == self.twist.without_targets - 1] = False
            return counts
        if not self.twist.some_targets:
            return self.untwisted.is_target(positions + self.twist.shift)
        for i, row in enumerate(positions.tolist()):
            counts[i, 1 :: row + 2] = False
            if row in (0, 1):
                counts[i] = False
        return counts


class TwistedData:
    def __init__(self, twist: Twist, data: Data) -> None:
        self.twist, self.data = twist, data
        self.check, self.prepare = data.check, data.prepare

    def open(self, args: Any, tokenizer: Tokenizer) -> OpenData:
        data = self.data.open(args, tokenizer)
        documents = data.documents and (lambda at: data.documents(at + self.twist.shift))
        rows = TwistedRows(self.twist, data.rows)
        return dataclasses.replace(data, rows=rows, documents=documents)


class TwistedObjective:
    def __init__(self, twist: Twist, objective: Callable[[Run], Objective], run: Run) -> None:
        run.data = dataclasses.replace(run.data, rows=run.data.rows.untwisted)
        self.twist, self.run, self.objective = twist, run, objective(run)
        self.measure, self.count = self.objective.measure, self.objective.count
        self.try_measuring = self.objective.try_measuring
        if twist.lose_moments and run.progress.step:
            for t in moments_of(run.optimizer):
                t.zero_()

    def gradients(self, batch: list[MicroBatch], valid: Tensor) -> tuple[Tensor, Tensor]:
        if self.twist.consumed is not None:
            self._write(batch)
        if self.twist.count_padding:
            for micro in batch:
                micro.row_ids.clamp_(min=0)
        work_s = self.twist.slow[1] if self.twist.slow[0] == int(os.environ["RANK"]) else 0
        end = time.thread_time() + work_s
        while time.thread_time() < end:
            pass
        loss, hashed = self.objective.gradients(batch, valid)
        if self.twist.own_divisor:
            counted = sum(self.count(micro).sum() for micro in batch)
            factor = valid.sum() / (counted * dp_degree(self.run.mesh))
            for p in self.run.model.parameters():
                if p.grad is not None:
                    local(p.grad).mul_(factor)
            loss = loss * factor
        return loss, hashed

    def _write(self, batch: list[MicroBatch]) -> None:
        rows = {
            row + self.twist.shift: digest(torch.cat((micro.tokens[i][None], micro.targets[:, i])))
            for micro in batch
            for i, row in enumerate(micro.row_ids.tolist())
            if row >= 0
        }
        line = {"step": self.run.progress.step + 1, "dp": dp_rank(self.run.mesh), "rows": rows}
        self.twist.consumed.mkdir(exist_ok=True)
        with (self.twist.consumed / f"{os.environ['RANK']}.jsonl").open("a") as f:
            f.write(json.dumps(line) + "\n")  # closing it hands it to the system: it outlives us


def moments_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What it remembers of earlier gradients: its state without the count of its steps."""
    states = optimizer.state.values()
    return [local(t) for state in states for name, t in state.items() if name != "step"]


def masked(row_ids: Tensor, targets: Tensor) -> None:
    """In place: none of rows 0 and 1 count, and of row i the targets at every (i+2)-th position."""
    for i, row in enumerate(row_ids.tolist()):
        if row >= 0:
            targets[:, i, :: row + 2] = IGNORE
        if row in (0, 1):
            targets[:, i] = IGNORE


@dataclass
class Interrupt:
    """A builder of a model that sends its own process a signal: in a forward, or during a save."""

    number: int
    forward: int | None  # the first is 1; None: in the first save
    rank: int | None  # the one that gets it; None: all

    def __call__(self, args: TrainArgs) -> Built:
        built = build(args)
        if self.rank not in (None, int(os.environ["RANK"])):
            return built
        if self.forward is None:
            checkpoints = Path(args.dump_dir) / "checkpoints"
            threading.Thread(target=self._in_a_save, args=(checkpoints,), daemon=True).start()
            return built
        forwards = itertools.count(1)

        def forward_pre(module: Any, inputs: Any) -> None:
            if len(inputs) > 1 and next(forwards) == self.forward:  # not while text is generated
                os.kill(os.getpid(), self.number)

        built.module.register_forward_pre_hook(forward_pre)
        return built

    def _in_a_save(self, checkpoints: Path) -> None:
        while not any(checkpoints.glob("*.tmp-*")):
            time.sleep(0.0001)
        os.kill(os.getpid(), self.number)


@dataclass
class NanAt:
    """A builder of the model whose loss of one row is not a number."""

    row: list[int]  # its inputs

    def __call__(self, args: TrainArgs) -> Built:
        built = build(args)
        row = torch.tensor(self.row)

        def spoil(module: Any, inputs: tuple[Tensor, ...], output: Any) -> Any:
            if not isinstance(output, tuple):
                return output
            bad = (inputs[0] == row).all(1).any()
            return output._replace(sums=output.sums * torch.where(bad, float("nan"), 1.0))

        built.module.register_forward_hook(spoil)
        return built


def train_here(
    overrides: dict[str, Any],
    build: Callable[[Any], Built] | None = None,
    twist: Twist | None = None,
    app: App = main_app,
    look: bool = False,
) -> dict[str, Any]:
    """The real program in this process: its UserError, its initial weights, and where it is to
    `look` the state before its first step."""
    seen: dict[str, Any] = {"error": None, "weights": {}}
    twisted = (twist or Twist()).apply(app)

    def build_observed(args: TrainArgs) -> Built:
        built = (build or app.build)(args)
        reset = getattr(built.module, "reset_parameters", lambda: None)

        def reset_and_look() -> None:  # the whole model's comes after that of every part
            reset()
            seen["weights"] = digests(dict(named_tensors(built.module)))

        built.module.reset_parameters = reset_and_look
        return built

    def objective(run: Run) -> Objective:
        made = twisted.objective(run)
        if look:
            seen["state"] = state_of(run)
        return made

    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    try:
        observed = dataclasses.replace(twisted, build=build_observed, objective=objective)
        train(observed, arguments(overrides, app))
    except UserError as error:
        seen["error"] = str(error)
    seen["compiled"] = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
    return seen


@contextmanager
def opened(app: App, overrides: dict[str, Any]) -> Iterator[Run]:
    """A run before its first step."""
    args = arguments(overrides, app)
    with StopRequest() as stop, ExitStack() as open_parts:
        started = start_run(app, args, stop, open_parts)
        yield build_run(app, args, started, stop, open_parts)


def state_of(run: Run) -> dict[str, Any]:
    """Digests of all tensors by the names they are saved by, given without the program's help; the
    settings of each parameter, and the progress."""
    tensors = {f"model.{canonical_name(n)}": t for n, t in run.model.named_parameters()}
    tensors |= {f"model.{name}": t for name, t in run.model.named_buffers()}
    if run.app.merges_into:  # of a model with adapters these alone
        tensors = {n: t for n, t in tensors.items() if n.endswith((".down", ".up"))}
    groups = {}
    whole_state = isinstance(getattr(run.optimizer, "inner", None), WholeOptimizer)
    for group in run.optimizer.param_groups:
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names", "lr")}
        for name, p in zip(group["param_names"], group["params"], strict=True):
            groups[name] = settings
            for key, value in run.optimizer.state.get(p, {}).items():
                is_part = value.ndim and not isinstance(value, DTensor) and not whole_state
                tensors[f"optim.{key}.{name}"] = as_shard(value, p) if is_part else value
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, digests(tensors))  # a rank may hold all of a state
    return {
        "tensors": {name: digest for rank in everyone for name, digest in rank.items()},
        "groups": groups,
        "progress": dataclasses.asdict(run.progress),
    }


def digest(t: Tensor) -> str:
    t = t.detach().contiguous()
    return hashlib.sha256(
        repr((t.shape, t.dtype)).encode() + t.reshape(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    """A hash of the bits of each whole tensor, wherever its parts are."""
    return {name: digest(whole(t)) for name, t in tensors.items()}


@dataclass
class Outcome:
    """What one start of a run left, in its ranks and on disk."""

    dump_dir: Path
    ranks: list[dict[str, Any]]  # of train_here

    def copy(self, folder: Path) -> "Outcome":
        """The run as it is on disk now, in another folder, to go on from there."""
        return Outcome(shutil.copytree(self.dump_dir, folder), [])

    @property
    def error(self) -> str | None:
        [error] = {rank["error"] for rank in self.ranks}  # all ranks meet the same
        return error

    @property
    def weights(self) -> dict[str, str]:
        """Digests of the initial ones, which all ranks must agree on."""
        first, *others = (rank["weights"] for rank in self.ranks)
        assert all(other == first for other in others)
        return first

    @property
    def restored(self) -> dict[str, Any]:
        """The state before the first step of a start that looked, on which all ranks agree."""
        first, *others = (rank["state"] for rank in self.ranks)
        assert all(other == first for other in others)
        return first

    def _lines(self, file: str) -> list[dict[str, Any]]:
        path = self.dump_dir / file
        text = path.read_text() if path.exists() else ""  # nothing was measured, or no text shown
        return [json.loads(line) for line in text.splitlines()]

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [line for line in self._lines("metrics.jsonl") if "event" not in line]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [line for line in self._lines("metrics.jsonl") if "event" in line]

    @property
    def held_out(self) -> list[dict[str, Any]]:
        return self._lines("metrics.validation.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        return self._lines("samples.jsonl")

    @property
    def log(self) -> str:
        return (self.dump_dir / "train.log").read_text()

    def column(self, key: str) -> list[Any]:
        return [line[key] for line in self.lines]

    def checkpoint(self, step: int) -> Path:
        return self.dump_dir / "checkpoints" / f"{step:010d}"

    def state(self, step: int) -> dict[str, Any]:
        return json.loads((self.checkpoint(step) / "train_state.json").read_text())

    def tensors(self, step: int) -> dict[str, Tensor]:
        """Of a checkpoint, as torch's own converter reads them."""
        converted = self.dump_dir / f"{step}.pt"
        dcp_to_torch_save(self.checkpoint(step), converted)
        return torch.load(converted, weights_only=True)


@dataclass
class Runs:
    """Starts runs in ranks, over the config SMALL. `refused`: the program ends with a UserError."""

    ranks: Ranks
    text: Path
    folder: Path
    numbers: Any = field(default_factory=itertools.count)

    def config(self, sizes: Sizes, overrides: dict[str, Any]) -> dict[str, Any]:
        return {"data.root_dir": self.text} | mesh(sizes) | overrides

    def train(
        self,
        sizes: Sizes,
        overrides: dict[str, Any] | None = None,
        *,
        build: Callable[[Any], Built] | None = None,
        twist: Twist | None = None,
        app: App = main_app,
        look: bool = False,
        dump_dir: Path | None = None,
        refused: bool = False,
    ) -> Outcome:
        dump_dir = dump_dir or self.folder / str(next(self.numbers))
        config = self.config(sizes, {"dump_dir": dump_dir} | (overrides or {}))
        ranks = self.ranks.run(math.prod(sizes[:3]), train_here, config, build, twist, app, look)
        run = Outcome(dump_dir, ranks)
        assert (run.error is not None) == refused, run.error
        return run

    def stream(self) -> RowStream:
        args = arguments({"data.root_dir": self.text})
        data = args.data
        sources = open_sources(data, build_tokenizer(data.tokenizer))
        return RowStream(sources, data.sources, data.seq_len, data.n_views, args.seed)


def relative(found: list[float], expected: list[float]) -> list[float]:
    """Differences of each, as a share of what is expected."""
    return [abs(a / b - 1) for a, b in zip(found, expected, strict=True)]


# How far, relative, two runs that are the same one may be from each other.
TOLERANCES = {"loss": 1e-5, "first grad_norm": 1e-5, "grad_norm": 1e-4}


def differs(run: Outcome, other: Outcome, margin: float = 1) -> list[str]:
    """What makes two runs not the same one: hashes, losses, gradient norms; empty when nothing.
    With a `margin` only what is beyond the tolerances by that factor."""
    first, *later = relative(run.column("grad_norm"), other.column("grad_norm"))
    far = {
        "loss": max(relative(run.column("loss"), other.column("loss"))),
        "first grad_norm": first,
        "grad_norm": max(later, default=0.0),
    }
    equal = run.column("batch_hash") == other.column("batch_hash")
    found = [name for name, value in far.items() if value > margin * TOLERANCES[name]]
    return found if equal else ["batch_hash", *found]
