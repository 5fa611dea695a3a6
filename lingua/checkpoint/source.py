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
from collections.abc import Callable, Iterable, Mapping
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
from lingua.checkpoint.tensors import Part, local_parts
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
    read_parts: Callable[[list[Part]], None]  # fills the memory of each
    step: int | None = None  # updates made; None: not known
    config: str = "{}"  # text of YAML, or JSON
    state: dict[str, Any] = field(default_factory=dict)  # of train_state.json
    checkpoint: Checkpoint | None = None  # where it is one of ours

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.path} ({self.kind}{step})"

    def load(self, tensors: Mapping[str, Tensor], only: str = "") -> None:
        """Fill `tensors` in place, on any topology. Called by every rank, or by a process without a
        process group.

        Args:
            only: how the names begin that are loaded; what is stored under others is not read.

        Raises:
            UserError: names the tensors that do not fit, before any is loaded; or why one cannot be
                read.
        """
        tensors = {name: t for name, t in tensors.items() if name.startswith(only)}
        stored = {name: t for name, t in self.tensors.items() if name.startswith(only)}
        check_fit(f"{self.path} does not fit this model", shapes_of(tensors), shapes_of(stored))
        on_every_rank(self.path, lambda: self.read_parts(local_parts(tensors)))

    def whole(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole tensors on the CPU. Called as `load` is."""
        tensors = {name: torch.empty_like(self.tensors[name], device="cpu") for name in names}
        on_every_rank(self.path, lambda: self.read_parts(local_parts(tensors)))
        return tensors


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in tensors.items()}


def check_fit(
    title: str,
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    here: str = "here",
    there: str = "in the checkpoint",
) -> None:
    """Raise UserError where shapes by name are not those that are expected.

    Args:
        title: what the message begins with; a line for each tensor follows.
        here, there: where the shapes are expected and found, in words.
    """
    wrong = []
    for name, shape in expected.items():
        if name not in found:
            wrong.append(f"{name}: {shape} {here}, not {there}")
        elif found[name] != shape:
            wrong.append(f"{name}: {shape} {here}, {found[name]} {there}")
    wrong += [f"{name}: {there}, not {here}" for name in found if name not in expected]
    if wrong:
        shown = [*wrong[:10], *([f"and {len(wrong) - 10} more"] if len(wrong) > 10 else [])]
        raise UserError(f"{title}:\n  " + "\n  ".join(shown))


def on_every_rank(path: Path, work: Callable[[], T]) -> T:
    """What `work` gives, which reads `path`. Called by every rank, or by a process without a group.
    Raises UserError on all ranks where it fails on one."""
    result, message = None, ""
    try:
        result = work()
    except UserError as error:
        message = str(error)
    except Exception as error:  # a damaged file may raise anything
        message = f"{path} cannot be read: {_reason(error)}"
    messages = [message]
    if dist.is_initialized():
        messages *= dist.get_world_size()
        dist.all_gather_object(messages, message)
    if any(messages):
        raise UserError(next(filter(None, messages)))
    return result  # type: ignore[return-value]


def _reason(error: Exception) -> str:
    """What matters of an error, without the advice of torch.load to trust the file."""
    if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return f"it refers to {found[1]}, which is not executed"
    return str(error).split(". ")[0] or type(error).__name__


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
        raise UserError(f"{path}: no such file or folder")
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
        UserError: it is none of these, or it is damaged.
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
    state = read_json(states[0]) if states else {}
    return TensorSource(
        path,
        "Meta Lingua checkpoint",
        {ours: folder.tensors[name] for ours, name in stored_as.items()},
        lambda parts: folder.read([part._replace(name=stored_as[part.name]) for part in parts]),
        step=state.get("step"),
        config=json.dumps(read_json(path / PARAMS)),
        state=state,
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: must be a JSON object")
    return content


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
    places = {(t.data_ptr(), t.shape, t.stride()): name for name, t in reversed(flat.items())}
    first = {name for name, t in flat.items() if t.numel() == 0} | set(places.values())
    tensors = {ours: flat[name] for name in flat if name in first and (ours := our_name(name))}

    def read(parts: list[Part]) -> None:
        for part in parts:
            part.out.copy_(tensors[part.name][part.box])

    beside = path.with_name(PARAMS)  # where Meta Lingua puts it
    config = content.get("config", json.dumps(read_json(beside)) if beside.exists() else "{}")
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
