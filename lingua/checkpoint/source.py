"""What tensors can be read from, by one interface: a checkpoint of ours, one of Meta Lingua's, a
file of torch.save. (lingua.hugging_face opens a folder of transformers by the same interface.)

Tensors have our names, `model.<name>` and `optim.<state>.<name>`. Nothing of what is read is
executed.

A checkpoint of Meta Lingua's is a folder of DCP's with `model.<name>` and
`optim.state.<name>.<key>` among its entries, `params.json` (the config) and
`train_state_<rank>.json`. A file is a dict with a tensor by name under "model"; as Meta Lingua and
`python -m lingua.checkpoint convert` write it, it may have optimizer state under "optim", and with
the latter "config", "step" and "train_state".
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lingua.checkpoint.dcp import METADATA, DCPFolder
from lingua.checkpoint.folder import (
    CONFIG,
    MANIFEST,
    NAME,
    Checkpoint,
    find,
    first_undamaged,
    read_checkpoint,
    read_state,
)
from lingua.checkpoint.tensors import Part
from lingua.errors import UserError
from lingua.parallel.mesh import on_rank_0

T = TypeVar("T")

CONSOLIDATED, PARAMS = "consolidated.pth", "params.json"  # of Meta Lingua's


@dataclass(frozen=True)
class TensorSource:
    """Tensors that can be read, and what is known about them."""

    path: Path
    kind: str  # what it is, for messages
    # shape and dtype of each by our names: on the meta device, or of a file mapped into memory
    tensors: dict[str, Tensor]
    read: Callable[[list[Part]], None]  # fills the memory of each part
    step: int | None = None  # updates made; None: not known
    config: str = "{}"  # text of YAML, or JSON
    state: dict[str, Any] = field(default_factory=dict)  # of train_state.json
    checkpoint: Checkpoint | None = None  # where it is one of ours

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.path} ({self.kind}{step})"


# ---------------------------------------------------------------------------------------- finding


def locate(path: Path, report: Callable[[str], None]) -> list[Checkpoint]:
    """The checkpoint at `path`; or those in the folder of checkpoints or the dump dir at `path`,
    the last published first; none where `path` is a file or Meta Lingua's. By one process.

    Args:
        report: called with a line for each folder that is skipped.

    Raises:
        UserError: `path` has no checkpoint, or is one that is not whole.
    """
    if not path.exists():
        raise UserError(f"{path}: there is no such file or folder")
    has = {n for n in (MANIFEST, METADATA, PARAMS, CONSOLIDATED) if (path / n).exists()}
    if path.is_file() or CONSOLIDATED in has or has == {METADATA, PARAMS}:
        return []
    if NAME.fullmatch(path.name) or has & {MANIFEST, METADATA}:
        checkpoint, why = read_checkpoint(path)
        if checkpoint is None:
            raise UserError(f"{path} is not a whole checkpoint: {why}")
        return [checkpoint]
    for root in (path / "checkpoints", path):
        if found := find(root, report):
            return found
    raise UserError(
        f"{path} has no whole checkpoint: must be the folder of one, a folder of such folders, or "
        "the dump_dir of a run"
    )


def locate_newest(path: Path, report: Callable[[str], None] = lambda line: None) -> Checkpoint:
    """The first of `locate`, which must be a checkpoint of ours. By one process."""
    found = locate(path, report)
    if not found:
        raise UserError(
            f"{path} is no checkpoint of a run here; checkpoint.init_ckpt_path starts one from it"
        )
    return found[0]


def find_source(path: Path, verify: str, report: Callable[[str], None]) -> TensorSource:
    """What `path` names. Called by every rank.

    Args:
        path: what `locate` takes; of several checkpoints it is the newest that verifies. Or a
            checkpoint of Meta Lingua's, its folder `consolidated`, or a file of torch.save.
        verify: `full` or `size`, of checkpoint.verify.
        report: called with a line for each checkpoint that is skipped.

    Raises:
        UserError: there is nothing of these, or it is damaged.
    """
    found = on_rank_0(lambda: locate(path, report))
    if not found:
        path = path / CONSOLIDATED if (path / CONSOLIDATED).exists() else path
        work = _open_file if path.is_file() else _open_meta_lingua
        return on_every_rank(path, lambda: work(path))
    checkpoint, why = first_undamaged(found, verify, report)
    if checkpoint is None:
        raise UserError(why)
    config = (checkpoint.path / CONFIG).read_text(encoding="utf-8")
    return replace(open_checkpoint(checkpoint), config=config, state=read_state(checkpoint))


def on_every_rank(path: Path, work: Callable[[], T]) -> T:
    """The result of reading `path` on this rank. Called by every rank, or by a process without a
    group. Raises UserError on all of them where one fails."""
    result, failure = None, None
    try:
        result = work()
    except Exception as error:  # a damaged file may raise anything
        failure = error
    message = "" if failure is None else _message(path, failure)
    messages = [message]
    if dist.is_initialized():
        messages *= dist.get_world_size()
        dist.all_gather_object(messages, message)
    if any(messages):
        raise UserError(next(filter(None, messages))) from failure
    return result  # type: ignore[return-value]


def _message(path: Path, error: Exception) -> str:
    """What matters of the error, without the advice of torch.load to trust the file."""
    text = str(error)
    if isinstance(error, UserError):
        return text
    if found := re.search(r"GLOBAL ([\w.]+)", text):
        text = f"it refers to {found[1]}, which is not executed"
    elif text.startswith("mmap can only"):
        text = "it is not in the zip format of torch.save"
    return f"{path} cannot be read: {text.split('. ')[0] or type(error).__name__}"


# ---------------------------------------------------------------------------------------- opening


def open_checkpoint(checkpoint: Checkpoint) -> TensorSource:
    """The tensors of our checkpoint. Called by every rank, or by a process without a group."""
    path = checkpoint.path
    folder = on_every_rank(path / METADATA, lambda: DCPFolder(path))
    if folder.others:
        raise UserError(f"{path}: {folder.others[0]} is no tensor: nothing of it is loaded")
    kind, step = "checkpoint", checkpoint.step
    return TensorSource(path, kind, folder.tensors, folder.read, step, checkpoint=checkpoint)


def _open_meta_lingua(path: Path) -> TensorSource:
    folder = DCPFolder(path)
    if incomplete := folder.incomplete_files():
        raise UserError(f"{path} is damaged: its .metadata has more in {', '.join(incomplete)}")
    stored_as = {ours: name for name in folder.tensors if (ours := our_name(name)) is not None}
    states = sorted(path.glob("train_state_*.json"))  # one of each dp rank, equal but for the data
    state = json.loads(_text_of_json(states[0])) if states else {}
    return TensorSource(
        path,
        "Meta Lingua checkpoint",
        {ours: folder.tensors[name] for ours, name in stored_as.items()},
        lambda parts: folder.read([part._replace(name=stored_as[part.name]) for part in parts]),
        step=state.get("step"),
        config=_text_of_json(path / PARAMS),
        state=state,
    )


def _text_of_json(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        if isinstance(json.loads(text), dict):
            return text
        why = "not a JSON object"
    except (OSError, ValueError) as error:
        why = str(error)
    raise UserError(f"{path} cannot be read: {why}")


def _open_file(path: Path) -> TensorSource:
    """A file of torch.save. Tied weights, which share their memory in the file, are in it once,
    under their first name."""
    content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    content = content if isinstance(content, dict) else {}
    model = content.get("model", content)  # or the tensors alone, without a name for them all
    flat = {f"model.{name}": t for name, t in model.items()} if isinstance(model, dict) else {}
    if not flat or not all(isinstance(t, Tensor) for t in flat.values()):
        raise UserError(f'{path} has no model: must be a dict {{"model": {{name: tensor}}}}')
    optim = content.get("optim")
    for name, state in (optim.get("state", {}) if isinstance(optim, dict) else {}).items():
        flat |= {f"optim.state.{name}.{k}": t for k, t in state.items() if isinstance(t, Tensor)}
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, t in flat.items():
        place = (t.data_ptr(), t.shape, t.stride())
        ours = our_name(name)
        if ours is not None and (t.numel() == 0 or place not in seen):
            tensors[ours] = t
        seen.add(place)

    def read(parts: list[Part]) -> None:
        for name, begin, out in parts:
            box = (slice(first, first + n) for first, n in zip(begin, out.shape, strict=True))
            out.copy_(tensors[name][tuple(box)])

    beside = path.with_name(PARAMS)  # where Meta Lingua puts it
    config = content.get("config") or (_text_of_json(beside) if beside.exists() else "{}")
    state = content.get("train_state", {})
    return TensorSource(path, "file", tensors, read, content.get("step"), config, state)


def our_name(stored: str) -> str | None:
    """Our name of a tensor that Meta Lingua stores, or None for one that needs no place."""
    if ".tied_module." in stored:  # its tied head stores the embedding again
        return None
    if stored.startswith("optim.state."):
        name, _, key = stored.removeprefix("optim.state.").rpartition(".")
        return f"optim.{key}.{name}"
    return stored if stored.startswith("model.") else None
