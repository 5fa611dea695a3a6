"""Small runs of apps.main.train for tests: the real `train(args)` in real ranks, on a little text.

What a test changes inside a rank (a wrong row, a NaN, moments lost on resume) is a `Twist`: the
fault that the test must notice.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor

import apps.main.setup as setup
import apps.main.train as program
from apps.main.train import Built, Run, TrainArgs, accumulate, build, set_up, train
from lingua.config.load import load
from lingua.data import IGNORE
from lingua.data.loader import Loader, MicroBatch
from lingua.data.prepare.sources import open_sources, prepare_sources
from lingua.data.stream import RowStream
from lingua.errors import UserError
from lingua.init import named_tensors
from lingua.parallel.mesh import dp_degree, dp_rank
from lingua.signals import StopRequest
from lingua.tokenizer import build_tokenizer
from tests.ranks import Ranks

Sizes = tuple[int, int, int]  # of dp_replicate, dp_shard, tp

# Every topology with the largest micro-batch of its own, and a way to sync gradients.
TOPOLOGIES: dict[Sizes, tuple[int, str]] = {
    (1, 1, 1): (7, "last"),
    (2, 1, 1): (1, "replica_last"),
    (1, 2, 1): (3, "last"),
    (1, 1, 2): (2, "last"),
    (2, 2, 1): (1, "every"),
    (2, 1, 2): (2, "last"),
    (1, 2, 2): (4, "every"),
    (2, 2, 2): (1, "last"),
    (1, 3, 1): (1, "last"),
    (3, 1, 2): (2, "replica_last"),
}

# Nothing divides: 7 rows, 259 tokens, 22 features, a hidden size of 53.
GLOBAL_BATCH = 7
SMALL: dict[str, Any] = {
    "name": "small",
    "device": "cpu",
    "steps": 20,
    "stop_at": 10,
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


def name_of(sizes: Sizes) -> str:
    return "x".join(map(str, sizes))


def mesh(sizes: Sizes) -> dict[str, int]:
    keys = ("dp_replicate", "dp_shard", "tp_size")
    return {f"distributed.{key}": size for key, size in zip(keys, sizes, strict=True)}


def arguments(overrides: dict[str, Any]) -> TrainArgs:
    args, _ = load(TrainArgs, [f"{key}={value}" for key, value in (SMALL | overrides).items()])
    return args


def write_text(folder: Path) -> None:
    """Two sources of words, tokenized here: a rank of the pool is daemonic, and starts nobody."""
    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefghijklmnop", k=chance.randint(2, 7))) for _ in range(80)]
    for name, n in (("one", 120), ("two", 60)):
        documents = [" ".join(chance.choices(words, k=9)) for _ in range(n)]
        lines = [json.dumps({"text": document}) + "\n" for document in documents]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    args = arguments({"data.root_dir": folder})
    prepare_sources(args.data, build_tokenizer(args.data.tokenizer), report=str)


# ------------------------------------------------------------------------------- in the ranks


@dataclass
class Twist:
    """What one or all ranks do differently. Each is a fault, or an input the loader never gives."""

    rows: Callable[[list[MicroBatch], int], list[MicroBatch]] | None = None  # of (batch, step)
    rank: int | None = None  # the one that gets those rows; None: all
    shift: int = 0  # the position that rows are read from is off by this
    own_divisor: bool = False  # every rank divides by its own targets, as averaging ranks do
    lose_moments: bool = False  # on resume
    unknown_setting: str | None = None  # of the optimizer's groups, to an older version that saves
    sample_tokens: int = 8  # that a finished run shows
    # where each rank writes, into a file of its own, the rows that it puts through forward
    consumed: Path | None = None

    def apply(self) -> Any:
        """A context in which the program of this process is twisted."""
        twist, rank = self, int(os.environ["RANK"])
        setting_up: dict[str, Any] = {}
        given: dict[str, Any] = {"SAMPLE_TOKENS": self.sample_tokens}

        class TwistedLoader(Loader):
            def __init__(self, *args: Any, position: int, **kwargs: Any) -> None:
                super().__init__(*args, position=position + twist.shift, **kwargs)

            def __next__(self) -> list[MicroBatch]:
                batch = super().__next__()
                step = (self.position - twist.shift) // self._global_batch_size
                changes = twist.rows is not None and twist.rank in (None, rank)
                return twist.rows(batch, step) if changes else batch

        setting_up["Loader"] = TwistedLoader
        if self.own_divisor:
            given["count_targets"] = lambda batch, stopping, mesh: (
                sum((m.targets != IGNORE).sum((1, 2)) for m in batch) * dp_degree(mesh),
                False,
            )
        if self.lose_moments:

            def load_without_moments(checkpoint: Any, tensors: dict[str, Tensor]) -> None:
                load_tensors(checkpoint, tensors)
                for name, t in tensors.items():
                    if name.startswith(("optim.exp_avg", "optim.momentum")):
                        t.zero_()

            load_tensors = setup.load_tensors
            setting_up["load_tensors"] = load_without_moments
        if self.unknown_setting is not None:

            def state_of_an_older_version(*args: Any, **kwargs: Any) -> dict[str, Any]:
                state = state_to_save(*args, **kwargs)
                for group in state["param_groups"]:
                    group.pop(twist.unknown_setting, None)
                return state

            state_to_save = program.state_to_save
            given["state_to_save"] = state_of_an_older_version
        if self.consumed is not None:
            given["accumulate"] = self._write_and_accumulate
        changes = ExitStack()
        changes.enter_context(mock.patch.multiple(program, **given))
        changes.enter_context(mock.patch.multiple(setup, **setting_up))
        return changes

    def _write_and_accumulate(self, run: Run, batch: list[MicroBatch], *rest: Any) -> Any:
        rows = {
            row: digest(torch.cat((micro.tokens[i][None], micro.targets[:, i])))
            for micro in batch
            for i, row in enumerate(micro.row_ids.tolist())
            if row >= 0
        }
        line = {"step": run.progress.step + 1, "dp": dp_rank(run.mesh), "rows": rows}
        self.consumed.mkdir(exist_ok=True)
        with (self.consumed / f"{os.environ['RANK']}.jsonl").open("a") as f:
            f.write(json.dumps(line) + "\n")  # closing it hands it to the system: it outlives us
        return accumulate(run, batch, *rest)


def one_wrong_token(batch: list[MicroBatch], step: int) -> list[MicroBatch]:
    """In one row of step 3."""
    if step == 3:
        batch[0].tokens[0, 5] ^= 1
    return batch


def some_targets(batch: list[MicroBatch], step: int) -> list[MicroBatch]:
    """Ignores a number of targets that differs from row to row, and those of whole rows."""
    for micro in batch:
        masked(micro.row_ids, micro.targets)
    return batch


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
            if next(forwards) == self.forward:
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
    build: Callable[[Any], Built] = build,
    twist: Twist | None = None,
) -> dict[str, Any]:
    """The real program in this process: what it refuses, and the weights it began with."""
    seen: dict[str, Any] = {"error": None, "weights": {}}

    def build_observed(args: TrainArgs) -> Built:
        built = build(args)
        reset = getattr(built.module, "reset_parameters", lambda: None)

        def reset_and_look() -> None:  # the whole model's comes after that of every part
            reset()
            seen["weights"] = digests(dict(named_tensors(built.module)))

        built.module.reset_parameters = reset_and_look
        return built

    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with (twist or Twist()).apply():
        try:
            train(arguments(overrides), build_observed)
        except UserError as error:
            seen["error"] = str(error)
    seen["compiled"] = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
    return seen


def restore_here(
    overrides: dict[str, Any], build: Callable[[Any], Built] = build
) -> dict[str, Any]:
    """The state of a resumed run before its first step, named without the program's help."""
    with closing(StopRequest()) as stop, ExitStack() as open_parts:
        run = set_up(arguments(overrides), build, stop, open_parts)
        run.report.close()
        return state_of(run)


