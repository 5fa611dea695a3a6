"""What tensors can be read from, by one interface: a checkpoint of ours, one of Meta Lingua's, a
file of torch.save. (lingua.hugging_face opens a folder of transformers by the same interface.)

Tensors have our names, `model.<name>` and `optim.<state>.<name>`. Nothing of what is read is
executed.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from zipfile import ZIP_STORED, ZipFile

import torch
import torch.distributed as dist
from torch import Tensor

from lingua.checkpoint.dcp import METADATA, DCPFolder, check_size
from lingua.checkpoint.folder import (
    CONFIG,
    MANIFEST,
    NAME,
    Checkpoint,
    find,
    first_undamaged,
    found_on_rank_0,
    read_checkpoint,
)
from lingua.checkpoint.tensors import Part, local_parts
from lingua.config.load import to_yaml
from lingua.config.meta_lingua import META_LINGUA
from lingua.config.values import show
from lingua.errors import UserError
from lingua.files import file_size, read_bytes, read_json

T = TypeVar("T")
Shapes = dict[str, tuple[int, ...]]  # by name

CONSOLIDATED, PARAMS = "consolidated.pth", "params.json"  # of Meta Lingua's
# its names of an embedding, and of the same weight in a head that is tied to it
TIED = ("tok_embeddings.weight", "output.tied_module.weight")


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
    checkpoint: Checkpoint | None = None  # where it is one of ours

    def __post_init__(self) -> None:
        step = self.step
        if step is not None and (type(step) is not int or not 0 <= step < 10**10):
            raise UserError(f"{self.path}: step = {show(step)}: must be a whole number below 10^10")
        if not isinstance(self.config, str):
            raise UserError(f"{self.path}: config = {show(self.config)}: must be text")

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.path} ({self.kind}{step})"

    def load(self, tensors: Mapping[str, Tensor], only: str = "") -> None:
        """Fill `tensors` in place, on any topology. Called by every rank, or by a process without a
        process group. Raises UserError, which names the tensors that do not fit, before any is
        loaded, or why one cannot be read.

        only: how the names begin that are loaded; what is stored under others is not read.
        """
        tensors = {name: t for name, t in tensors.items() if name.startswith(only)}
        check_fit(
            f"{self.path} does not fit this model",
            {name: tuple(t.shape) for name, t in tensors.items()},
            self.shapes(only),
        )
        on_every_rank(self.path, lambda: self.read_parts(local_parts(tensors)))

    def whole(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole tensors on the CPU. Called as `load` is."""
        tensors = {name: torch.empty_like(self.tensors[name], device="cpu") for name in names}
        on_every_rank(self.path, lambda: self.read_parts(local_parts(tensors)))
        return tensors

    def shapes(self, only: str = "") -> Shapes:
        """Of the tensors whose names begin with `only`."""
        return {name: tuple(t.shape) for name, t in self.tensors.items() if name.startswith(only)}


def check_fit(
    title: str,
    expected: Shapes,
    found: Shapes,
    here: str = "here",
    there: str = "in the checkpoint",
) -> None:
    """Raise UserError where shapes are not those that are expected: `title`, then a line for each.

    here, there: where the shapes are expected and found, in words.
    """
    wrong = []
    for name in expected | found:
        if name not in found:
            wrong.append(f"{name}: {expected[name]} {here}, not {there}")
        elif name not in expected:
            wrong.append(f"{name}: {there}, not {here}")
        elif found[name] != expected[name]:
            wrong.append(f"{name}: {expected[name]} {here}, {found[name]} {there}")
    if wrong:
        more = [f"and {len(wrong) - 10} more"] if len(wrong) > 10 else []
        raise UserError("\n  ".join([f"{title}:", *wrong[:10], *more]))


def on_every_rank(path: Path, work: Callable[[], T]) -> T:
    """What `work` gives, which reads `path`. Called by every rank, or by a process without a group.
    Raises UserError on all ranks where it fails on one."""
    results, message = [], ""
    try:
        results.append(work())
    except UserError as error:
        message = str(error)
    except Exception as error:  # a damaged file may raise anything
        message = f"{path} cannot be read: {_reason(error)}"
    messages = [message]
    if dist.is_initialized():
        messages *= dist.get_world_size()
        dist.all_gather_object(messages, message)
    for message in filter(None, messages):
        raise UserError(message)
    return results[0]


def _reason(error: Exception) -> str:
    """An error's message without the advice of torch.load to trust the file."""
    if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return f"it refers to {found[1]}, which is not executed"
    return str(error).split(". ")[0] or type(error).__name__


# ---------------------------------------------------------------------------------------- finding


def locate(path: Path, report: Callable[[str], None]) -> list[Checkpoint]:
    """The checkpoint at `path`; or those in the folder of checkpoints or the dump dir at `path`,
    the last published first; none where `path` is a file or Meta Lingua's. By one process. Raises
    UserError where it has none that is whole. `report` logs a line for each that is skipped.
    """
    if not os.path.exists(path):  # nor one whose name is too long
        raise UserError(f"{path}: no such file or folder")
    has = {n for n in (MANIFEST, METADATA, PARAMS, CONSOLIDATED) if (path / n).exists()}
    if path.is_file() or CONSOLIDATED in has or has == {METADATA, PARAMS}:
        return []
    if NAME.fullmatch(path.name) or has & {MANIFEST, METADATA}:
        checkpoint, why = read_checkpoint(path)
        if checkpoint is None:
            raise UserError(f"{path} is not a whole checkpoint: {why}")
        return [checkpoint]
    if found := find(path / "checkpoints", report) or find(path, report):
        return found
    need = "must be the folder of one, a folder of such folders, or the dump_dir of a run"
    raise UserError(f"{path} has no whole checkpoint: {need}")


