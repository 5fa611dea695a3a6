"""Reading what torch.distributed.checkpoint (DCP) wrote, without trust: nothing of it is executed.

torch's own reader unpickles anything in `.metadata`. It also reads every chunk whole, where a rank
may hold a small part of it, and copies it twice: where all chunks are read whole, it takes twice as
long as this one.
"""

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path, PosixPath
from typing import IO

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.utils import _create_file_view

from lingua.checkpoint.tensors import Part

METADATA = ".metadata"


def _without_elements(
    storage: tuple[torch.dtype, str],
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: dict,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, int, str]:
    """In place of `torch._utils._rebuild_tensor_v2` and `_v3`, the latter with a dtype: the tensor
    on the meta device, where it begins in its storage, in bytes, and the name of that storage."""
    tensor = torch.empty_strided(size, stride, dtype=dtype or storage[0], device="meta")
    return tensor, offset * tensor.itemsize, storage[1]


_CLASSES = (
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
_STORAGES = (
    *(torch.DoubleStorage, torch.FloatStorage, torch.HalfStorage, torch.BFloat16Storage),
    *(torch.LongStorage, torch.IntStorage, torch.ShortStorage, torch.CharStorage),
    *(torch.ByteStorage, torch.BoolStorage, torch.ComplexDoubleStorage, torch.ComplexFloatStorage),
)
_ALLOWED: dict[tuple[str, str], object] = {
    **{(kind.__module__, kind.__qualname__): kind for kind in _CLASSES},
    **{("torch", kind.__name__): kind._dtype for kind in _STORAGES},
    ("torch.storage", "UntypedStorage"): torch.uint8,
    ("torch._utils", "_rebuild_tensor_v2"): _without_elements,
    ("torch._utils", "_rebuild_tensor_v3"): _without_elements,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch", "Size"): torch.Size,
    ("pathlib", "PosixPath"): PosixPath,
}


class _Unpickler(pickle.Unpickler):
    """Finds what is allowed and torch's dtypes, and nothing else."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        found = getattr(torch, name, None) if module == "torch" else None
        if not isinstance(found, torch.dtype):
            raise ValueError(f"it refers to {module}.{name}, which is not executed")
        return found

    def persistent_load(self, pid: tuple) -> tuple[torch.dtype, str]:
        """Of a tensor's storage: its dtype and its name."""
        _, dtype, name, *_ = pid
        return dtype, name


class DCPFolder:
    """The tensors in a folder of DCP's.

    Attributes:
        tensors: by name, on the meta device.
        others: names of the entries that are no tensors. They are not read.
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
        self.tensors: dict[str, Tensor] = {}
        self.others: list[str] = []
        self._chunks: dict[str, list[dcp_metadata.ChunkStorageMetadata]] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, dcp_metadata.TensorStorageMetadata):
                dtype = entry.properties.dtype
                self.tensors[name] = torch.empty(entry.size, dtype=dtype, device="meta")
                self._chunks[name] = entry.chunks
            else:
                self.others.append(name)

    def incomplete_files(self) -> list[str]:
        """Files that are shorter than what `.metadata` has in them, or missing."""
        sizes = {path.name: path.stat().st_size for path in self.path.iterdir()}
        stored = self._stored.values()
        ends = ((info.relative_path, info.offset + info.length) for info in stored)
        return sorted({name for name, end in ends if end > sizes.get(name, -1)})

    def read(self, parts: Iterable[Part]) -> None:
        """Fill the memory of each part. Every file is read once, from its begin to its end."""
        files: dict[str, list[tuple[_StorageInfo, Part]]] = {}
        for part in parts:
            for stored, of_chunk in self._of_chunks(part):
                files.setdefault(stored.relative_path, []).append((stored, of_chunk))
        for name, reads in files.items():
            # For what cannot be read into its place. Memory that is not used is not allocated.
            scratch = torch.empty(max(stored.length for stored, _ in reads), dtype=torch.uint8)
            with (self.path / name).open("rb", buffering=0) as f:
                for stored, of_chunk in sorted(reads, key=lambda read: read[0].offset):
                    _read_chunk(f, stored, of_chunk, scratch)

    def _of_chunks(self, part: Part) -> Iterator[tuple[_StorageInfo, Part]]:
        """Where chunks with elements of a part are stored, and what to read of each."""
        n_found = 0
        for chunk in self._chunks[part.name]:
            sides = list(zip(part.box, chunk.offsets, chunk.sizes, strict=True))
            low = [max(side.start, begin) for side, begin, _ in sides]
            high = [min(side.stop, begin + size) for side, begin, size in sides]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            out = part.out[_box(low, high, [side.start for side in part.box])]
            stored = self._stored[dcp_metadata.MetadataIndex(part.name, chunk.offsets)]
            yield stored, Part(part.name, _box(low, high, chunk.offsets), out)
            n_found += out.numel()
        if n_found < part.out.numel():
            raise ValueError(f"it does not have all of {part.name}")


def _box(low: list[int], high: list[int], origin: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def _read_chunk(f: FileIO, stored: _StorageInfo, part: Part, scratch: Tensor) -> None:
    """Fill a part of the chunk that is stored in `f`, by way of `scratch` where `part.out` cannot
    be read into."""
    chunk, begin = _tensor_in(_create_file_view(f, stored.offset, stored.length))
    source, out = chunk[part.box], part.out
    begin += source.storage_offset() * source.itemsize
    last = sum((n - 1) * step for n, step in zip(source.shape, source.stride(), strict=True))
    length = (last + 1) * source.itemsize
    if source.shape != out.shape or begin + length > stored.length:
        raise ValueError(f"{part.name} differs from .metadata")
    f.seek(stored.offset + begin)
    in_place = out.device.type == "cpu" and out.dtype == source.dtype
    if in_place and out.is_contiguous() and source.is_contiguous():
        _read_into(f, out.view(-1).view(torch.uint8))
    else:
        _read_into(f, scratch[:length])
        typed = scratch[:length].view(source.dtype)
        out.copy_(typed.as_strided(source.shape, source.stride()))


def _tensor_in(stream: IO[bytes]) -> tuple[Tensor, int]:
    """What torch.save wrote: the tensor on the meta device, and where in `stream` it begins."""
    file = torch._C.PyTorchFileReader(stream)
    tensor, offset, name = _Unpickler(io.BytesIO(file.get_record("data.pkl"))).load()
    if file.has_record("byteorder") and file.get_record("byteorder").decode() != sys.byteorder:
        raise ValueError("its bytes are in the order of another kind of processor")
    return tensor, file.get_record_offset(f"data/{name}") + offset


def _read_into(f: FileIO, memory: Tensor) -> None:
    rest = memoryview(memory.numpy())
    while rest:
        n = f.readinto(rest)
        if not n:
            raise ValueError(f"{f.name} ends too early")
        rest = rest[n:]
