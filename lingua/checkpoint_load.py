"""Loading a checkpoint's tensors on any topology, without trust in what is read: nothing in a
checkpoint is executed, and nothing is loaded that does not fit."""

import pickle
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo

from lingua.checkpoint import Checkpoint, tensors_of
from lingua.errors import UserError

_ALLOWED: dict[tuple[str, str], object] = {
    (thing.__module__, thing.__qualname__): thing
    for thing in (
        dcp_metadata.Metadata,
        dcp_metadata.MetadataIndex,
        dcp_metadata.TensorStorageMetadata,
        dcp_metadata.BytesStorageMetadata,
        dcp_metadata.ChunkStorageMetadata,
        dcp_metadata.TensorProperties,
        dcp_metadata.StorageMeta,
        dcp_metadata._MEM_FORMAT_ENCODING,
        _StorageInfo,
        OrderedDict,
    )
} | {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): PosixPath,
}


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the classes that DCP's `.metadata` consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        raise UserError(f"a checkpoint's .metadata refers to {module}.{name}: it is not loaded")


class _Reader(FileSystemReader):
    """DCP's reader, without trust in what it reads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp_metadata.Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as f:
                metadata = _MetadataUnpickler(f).load()
        except UserError:
            raise
        except Exception as error:  # a damaged pickle may raise anything
            raise UserError(f"{path} cannot be read: {error}") from error
        for info in (metadata.storage_data or {}).values():
            if Path(info.relative_path).name != info.relative_path:
                raise UserError(f"a checkpoint's .metadata refers to the file {info.relative_path}")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = dcp_metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _TensorsOnly(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise UserError(f"{read_item.dest_index.fqn} of a checkpoint is not a tensor: not loaded")


def read_metadata(checkpoint: Checkpoint) -> dcp_metadata.Metadata:
    """Names, shapes and dtypes of the tensors. Raises UserError."""
    return _Reader(checkpoint.path).read_metadata()


def load(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors` in place, on any topology. Called by every rank.

    Raises:
        UserError: names what is missing or has another shape, before anything is loaded.
    """
    check_fit(checkpoint.path, stored_tensors(checkpoint.path), tensors)
    read_tensors(checkpoint.path, tensors)


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Fill the parameters and buffers of a model, as `load` does, and leave the rest unread."""
    tensors = tensors_of(model)
    stored = stored_tensors(checkpoint.path)
    of_model = {name: t for name, t in stored.items() if name.startswith("model.")}
    check_fit(checkpoint.path, of_model, tensors)
    read_tensors(checkpoint.path, tensors)


def saved_weights(checkpoint: Checkpoint) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of each tensor of the model, by its name there (without `model.`)."""
    return {
        name.removeprefix("model."): (t.shape, t.dtype)
        for name, t in stored_tensors(checkpoint.path).items()
        if name.startswith("model.") and t is not None
    }


def read_weights(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, Tensor]:
    """Whole tensors of the model, on the CPU, by their names there. Called by every rank."""
    saved = saved_weights(checkpoint)
    tensors = {f"model.{name}": torch.empty(saved[name][0], dtype=saved[name][1]) for name in names}
    read_tensors(checkpoint.path, tensors)
    return {name.removeprefix("model."): t for name, t in tensors.items()}


def stored_tensors(folder: Path) -> dict[str, Tensor | None]:
    """What a folder of DCP's holds, by name: tensors on the meta device, None for anything else."""
    metadata = _Reader(folder).read_metadata()
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        if isinstance(entry, dcp_metadata.TensorStorageMetadata)
        else None
        for name, entry in metadata.state_dict_metadata.items()
    }


def check_fit(path: Path, stored: Mapping[str, Tensor | None], tensors: dict[str, Tensor]) -> None:
    """Refuse to fill `tensors` from what is stored under other names or in other shapes."""
    wrong = []
    for name, t in tensors.items():
        entry = stored.get(name)
        if entry is None:
            wrong.append(f"{name}: {tuple(t.shape)} here, not in the checkpoint")
        elif entry.shape != t.shape:
            wrong.append(f"{name}: {tuple(t.shape)} here, {tuple(entry.shape)} in the checkpoint")
    wrong += [f"{name}: in the checkpoint, not here" for name in stored if name not in tensors]
    if wrong:
        shown = [*wrong[:10], *([f"and {len(wrong) - 10} more"] if len(wrong) > 10 else [])]
        raise UserError(f"{path} does not fit this model:\n  " + "\n  ".join(shown))


def read_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors` from a folder of DCP's that is known to have them. Called by every rank."""
    try:
        dcp.load(tensors, storage_reader=_Reader(folder), planner=_TensorsOnly())
    except CheckpointException as error:  # what any rank met, on every rank
        (met, _), *_ = error.failures.values()
        raise UserError(f"{folder} cannot be read: {reason(met)}") from error


def reason(error: BaseException) -> str:
    """What matters of torch.load's messages, some of which advise to trust the file."""
    text = str(error)
    if found := re.search(r"GLOBAL ([\w.]+)", text):
        return f"it refers to {found[1]}, which is not executed"
    if text.startswith("mmap can only"):
        return "it is not in the zip format of torch.save"
    return text.split(". ")[0]


def missing_bytes(folder: Path) -> list[str]:
    """Files of a folder of DCP's that are shorter than what its `.metadata` has in them."""
    ends: dict[str, int] = {}
    for info in _Reader(folder).read_metadata().storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    return sorted(
        name
        for name, end in ends.items()
        if not (folder / name).exists() or (folder / name).stat().st_size < end
    )