def is_of_transformers(path: str) -> bool:
    """Whether `path` is a folder of transformers, which lingua.hugging_face opens."""
    return os.path.isfile(os.path.join(path, "config.json"))


def locate_newest(path: Path, report: Callable[[str], None] = lambda line: None) -> Checkpoint:
    """The first of `locate`, which must be a checkpoint of ours. By one process."""
    if found := locate(path, report):
        return found[0]
    advice = "checkpoint.init_ckpt_path starts one from it"
    raise UserError(f"{path} is no checkpoint of a run here; {advice}")


def find_source(path: Path, verify: str, report: Callable[[str], None]) -> TensorSource:
    """What `path` names. Called by every rank. Raises UserError where it cannot be read.

    Args:
        path: what `locate` takes; of several checkpoints it is the newest that verifies. Or a
            checkpoint of Meta Lingua's, its folder `consolidated`, or a file of torch.save.
        verify: `full` or `size`, of checkpoint.verify.
        report: logs a line for each checkpoint that is skipped.
    """
    found = found_on_rank_0(lambda: locate(path, report))
    if not found:
        path = path / CONSOLIDATED if (path / CONSOLIDATED).exists() else path
        work = _open_file if path.is_file() else _open_meta_lingua
        return on_every_rank(path, lambda: work(path))
    checkpoint, why = first_undamaged(found, verify, report)
    if checkpoint is None:
        raise UserError(why)
    file = checkpoint.path / CONFIG
    config = on_every_rank(file, lambda: read_bytes(file).decode())
    return replace(open_checkpoint(checkpoint), config=config)


# ---------------------------------------------------------------------------------------- opening


def open_checkpoint(checkpoint: Checkpoint) -> TensorSource:
    """The tensors of our checkpoint. Called by every rank, or by a process without a group."""
    path = checkpoint.path
    folder = on_every_rank(path / METADATA, lambda: DCPFolder(path))
    kind, step = "checkpoint", checkpoint.step
    return TensorSource(path, kind, folder.tensors, folder.read, step, checkpoint=checkpoint)


def _open_meta_lingua(path: Path) -> TensorSource:
    """A folder of DCP's with `params.json`, the config, and `train_state_<rank>.json`."""
    folder = DCPFolder(path)
    stored_as = {ours: name for name in folder.tensors if (ours := our_name(name)) is not None}
    states = sorted(path.glob("train_state_*.json"))  # one of each dp rank, of the same step
    return TensorSource(
        path,
        "Meta Lingua checkpoint",
        {ours: folder.tensors[name] for ours, name in stored_as.items()},
        lambda parts: folder.read([part._replace(name=stored_as[part.name]) for part in parts]),
        step=read_json(states[0]).get("step") if states else None,
        config=_our_config(path / PARAMS),
    )


def _open_file(path: Path) -> TensorSource:
    """A file of torch.save: {"model": {name: tensor}}, with "config" and "step" where it is ours.
    Tied weights, which share their memory in the file, are taken once, under their first name."""
    with ZipFile(path) as archive:  # as torch.save writes it; others can be far larger in memory
        if any(entry.compress_type != ZIP_STORED for entry in archive.infolist()):
            raise UserError(f"{path}: is compressed; must be a file of torch.save")
    content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    content = content if isinstance(content, dict) else {}
    model = content.get("model", content)  # or the tensors alone, without a name for them all
    model = model if isinstance(model, dict) else {}
    if not model or not all(isinstance(t, Tensor) for t in model.values()):
        raise UserError(f'{path} has no model: must be a dict {{"model": {{name: tensor}}}}')
    tensors: dict[str, Tensor] = {}
    places = set()
    for name, t in model.items():
        place = (t.data_ptr(), t.shape, t.stride())
        if our_name(f"model.{name}") is not None and (place not in places or t.numel() == 0):
            tensors[f"model.{name}"] = t
            places.add(place)
    check_size(tensors, file_size(path))

    def read(parts: list[Part]) -> None:
        for part in parts:
            part.out.copy_(tensors[part.name][part.box])

    beside = path.with_name(PARAMS)  # where Meta Lingua puts it
    config = content.get("config") or (_our_config(beside) if beside.exists() else "{}")
    return TensorSource(path, "file", tensors, read, content.get("step"), config)


def _our_config(params: Path) -> str:
    """Of Meta Lingua's parameters, what describes a model and how it was trained, as a config of
    ours: text of YAML. Its keys that mean the same have the same name here."""
    content = read_json(params)
    config: dict[str, Any] = {k: content[k] for k in ("name", "seed", "steps") if k in content}
    for group in ("data", "model", "optim"):
        keys = content.get(group, {})
        if not isinstance(keys, dict):
            raise UserError(f"{params}: {group} = {show(keys)}: must be a group of keys")
        foreign = {*META_LINGUA.ignored, *META_LINGUA.same_as}
        config[group] = {key: v for key, v in keys.items() if f"{group}.{key}" not in foreign}
    return to_yaml(config)


def our_name(stored: str) -> str | None:
    """Our name of a tensor that Meta Lingua stores, or None for one that needs no place."""
    if stored.endswith(TIED[1]):
        return None
    if stored.startswith("optim.state."):
        name, _, key = stored.removeprefix("optim.state.").rpartition(".")
        return f"optim.{key}.{name}"
    return stored if stored.startswith("model.") else None