def resume_here(overrides: dict[str, Any], twist: Twist | None = None) -> dict[str, Any]:
    """The same state, on the way through a start that then goes on."""
    seen: dict[str, Any] = {}

    def look_first(args: TrainArgs, run: Run, stop: StopRequest) -> bool:
        seen.update(state_of(run))
        return take_steps(args, run, stop)

    take_steps = program.take_steps
    with (twist or Twist()).apply(), mock.patch.object(program, "take_steps", look_first):
        train(arguments(overrides))
    return seen


def state_of(run: Run) -> dict[str, Any]:
    tensors = {f"model.{name}": t for name, t in run.model.named_parameters()}
    tensors |= {f"model.{name}": t for name, t in run.model.named_buffers()}
    groups = {}
    for group in run.optimizer.param_groups:
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names", "lr")}
        for name, p in zip(group["param_names"], group["params"], strict=True):
            groups[name] = settings
            for key, value in run.optimizer.state[p].items():
                tensors[f"optim.{key}.{name}"] = value
    return {
        "tensors": digests(tensors),
        "groups": groups,
        "progress": dataclasses.asdict(run.progress),
        "position": run.loader.position,
    }


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def digest(t: Tensor) -> str:
    t = t.detach().contiguous()
    return hashlib.sha256(repr((t.shape, t.dtype)).encode() + t.numpy().tobytes()).hexdigest()


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    """A hash of the bits of each whole tensor, wherever its parts are."""
    return {name: digest(whole(t)) for name, t in tensors.items()}


