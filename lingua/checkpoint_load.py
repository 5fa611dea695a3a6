"""Loading a checkpoint's tensors on any topology, without trust in what is read: nothing in a
checkpoint is executed, and nothing is loaded that does not fit."""

import pickle
from collections import OrderedDict
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from lingua.checkpoint import Checkpoint
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
    saved = read_metadata(checkpoint).state_dict_metadata
    wrong = []
    for name, t in tensors.items():
        entry = saved.get(name)
        if not isinstance(entry, dcp_metadata.TensorStorageMetadata):
            wrong.append(f"{name}: {tuple(t.shape)} here, not in the checkpoint")
        elif entry.size != t.shape:
            wrong.append(f"{name}: {tuple(t.shape)} here, {tuple(entry.size)} in the checkpoint")
    wrong += [f"{name}: in the checkpoint, not here" for name in saved if name not in tensors]
    if wrong:
        shown = [*wrong[:10], *([f"and {len(wrong) - 10} more"] if len(wrong) > 10 else [])]
        raise UserError(f"{checkpoint.path} does not fit this model:\n  " + "\n  ".join(shown))
    dcp.load(tensors, storage_reader=_Reader(checkpoint.path), planner=_TensorsOnly())
