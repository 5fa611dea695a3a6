"""Reading what torch.distributed.checkpoint (DCP) wrote, without trust: nothing of it is executed.

torch's own reader unpickles anything in `.metadata`. It also reads every chunk whole, where a rank
may hold a small part of it, and copies it; this one reads a part into its place.
"""

import pickle
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from io import FileIO
from pathlib import Path, PosixPath
from typing import IO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view

from lingua.checkpoint.tensors import Part

METADATA = ".metadata"
_METADATA_MODULE = dcp_metadata.__name__

_ALLOWED: dict[tuple[str, str], object] = {
    **{  # all classes that the module itself defines are plain data
        (_METADATA_MODULE, name): kind
        for name, kind in vars(dcp_metadata).items()
        if getattr(kind, "__module__", "") == _METADATA_MODULE
    },
    **{("torch", name): v for name, v in vars(torch).items() if isinstance(v, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PosixPath,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _ALLOWED:
            raise ValueError(f"it refers to {module}.{name}, which is not executed")
        return _ALLOWED[module, name]


class DCPFolder:
    """The tensors in a folder of DCP's. Other entries are not read.

    tensors: by name, on the meta device.
    """

    def __init__(self, path: Path) -> None:
        """Reads `.metadata`. Raises ValueError, or whatever a damaged pickle makes Python raise."""
        self.path = path
        with (path / METADATA).open("rb") as f:
            metadata = _Unpickler(f).load()
        self._stored: dict[dcp_metadata.MetadataIndex, _StorageInfo] = metadata.storage_data
        for info in self._stored.values():
            if Path(info.relative_path).name != info.relative_path:
                raise ValueError(f"it refers to the file {info.relative_path}")
        self._entries: dict[str, dcp_metadata.TensorStorageMetadata] = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, dcp_metadata.TensorStorageMetadata)
        }
        self.tensors: dict[str, Tensor] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for name, entry in self._entries.items()
        }

    def read(self, parts: Iterable[Part]) -> None:
        """Fill the memory of each part. Every file is read once, from its begin to its end."""
        reads: dict[str, list[tuple[_StorageInfo, Part]]] = {}
        for part in parts:
            begin = torch.Size(side.start for side in part.box)
            wanted = dcp_metadata.ChunkStorageMetadata(begin, part.out.shape)
            of_chunks = create_read_items_for_chunk_list(
                part.name, self._entries[part.name], [wanted]
            )
            if sum(item.lengths.numel() for item in of_chunks) < part.out.numel():
                raise ValueError(f"it does not have all of {part.name}")
            for item in of_chunks:
                stored = self._stored[item.storage_index]
                out = part.out[_box(item.dest_offsets, item.lengths)]
                of_chunk = Part(part.name, _box(item.storage_offsets, item.lengths), out)
                reads.setdefault(stored.relative_path, []).append((stored, of_chunk))
        for name, of_file in reads.items():
            with (self.path / name).open("rb", buffering=0) as f:
                for stored, of_chunk in sorted(of_file, key=lambda read: read[0].offset):
                    try:
                        _read_chunk(f, stored, of_chunk)
                    except Exception as error:  # a damaged chunk may raise anything
                        raise ValueError(f"{name}: {error}") from error


def _box(begin: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(begin, sizes, strict=True))


def _read_chunk(f: FileIO, stored: _StorageInfo, part: Part) -> None:
    """Fill a part of a chunk, which torch.save wrote into `f`."""
    view = cast(IO[bytes], _create_file_view(f, stored.offset, stored.length))
    chunk = torch.load(view, map_location="meta", weights_only=True)  # reads no elements
    source, out = chunk[part.box], part.out
    begin = chunk.untyped_storage()._checkpoint_offset + source.storage_offset() * source.itemsize
    last = sum((n - 1) * step for n, step in zip(source.shape, source.stride(), strict=True))
    if source.shape != out.shape or begin + (last + 1) * source.itemsize > stored.length:
        raise ValueError(f"{part.name} differs from {METADATA}")
    in_place = out.device.type == "cpu" and out.dtype == source.dtype
    in_place = in_place and out.is_contiguous() and source.is_contiguous()
    memory = out.view(-1) if in_place else torch.empty(last + 1, dtype=source.dtype)
    f.seek(stored.offset + begin)
    rest = memory.view(torch.uint8).numpy().data
    while rest:
        n = f.readinto(rest)
        if not n:
            raise ValueError("ends too early")
        rest = rest[n:]
    if not in_place:
        out.copy_(memory.as_strided(source.shape, source.stride()))
