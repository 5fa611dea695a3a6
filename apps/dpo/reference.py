"""What the reference model gives for every pair: computed before the first step, and kept by row in
`reference.json` of the dump dir. So the reference takes no memory while the run trains.
"""

import gc
import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apps.main import app as main_app
from lingua.base.files import load_json, write_atomically
from lingua.base.format import counted
from lingua.checkpoint.origin import INIT_FROM, open_source
from lingua.checkpoint.source import TensorSource, on_every_rank
from lingua.checkpoint.tensors import Part
from lingua.data import IGNORE
from lingua.data.chat import ChatRows
from lingua.data.documents import DocumentMarks
from lingua.data.loader import MicroBatch
from lingua.data.rows import HeldOut
from lingua.parallel.mesh import divide, dp_degree, on_rank_0
from lingua.parallel.plan import ParallelPlan
from lingua.parallel.tensors import to_device
from lingua.run.args import RunArgs
from lingua.run.run import Run
from lingua.tools.exchange.trained import load_weights

POSITIONS_PER_CHUNK = 1 << 16
SAVE_EVERY = 100  # rows are saved after those of so many steps

# Numbers of rows -> their tokens, targets and the index of their documents, int64 [n, S] each.
Read = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]

logger = logging.getLogger(__name__)


def answers(targets: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """Find the answers in rows of pairs, whose two conversations are documents in succession.

    Args:
        targets: int64 1 B S, IGNORE for what is not of an answer.
        documents: int64 B K, where documents begin.

    Returns:
        Which positions are targets of which answer, bool B K//2 2 S, and which pairs exist, bool
        B K//2.
    """
    assert documents is not None  # data.document_mask gives them
    n = documents.shape[1] // 2
    places = torch.arange(targets.shape[-1], device=targets.device).expand(targets[0].shape)
    index = torch.searchsorted(documents, places.contiguous(), right=True) - 1  # B S
    in_document = index[:, None] == torch.arange(2 * n, device=targets.device)[:, None]  # B 2n S
    answer = (in_document & (targets[0] != IGNORE)[:, None]).unflatten(1, (n, 2))
    return answer, answer.any(-1).all(-1)


def log_ratios(
    model: nn.Module, tokens: Tensor, targets: Tensor, documents: Tensor, **more: Tensor
) -> tuple[Tensor, Tensor]:
    """log p(chosen answer) - log p(rejected answer) of the pairs of some rows, float32 B K//2, and
    which exist, bool B K//2. Takes the arguments of the model's forward."""
    answer, is_pair = answers(targets, documents)
    [losses] = model(tokens, targets, documents, per_token=True, **more)
    sums = torch.where(answer, -losses[:, None, None], 0.0).sum(-1)
    return sums[..., 0] - sums[..., 1], is_pair


@torch.no_grad()
def ratios_of(run: Run, model: nn.Module, numbers: list[int], read: Read) -> list[list[float]]:
    """The log-ratios of each row's pairs. Every rank calls this: as many rows are computed at once
    as in training, those that follow each other."""
    degree = dp_degree(run.mesh)
    _, rows = run.args.micro_steps(degree)

    def work(blocks: list[list[int]]) -> list[list[list[float]]]:
        # Every rank runs the same shapes, also one with fewer rows or none.
        local_rows = blocks[0] if blocks else []
        tokens, targets, documents = read(np.resize(local_rows or numbers[:1], rows))
        batch = (tokens, targets[None], DocumentMarks.starts(documents))
        tensors = (to_device(torch.from_numpy(array), run.device) for array in batch)
        values, is_pair = (t.tolist() for t in log_ratios(model, *tensors))
        pairs = (zip(*row, strict=True) for row in zip(values, is_pair, strict=True))
        ratios = [[ratio for ratio, has in row if has] for row in pairs][: len(local_rows)]
        return [ratios] if blocks else []

    blocks, done = [numbers[i : i + rows] for i in range(0, len(numbers), rows)], []
    for i in range(0, len(blocks), degree):
        done += divide(work, blocks[i : i + degree], run.mesh)
    return [ratios for block in done for ratios in block]


def held_out_ratios(run: Run, model: nn.Module, windows: HeldOut) -> list[list[float]]:
    def read(index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        assert windows.documents is not None
        return windows.tokens[index], windows.targets[index], windows.documents[index]

    return ratios_of(run, model, list(range(len(windows.tokens))), read)


class Reference:
    """The log-ratios of the reference, by row. Those that are not on disk, for this reference and
    this data, are computed. Every rank builds it."""

    def __init__(self, run: Run) -> None:
        args, data = run.args, run.data
        self.is_known = data is not None  # not under lingua plan, which has no rows
        if not self.is_known:
            return
        assert isinstance(data.rows, ChatRows)
        self.rows, self.stream = data.rows, data.rows.stream
        sizes = [s.n_rows(args.data.row_tokens, 1) for s in self.stream.sources.values()]
        self.begins = np.cumsum(
            [0, *sizes]
        )  # where the rows of each source begin in one table of all rows
        self.path = args.folder / "reference.json"
        # All that the numbers depend on, but for the windows that are held out.
        key = sorted(run.fingerprints.items()), asdict(args.model), str(args.distributed.dtype)
        self.key = _hash(json.dumps(key, default=str).encode())
        self.names = {n: f"{n} {_hash(w.tokens.tobytes())}" for n, w in data.held_out.items()}

        stored = on_rank_0(self._load)
        n_rows = int(self.begins[-1])
        self.by_row: list[list[float] | None] = stored.get("rows") or [None] * n_rows
        self.held_out = {n: stored[name] for n, name in self.names.items() if name in stored}
        absent = self._absent(args.steps * args.data.step_rows)
        if absent or len(self.held_out) < len(self.names):
            self._compute(run, absent)

    def index(self, positions: np.ndarray) -> np.ndarray:
        """The row in the table of the positions int64 [n]."""
        source, row = self.stream.source_rows(positions)
        return self.begins[source] + row

    def known_ratios(self, micro: MicroBatch) -> Tensor:
        """The log-ratios of the pairs of a micro-batch on the CPU, float32 [B, K//2]; any numbers
        where a row has fewer, and in padding rows."""
        assert micro.documents is not None
        n = micro.documents.shape[1] // 2
        out = torch.zeros(len(micro.row_ids), n)
        rows = self.index(micro.row_ids.clamp(0).numpy()).tolist() if self.is_known else []
        for to, i in zip(out, rows, strict=False):
            ratios = (self.by_row[i] or [])[:n]
            to[: len(ratios)] = torch.tensor(ratios)
        return out

    def _absent(self, end: int) -> list[int]:
        """Returns the first position of each row that is not known and is read before position
        `end`."""
        known, absent = np.array([row is not None for row in self.by_row]), []
        for begin in range(0, end, POSITIONS_PER_CHUNK):
            if known.all():
                break
            rows, first = np.unique(
                self.index(np.arange(begin, min(begin + POSITIONS_PER_CHUNK, end))),
                return_index=True,
            )
            absent += sorted((begin + first[~known[rows]]).tolist())
            known[rows] = True
        return absent

    def _compute(self, run: Run, absent: list[int]) -> None:
        args, built = run.args, run.app.build(run.args)
        source = open_reference(args, args.checkpoint.verify)
        plan = built.plan or ParallelPlan()
        model = load_weights(built.module, plan, source, args.distributed, run.mesh, args.seed)
        model.requires_grad_(False)

        def read(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            tokens = self.rows.rows(positions).astype(np.int64)
            wanted = np.where(self.rows.is_target(positions), tokens, IGNORE)
            return tokens[:, :-1], wanted[:, 1:], self.rows.documents(positions)[:, :-1]

        logger.info(f"the reference {source.path} is computed for {counted(len(absent), 'row')}")
        for name in sorted(self.names.keys() - self.held_out.keys()):
            self.held_out[name] = held_out_ratios(run, model, run.data.held_out[name])
        size = SAVE_EVERY * run.args.data.step_rows
        for i in range(0, len(absent), size):
            part = absent[i : i + size]
            ratios = ratios_of(run, model, part, read)
            for row, row_ratios in zip(self.index(np.array(part)).tolist(), ratios, strict=True):
                self.by_row[row] = row_ratios
            on_rank_0(self._save)
            logger.info(f"reference: {i + len(part):,} of {counted(len(absent), 'row')}")
        on_rank_0(self._save)
        del model
        gc.collect()  # its modules refer to each other

    def _load(self) -> dict[str, Any]:
        """The saved log-ratios, by part; empty where they belong to another reference or data."""
        if not self.path.exists():
            return {}
        try:
            stored = load_json(self.path)
            if stored.pop("key", None) == self.key:
                return stored
            why = "is of another reference, data or model"
        except (OSError, ValueError) as error:
            why = f"cannot be read ({error})"
        logger.warning(f"{self.path}: {why}; the reference is computed again")
        return {}

    def _save(self) -> None:
        held_out = {self.names[name]: ratios for name, ratios in self.held_out.items()}
        content = {"key": self.key, "rows": self.by_row, **held_out}
        try:
            write_atomically(self.path, json.dumps(content))
        except OSError as error:  # the run goes on: the file only saves time at the next start
            logger.warning(f"{self.path}: cannot be written ({error})")


def open_reference(args: RunArgs, verify: str) -> TensorSource:
    """The model that a run with this configuration starts from. Every rank calls this. Raises
    UserError. `verify` is as checkpoint.verify: `size` is enough for a fingerprint."""
    start = args.checkpoint
    assert start.init_from is not None  # validate() asks for it
    source = open_source(INIT_FROM, start.init_from, main_app, verify, logger.warning)
    if source.check_model is not None:
        source.check_model(args.model, start.allow_change)
    return source


def fingerprint(source: TensorSource) -> str:
    """A hash of the first row of every tensor of a model: of a large one, all takes minutes."""
    parts = [
        Part(name, tuple(slice(0, n) for n in t[:1].shape), torch.empty(t[:1].shape))
        for name, t in sorted(source.tensors.items())
        if name.startswith("model.") and t.ndim
    ]
    on_every_rank(source.path, lambda: source.read_parts(parts))
    return _hash(
        *(part.out.numpy().tobytes() for part in sorted(parts, key=lambda part: part.name))
    )


def _hash(*content: bytes) -> str:
    return hashlib.blake2b(b"".join(content), digest_size=16).hexdigest()
