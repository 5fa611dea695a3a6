"""Reading what torch.distributed.checkpoint (DCP) wrote, without trust: nothing of it is executed.

torch's own reader unpickles anything in `.metadata`. It also reads every chunk whole, where a rank
may hold a small part of it, and copies it; this one reads a part into its place.
"""

import io
import os
import pickle
import pickletools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast
from zipfile import ZipFile

import numpy as np
import torch
from torch import Tensor

from lingua.base.dump_dir import METADATA
from lingua.base.files import file_size, read_bytes, read_into
from lingua.checkpoint.tensors import Part
from lingua.parallel.torch_private import begin_in_file

READ_BYTES = 1 << 19  # bytes read before they are converted: the size of a processor's cache
MAX_CELLS = 1 << 28  # chunks of a tensor times the cells into which their sides divide it

# Import paths that `.metadata` may name.
_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    f"{_DCP}.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata",
    ),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
    "torch": ("Size", *(name for name, v in vars(torch).items() if isinstance(v, torch.dtype))),
    "torch.serialization": ("_get_layout",),
}  # fmt: skip
# The opcodes that pickle.dump writes for it. Others name classes in other ways, or have Python take
# memory for a number in the file.
_OPCODES = """PROTO FRAME MARK MEMOIZE BINGET LONG_BINGET NONE NEWTRUE NEWFALSE
    BININT BININT1 BININT2 LONG1 SHORT_BINUNICODE BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS STACK_GLOBAL NEWOBJ REDUCE BUILD"""
_WITH_LENGTH = {"LONG1": 1, "SHORT_BINUNICODE": 1, "BINUNICODE": 4}  # bytes of the length


class _Chunk(NamedTuple):
    """A chunk of a tensor, and where it is stored, as torch.save wrote it."""

    begin: tuple[int, ...]  # in the tensor
    sizes: tuple[int, ...]
    file: str
    offset: int  # bytes
    length: int  # bytes


class _StandIn:
    """Stands for every object that unpickling `.metadata` would create by a class or a function. It
    keeps the first argument and the state, and does nothing."""

    __slots__ = ("argument", "state")
    argument: Any
    state: Any

    def __new__(cls, *arguments: Any) -> "_StandIn":
        made = super().__new__(cls)
        made.argument = arguments[0] if arguments else None
        return made

    def __setstate__(self, state: Any) -> None:  # on a class, this is an error
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore an item of an OrderedDict, which nothing read here has."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes) -> None:
        super().__init__(io.BytesIO(pickled))
        self._classes: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise ValueError(f"it refers to {module}.{name}, which is not executed")
        if isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if name not in self._classes:
            self._classes[name] = type(name, (_StandIn,), {"__slots__": ()})
        return self._classes[name]


def _check_opcodes(pickled: bytes) -> None:
    """Raise ValueError, or IndexError, where a pickle is not one of DCP's."""
    known = {op.name: op for op in pickletools.opcodes if op.name in _OPCODES.split()}
    fixed = {ord(op.code): 1 + (op.arg.n if op.arg else 0) for op in known.values()}
    with_length = {ord(known[name].code): 1 + n for name, n in _WITH_LENGTH.items()}
    at = 0
    while (code := pickled[at]) != ord(pickle.STOP):
        if code in with_length:
            end = at + with_length[code]
            at = end + int.from_bytes(pickled[at + 1 : end], "little")
        elif code in fixed:
            at += fixed[code]
        else:
            raise ValueError(f"it has the opcode {code:#04x}, which is not executed")


def _state(made: Any, kind: str) -> dict[str, Any]:
    """The attributes of an object of the class named `kind`."""
    if type(made).__name__ != kind or not isinstance(made.state, dict):
        raise ValueError(f"it has {type(made).__name__} where DCP has {kind}")
    return made.state


def _sizes(made: Any) -> tuple[int, ...]:
    sizes = made.argument if isinstance(made, _StandIn) else None
    if not isinstance(sizes, tuple) or not all(type(n) is int and 0 <= n < 2**63 for n in sizes):
        raise ValueError("it has sizes of a tensor that are no whole numbers")
    return sizes


class DCPFolder:
    """The tensors in a folder of DCP's. Other entries are not read.

    tensors: by name, on the meta device. They have no more bytes than the files.
    """

    def __init__(self, path: Path) -> None:
        """Reads `.metadata`. Raises ValueError, or whatever a damaged pickle makes Python raise."""
        self.path = path
        pickled = read_bytes(path / METADATA)
        _check_opcodes(pickled)
        metadata = _state(_Unpickler(pickled).load(), "Metadata")
        stored: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
        sizes: dict[str, int] = {}  # file sizes in bytes
        for index, info in metadata["storage_data"].items():
            index, info = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
            if index.get("offset") is None:  # not a tensor
                continue
            file, begin, length = info["relative_path"], info["offset"], info["length"]
            if Path(file).name != file:
                raise ValueError(f"it refers to the file {file}")
            if file not in sizes:
                sizes[file] = file_size(path / file)
            if not 0 <= begin <= begin + length <= sizes[file]:
                raise ValueError(f"it refers to bytes that {file} does not have")
            stored[index["fqn"], _sizes(index["offset"])] = file, begin, length
        self.tensors: dict[str, Tensor] = {}
        self._chunks: dict[str, list[_Chunk]] = {}
        for key, entry in metadata["state_dict_metadata"].items():
            if type(entry).__name__ == "TensorStorageMetadata":
                name, attributes = str(key), _state(entry, "TensorStorageMetadata")
                size, dtype = _sizes(attributes["size"]), attributes["properties"].state[0]
                self.tensors[name] = torch.empty(size, dtype=dtype, device="meta")
                chunks = [_state(made, "ChunkStorageMetadata") for made in attributes["chunks"]]
                places = [(_sizes(c["offsets"]), _sizes(c["sizes"])) for c in chunks]
                if not _cover_once(size, places):
                    raise ValueError(f"its chunks do not cover each element of {name} once")
                self._chunks[name] = [_Chunk(at, n, *stored[name, at]) for at, n in places]
        check_size(self.tensors, sum(sizes.values()))

    def read(self, parts: Iterable[Part]) -> None:
        """Fill the memory of each part. Every file is read once, from its begin to its end."""
        reads: dict[str, list[tuple[_Chunk, Part]]] = {}
        for part in parts:
            for chunk in self._chunks[part.name]:
                sides = zip(part.box, chunk.begin, chunk.sizes, strict=True)
                both = [(max(side.start, at), min(side.stop, at + n)) for side, at, n in sides]
                if any(first >= end for first, end in both):
                    continue
                in_chunk = _box(both, chunk.begin)
                in_part = _box(both, [side.start for side in part.box])
                overlap = Part(part.name, in_chunk, part.out[in_part])
                reads.setdefault(chunk.file, []).append((chunk, overlap))
        for name, chunks in reads.items():
            with (self.path / name).open("rb", buffering=0) as f:
                for stored, overlap in sorted(chunks, key=lambda read: read[0].offset):
                    try:
                        _read_chunk(f, stored, overlap)
                    except Exception as error:  # a damaged chunk may raise anything
                        raise ValueError(f"{name}: {error}") from error