# ------------------------------------------------------------------------------- in the tests


@dataclass
class Outcome:
    """What one start of a run left, in its ranks and on disk."""

    dump_dir: Path
    ranks: list[dict[str, Any]]  # of train_here

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

    def _lines(self, file: str) -> list[dict[str, Any]]:
        path = self.dump_dir / file
        return [json.loads(line) for line in path.read_text().splitlines()]

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
        build: Callable[[Any], Built] = build,
        twist: Twist | None = None,
        dump_dir: Path | None = None,
        refused: bool = False,
    ) -> Outcome:
        dump_dir = dump_dir or self.folder / str(next(self.numbers))
        config = self.config(sizes, {"dump_dir": dump_dir} | (overrides or {}))
        n = sizes[0] * sizes[1] * sizes[2]
        run = Outcome(dump_dir, self.ranks.run(n, train_here, config, build, twist))
        assert (run.error is not None) == refused, run.error
        return run

    def restore(
        self,
        sizes: Sizes,
        dump_dir: Path,
        overrides: dict[str, Any] | None = None,
        build: Callable[[Any], Built] = build,
    ) -> dict[str, Any]:
        """The state that `dump_dir` restores on a topology, on which all ranks agree."""
        config = self.config(sizes, {"dump_dir": dump_dir} | (overrides or {}))
        n = sizes[0] * sizes[1] * sizes[2]
        first, *others = self.ranks.run(n, restore_here, config, build)
        assert all(other == first for other in others)
        return first

    def stream(self) -> RowStream:
        args = arguments({"data.root_dir": self.text})
        data = args.data
        sources = open_sources(data, build_tokenizer(data.tokenizer))
        return RowStream(sources, data.sources, data.seq_len, data.n_views, args.seed)


def relative(found: list[float], expected: list[float]) -> list[float]:
    """Differences of each, as a share of what is expected."""
    return [abs(a / b - 1) for a, b in zip(found, expected, strict=True)]


def differs(run: Outcome, other: Outcome) -> list[str]:
    """What makes two runs not the same one: hashes, losses, gradient norms; empty when nothing."""
    found = []
    if run.column("batch_hash") != other.column("batch_hash"):
        found.append("batch_hash")
    if max(relative(run.column("loss"), other.column("loss"))) > 1e-5:
        found.append("loss")
    first, *later = relative(run.column("grad_norm"), other.column("grad_norm"))
    if first > 1e-5 or max(later, default=0.0) > 1e-4:
        found.append("grad_norm")
    return found
