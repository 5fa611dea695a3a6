"""What tensors can be taken from: a checkpoint of ours, one of Meta Lingua's, a file of torch.save.

Each is known by our names of its tensors, `model.<name>` and `optim.<state>.<name>`, and fills the
live tensors of a run on any topology. Nothing in any of them is executed.

A checkpoint of Meta Lingua's is a folder of DCP's with `model.<name>` and
`optim.state.<name>.<key>` among its entries, `params.json` (the config) and
`train_state_<rank>.json`. A file is a dict with a tensor by name under "model"; as Meta Lingua and
`python -m lingua.checkpoint convert` write it, it may have optimizer state under "optim", and with
the latter "config", "step" and "train_state".
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lingua.checkpoint.folder import (
    CONFIG,
    MANIFEST,
    Checkpoint,
    damaged_files,
    find,
    newest,
    read_checkpoint,
    read_state,
)
from lingua.checkpoint.load import missing_bytes, read_tensors, reason, stored_tensors
from lingua.errors import UserError
from lingua.parallel.mesh import on_rank_0

CONSOLIDATED, PARAMS = "consolidated.pth", "params.json"


@dataclass(frozen=True)
class TensorSource:
    """Where tensors can be read, and what is said there besides."""

    path: Path
    kind: Literal["checkpoint", "Meta Lingua checkpoint", "file"]
    tensors: dict[str, Tensor]  # by our names, on the meta device
    stored_as: dict[str, str] = field(default_factory=dict)  # our name -> its name in the folder
    step: int | None = None  # updates made; None: not said
    config: str = "{}"  # text of YAML, or JSON
    state: dict[str, Any] = field(default_factory=dict)  # of train_state.json
    checkpoint: Checkpoint | None = None  # where it is one of ours

    def read(self, tensors: dict[str, Tensor]) -> None:
        """Fill `tensors`, each with the one of its name. Called by every rank."""
        if self.kind == "file":
            whole, _ = read_file(self.path)
            for name, t in tensors.items():
                _fill(t, whole[name])
        else:
            read_tensors(self.path, {self.stored_as[name]: t for name, t in tensors.items()})


def _fill(t: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of a tensor; of a file that is mapped into memory it reads no more."""
    if isinstance(t, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
        for axis, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
            whole = whole.narrow(axis, offset, size)
        t = t.to_local()
    t.copy_(whole)


def find_source(path: Path, verify: str, report: Callable[[str], None]) -> TensorSource:
    """What `path` names. Called by every rank; rank 0 looks.

    Args:
        path: a checkpoint; a folder of checkpoints or a dump_dir, for the newest that verifies; a
            checkpoint of Meta Lingua's, or its folder `consolidated`; or a file of torch.save.
        verify: `full` or `size`, of checkpoint.verify.
        report: is told which checkpoints are skipped.

    Raises:
        UserError: there is nothing of these, or it is damaged.
    """
    root = on_rank_0(lambda: _folder_of_checkpoints(path))
    if root is not None:
        checkpoint = newest(root, verify, report)
        if checkpoint is None:
            raise UserError(f"{root}: none of its checkpoints is whole")
        return on_rank_0(lambda: _describe(checkpoint.path))
    source = on_rank_0(lambda: _describe(path))
    if source.checkpoint is not None and verify == "full":
        damaged = damaged_files(source.checkpoint)
        if damaged:
            raise UserError(f"{path} is damaged: {'; '.join(damaged)}")
    return source


def _folder_of_checkpoints(path: Path) -> Path | None:
    """Where the newest is to be taken; None when `path` itself is what tensors are read from."""
    if not path.exists():
        raise UserError(f"{path}: there is no such file or folder")
    if path.is_file() or any((path / n).exists() for n in (MANIFEST, ".metadata", CONSOLIDATED)):
        return None
    for root in (path / "checkpoints", path):
        if find(root):
            return root
    raise UserError(
        f"{path} holds no checkpoint: must be the folder of one, a folder of such folders, the "
        "dump_dir of a run, a checkpoint of Meta Lingua's (the folder of a step), or a file of "
        "torch.save"
    )


def _describe(path: Path) -> TensorSource:
    if path.is_file():
        return _describe_file(path)
    if (path / MANIFEST).exists():
        return _describe_checkpoint(path)
    if (path / ".metadata").exists():
        return _describe_meta_lingua(path)
    return _describe_file(path / CONSOLIDATED)


def _describe_checkpoint(path: Path) -> TensorSource:
    checkpoint, why = read_checkpoint(path)
    if checkpoint is None:
        raise UserError(f"{path} is not a whole checkpoint: {why}")
    tensors = {name: t for name, t in stored_tensors(path).items() if t is not None}
    return TensorSource(
        path,
        "checkpoint",
        tensors,
        stored_as={name: name for name in tensors},
        step=checkpoint.step,
        config=(path / CONFIG).read_text(encoding="utf-8"),
        state=read_state(checkpoint),
        checkpoint=checkpoint,
    )


def _describe_meta_lingua(path: Path) -> TensorSource:
    if cut := missing_bytes(path):
        raise UserError(f"{path} is damaged: its .metadata has more in {', '.join(cut)}")
    stored = stored_tensors(path)
    ours = {our_name(name): name for name, t in stored.items() if t is not None}
    ours.pop(None, None)
    states = sorted(path.glob("train_state_*.json"))  # one of each dp rank, equal but for the data
    state = json.loads(_text_of_json(states[0])) if states else {}
    return TensorSource(
        path,
        "Meta Lingua checkpoint",
        {name: stored[theirs] for name, theirs in ours.items()},
        stored_as=ours,
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


def _describe_file(path: Path) -> TensorSource:
    tensors, said = read_file(path)
    beside = path.with_name(PARAMS)  # where Meta Lingua puts it
    config = _text_of_json(beside) if beside.exists() else "{}"
    return TensorSource(
        path,
        "file",
        {name: torch.empty_like(t, device="meta") for name, t in tensors.items()},
        step=said.get("step"),
        config=said.get("config", config),
        state=said.get("train_state", {}),
    )


def read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file by our names, mapped into memory, and its other entries.

    Tied weights, which share their memory in the file, are there once, under their first name.
    """
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        raise UserError(f"{path} cannot be read: {reason(error)}") from None
    content = content if isinstance(content, dict) else {}
    model = content.get("model", content)  # or the tensors alone, without a name for them all
    flat = {f"model.{name}": t for name, t in model.items()} if isinstance(model, dict) else {}
    if not flat or not all(isinstance(t, Tensor) for t in flat.values()):
        raise UserError(f'{path} holds no model: must be a dict {{"model": {{name: tensor}}}}')
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
    return tensors, {key: value for key, value in content.items() if key not in ("model", "optim")}


def our_name(stored: str) -> str | None:
    """The name we give a tensor that Meta Lingua stores, or None for one that needs no place."""
    if ".tied_module." in stored:  # its tied head stores the embedding again
        return None
    if stored.startswith("optim.state."):
        name, _, key = stored.removeprefix("optim.state.").rpartition(".")
        return f"optim.{key}.{name}"
    return stored if stored.startswith("model.") else None
