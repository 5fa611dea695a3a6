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
from typing import IO, NamedTuple

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


class _Read(NamedTuple):
    """What is to be read of a chunk: `box` of it into `out`."""

    name: str
    stored: _StorageInfo  # the file, and where in it torch.save wrote the chunk
    box: tuple[slice, ...]
    out: Tensor


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
        ends: dict[str, int] = {}
        for info in self._stored.values():
            end = info.offset + info.length
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), end)
        paths = {name: self.path / name for name in ends}
        sizes = {name: p.stat().st_size if p.exists() else -1 for name, p in paths.items()}
        return sorted(name for name, end in ends.items() if sizes[name] < end)

    def read(self, parts: Iterable[Part]) -> None:
        """Fill the memory of each part. Every file is read once, from its begin to its end."""
        files: dict[str, list[_Read]] = {}
        for part in parts:
            for read in self._reads(part):
                files.setdefault(read.stored.relative_path, []).append(read)
        for name, reads in files.items():
            # For what cannot be read into its place. Memory that is not used is not allocated.
            scratch = torch.empty(max(read.stored.length for read in reads), dtype=torch.uint8)
            with (self.path / name).open("rb", buffering=0) as f:
                for read in sorted(reads, key=lambda read: read.stored.offset):
                    _read_chunk(f, read, scratch)

    def _reads(self, part: Part) -> Iterator[_Read]:
        """Where the elements of a part are stored."""
        end = [first + size for first, size in zip(part.begin, part.out.shape, strict=True)]
        n_found = 0
        for chunk in self._chunks[part.name]:
            chunk_end = map(sum, zip(chunk.offsets, chunk.sizes, strict=True))
            low = list(map(max, part.begin, chunk.offsets))
            high = list(map(min, end, chunk_end))
            if all(first < last for first, last in zip(low, high, strict=True)):
                stored = self._stored[dcp_metadata.MetadataIndex(part.name, chunk.offsets)]
                out = part.out[_box(low, high, part.begin)]
                yield _Read(part.name, stored, _box(low, high, chunk.offsets), out)
                n_found += out.numel()
        if n_found < part.out.numel():
            raise ValueError(f"it does not have all of {part.name}")


def _box(low: list[int], high: list[int], origin: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def _read_chunk(f: FileIO, read: _Read, scratch: Tensor) -> None:
    """Fill `read.out`, by way of `scratch` where it cannot be read into."""
    view = _create_file_view(f, read.stored.offset, read.stored.length)
    chunk, begin = _tensor_in(view)
    part = chunk[read.box]
    begin += part.storage_offset() * part.itemsize
    last = sum((n - 1) * step for n, step in zip(part.shape, part.stride(), strict=True))
    length = (last + 1) * part.itemsize
    if part.shape != read.out.shape or begin + length > read.stored.length:
        raise ValueError(f"{read.name} is not what .metadata says")
    f.seek(read.stored.offset + begin)
    in_place = read.out.device.type == "cpu" and read.out.dtype == part.dtype
    if in_place and read.out.is_contiguous() and part.is_contiguous():
        _read_into(f, read.out.view(-1).view(torch.uint8))
    else:
        _read_into(f, scratch[:length])
        typed = scratch[:length].view(part.dtype)
        read.out.copy_(typed.as_strided(part.shape, part.stride()))


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