def _cover_once(size: tuple[int, ...], chunks: Sequence[tuple[tuple[int, ...], ...]]) -> bool:
    """Whether each element of a tensor is in exactly one of its chunks, (begin, sizes)."""
    boxes = [((0,) * len(size), size), *(chunk for chunk in chunks if all(chunk[1]))]
    corners = [(a, tuple(i + n for i, n in zip(a, sizes, strict=True))) for a, sizes in boxes]
    # All elements between two neighbours of these places are in the same boxes.
    places = [sorted({c[d] for box in corners for c in box}) for d in range(len(size))]
    index = [{place: i for i, place in enumerate(side)} for side in places]
    shape = [len(side) - 1 for side in places]
    if len(boxes) * np.prod(shape, dtype=float) > MAX_CELLS:  # hours, or more than memory
        return False
    surplus = np.zeros(shape, np.int32)
    for i, box in enumerate(corners):
        inside = tuple(slice(at[a], at[e]) for at, a, e in zip(index, *box, strict=True))
        surplus[inside] += 1 if i else -1
    return not surplus.any()


def check_size(tensors: Mapping[str, Tensor], stored: int) -> None:
    """Raise ValueError where tensors would take more memory than the `stored` bytes of files."""
    if (size := sum(t.nbytes for t in tensors.values())) > stored:
        raise ValueError(f"its tensors have {size} bytes, and the files only {stored}")


def _box(sides: Sequence[tuple[int, int]], begin: Sequence[int]) -> tuple[slice, ...]:
    """The sides, (first, end) in the whole tensor, as a part that begins at `begin` has them."""
    return tuple(slice(a - at, e - at) for (a, e), at in zip(sides, begin, strict=True))


class _View(io.RawIOBase):
    """A part of a file as a file: one of DCP's has many tensors, each as torch.save wrote it."""

    def __init__(self, file: io.FileIO, begin: int, size: int) -> None:
        self._file, self._begin, self._size, self._at = file, begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def readinto(self, out: Any, /) -> int:
        part = memoryview(out)[: max(0, self._size - self._at)]
        n = os.preadv(self._file.fileno(), [part], self._begin + self._at)
        self._at += n
        return n


def _read_chunk(f: io.FileIO, stored: _Chunk, part: Part) -> None:
    """Fill a part of a chunk, which torch.save wrote into `f`; a few rows at a time, where it has
    another dtype or is on another device."""
    view = _View(f, stored.offset, stored.length)
    with ZipFile(view) as archive:
        if sum(record.file_size for record in archive.infolist()) > stored.length:
            raise ValueError("is compressed; must be as torch.save writes it")
    view.seek(0)
    chunk = torch.load(
        cast(IO[bytes], view), map_location="meta", weights_only=True
    )  # reads no elements
    if not isinstance(chunk, Tensor):
        raise ValueError(f"has {type(chunk).__name__} in place of {part.name}")
    begin = begin_in_file(chunk.untyped_storage())
    source, out = (t if t.dim() else t[None] for t in (chunk[part.box], part.out))
    size, end = source.itemsize, int(source.storage_offset()) + _span(source)
    if source.shape != out.shape or begin + end * size > stored.length:
        raise ValueError(f"{part.name} differs from {METADATA}")
    in_place = out.device.type == "cpu" and out.dtype == source.dtype
    in_place = in_place and out.is_contiguous() and source.is_contiguous()
    n_rows = len(source)
    if not in_place and chunk.is_contiguous():  # else rows may lie among each other
        n_rows = max(1, READ_BYTES // (size * max(1, source.stride(0))))
    for rows, out_rows in zip(source.split(n_rows), out.split(n_rows), strict=True):
        memory = out_rows.view(-1) if in_place else torch.empty(_span(rows), dtype=rows.dtype)
        as_bytes = memory.view(torch.uint8).numpy().data
        at = stored.offset + begin + int(rows.storage_offset()) * size
        if read_into(f.fileno(), as_bytes, at) < len(as_bytes):
            raise ValueError("ends too early")
        if not in_place:
            out_rows.copy_(memory.as_strided(rows.shape, rows.stride()))


def _span(t: Tensor) -> int:
    """Elements in memory from the first of a tensor to its last."""
    return 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
