"""Loading a checkpoint's tensors on any topology, without trust in what is read: nothing in a
checkpoint is executed, and nothing is loaded that does not fit."""

import io
import pickle
import re
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path, PosixPath
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from lingua.checkpoint.folder import Checkpoint
from lingua.checkpoint.tensors import tensors_of
from lingua.errors import UserError

_OF_METADATA: dict[tuple[str, str], object] = {
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


class _Unpickler(pickle.Unpickler):
    """Finds what is allowed and torch's dtypes, and nothing else."""

    def __init__(self, stream: IO[bytes], allowed: dict[tuple[str, str], object]) -> None:
        super().__init__(stream)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in self._allowed:
            return self._allowed[module, name]
        found = getattr(torch, name, None) if module == "torch" else None
        if not isinstance(found, torch.dtype):
            raise UserError(f"it refers to {module}.{name}, which is not executed")
        return found

    def persistent_load(self, pid: tuple) -> tuple[torch.dtype, str]:
        """Of a tensor's storage: its dtype and its name."""
        _, dtype, name, *_ = pid
        return dtype, name


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
    on the meta device, where it begins in its storage, in bytes, and that storage's name."""
    tensor = torch.empty_strided(size, stride, dtype=dtype or storage[0], device="meta")
    return tensor, offset * tensor.itemsize, storage[1]


_OF_TENSORS: dict[tuple[str, str], object] = {
    ("torch._utils", "_rebuild_tensor_v2"): _without_elements,
    ("torch._utils", "_rebuild_tensor_v3"): _without_elements,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch.storage", "UntypedStorage"): torch.uint8,
    ("torch", "DoubleStorage"): torch.float64,
    ("torch", "FloatStorage"): torch.float32,
    ("torch", "HalfStorage"): torch.float16,
    ("torch", "BFloat16Storage"): torch.bfloat16,
    ("torch", "ComplexDoubleStorage"): torch.complex128,
    ("torch", "ComplexFloatStorage"): torch.complex64,
    ("torch", "LongStorage"): torch.int64,
    ("torch", "IntStorage"): torch.int32,
    ("torch", "ShortStorage"): torch.int16,
    ("torch", "CharStorage"): torch.int8,
    ("torch", "ByteStorage"): torch.uint8,
    ("torch", "BoolStorage"): torch.bool,
}


def _tensor_in(stream: IO[bytes]) -> tuple[Tensor, int]:
    """What torch.save wrote: the tensor on the meta device, and where in `stream` it begins."""
    file = torch._C.PyTorchFileReader(stream)
    tensor, offset, name = _Unpickler(io.BytesIO(file.get_record("data.pkl")), _OF_TENSORS).load()
    if file.has_record("byteorder") and file.get_record("byteorder").decode() != sys.byteorder:
        raise UserError("its bytes are in the order of another kind of processor")
    return tensor, file.get_record_offset(f"data/{name}") + offset


class _Reader(FileSystemReader):
    """DCP's reader, without trust in what it reads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp_metadata.Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as f:
                metadata = _Unpickler(f, _OF_METADATA).load()
        except Exception as error:  # a damaged pickle may raise anything
            raise UserError(f"{path} cannot be read: {error}") from error
        for info in (metadata.storage_data or {}).values():
            if Path(info.relative_path).name != info.relative_path:
                raise UserError(f"a checkpoint's .metadata refers to the file {info.relative_path}")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = dcp_metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As torch's own, without its two copies of all bytes in new memory: they are read where
        they belong, or through memory that is used again."""
        scratch = torch.empty(0, dtype=torch.uint8)
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in files.items():
            with (Path(self.path) / name).open("rb", buffering=0) as f:
                items.sort(key=lambda item: self.storage_data[item.storage_index].offset)
                for item in items:
                    info = self.storage_data[item.storage_index]
                    if item.type != LoadItemType.TENSOR:
                        raise UserError(f"{item.dest_index.fqn} is not a tensor: not loaded")
                    stored, begin = _tensor_in(self._slice_file(f, info))
                    target = planner.resolve_tensor(item).detach()
                    scratch = _read_part(f, info, item, stored, begin, target, scratch)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _read_part(
    f: FileIO,
    info: _StorageInfo,
    item: ReadItem,
    stored: Tensor,
    begin: int,
    target: Tensor,
    scratch: Tensor,
) -> Tensor:
    """Fill `target` with the part of `stored` that is meant for it, through `scratch` where it
    cannot be read into. `begin` is the place of `stored` in what `info` is of.

    Returns:
        `scratch`, or what took its place because it was too small.
    """
    ends = map(sum, zip(item.storage_offsets, item.lengths, strict=True))
    part = stored[tuple(map(slice, item.storage_offsets, ends))]
    if part.shape != target.shape:
        raise UserError(f"{item.dest_index.fqn} is not what .metadata says")
    if not part.numel():
        return scratch
    begin += part.storage_offset() * part.itemsize
    last = sum((n - 1) * step for n, step in zip(part.shape, part.stride(), strict=True))
    length = (last + 1) * part.itemsize
    if begin + length > info.length:
        raise UserError(f"{item.dest_index.fqn} is not what .metadata says")
    f.seek(info.offset + begin)
    in_place = target.device.type == "cpu" and target.dtype == part.dtype
    if in_place and target.is_contiguous() and part.is_contiguous():
        _read_into(f, target.view(-1).view(torch.uint8))
    else:
        if scratch.numel() < length:
            scratch = torch.empty(length, dtype=torch.uint8)
        _read_into(f, scratch[:length])
        target.copy_(scratch[:length].view(part.dtype).as_strided(part.shape, part.stride()))
    return scratch


def _read_into(f: FileIO, memory: Tensor) -> None:
    rest = memoryview(memory.numpy())
    while rest:
        n = f.readinto(rest)
        if not n:
            raise UserError(f"{f.name} ends too early")
        rest = rest[n:]


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
    """Fill `tensors` from a folder of DCP's that is known to have them. Called by every rank, or by
    a process without a group."""
    # As torch's own `load`, which gathers the plans of all ranks on one and hands them back.
    reader, planner = _Reader(folder), DefaultLoadPlanner()
    failure: Exception | None = None
    try:
        metadata = reader.read_metadata()
        planner.set_up_planner(tensors, metadata)
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        reader.read_data(planner.create_local_plan(), planner).wait()
    except Exception as error:  # a damaged file may raise anything
        failure = error
    everyone = [failure and reason(failure)]
    if dist.is_initialized():
        everyone *= dist.get_world_size()
        dist.all_gather_object(everyone, everyone[0])
    if met := next(filter(None, everyone), None):
        raise UserError(f"{folder} cannot be read: {met}") from failure


def reason(error: BaseException) -> str:
    """What matters of torch.load's messages, some of which advise to trust the file."""
    text = str(error)
    if found := re.search(r"GLOBAL ([\w.]+)", text):
        return f"it refers to {found[1]}, which is not executed"
    if text.startswith("mmap can only"):
        return "it is not in the zip format of torch.save"
    return text.split(". ")[0] or type(error).__name__


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
