"""Writing the files of a checkpoint so that they are on the disk, with their manifest entries.

A file's entry is `{"size": bytes, "xxh3_64": hexadecimal}`: of the bytes that were to be written,
not of what a disk or a page cache made of them.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from lingua.errors import UserError
from lingua.files import SyncedFile

BLOCK = 1 << 20  # bytes of small writes that are collected, and that are read at once


class NotSaved(UserError):
    """A save that failed. Every rank raises it; nothing is published and no file is left."""


class _File(SyncedFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._checksum = xxhash.xxh3_64()

    def write(self, data: Any) -> int:
        n = super().write(data)
        self._checksum.update(memoryview(data)[:n])
        return n

    def entry(self) -> dict[str, Any]:
        return {"size": self.size, "xxh3_64": self._checksum.hexdigest()}


class _Files(FileSystem):
    """DCP's access to files, which keeps the entries of those that are written, by name."""

    def __init__(self) -> None:
        self.written: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: Path, mode: str) -> Iterator[io.BufferedWriter]:
        file = _File(path)
        with io.BufferedWriter(file, BLOCK) as stream:
            yield stream
        self.written[path.name] = file.entry()

    def rename(self, path: Path, new_path: Path) -> None:
        super().rename(path, new_path)
        self.written[new_path.name] = self.written.pop(path.name)


class _Writer(FileSystemWriter):
    def __init__(self, folder: Path) -> None:
        # Its own sync leaves out what is still in its buffer; `_File` syncs.
        super().__init__(folder, single_file_per_rank=True, sync_files=False)
        self.fs = _Files()

    def write_data(self, plan: Any, planner: Any) -> Any:
        crc32 = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)  # of each tensor: the manifest has a checksum
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # After a write that failed, torch reports how closing the file failed.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        finally:
            torch.serialization.set_crc32_options(crc32)


def write_tensors(
    folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None
) -> dict[str, dict[str, Any]]:
    """Write DCP's files, each rank its own, and sync them. Called by every rank.

    Returns:
        The entries of all ranks' files, by name.

    Raises:
        NotSaved: a write failed on some rank.
    """
    writer = _Writer(folder)
    try:
        dcp.save(tensors, storage_writer=writer, planner=DefaultSavePlanner(), process_group=group)
    except CheckpointException as error:  # of any rank, on every rank
        rank, (why, _) = min(error.failures.items())
        raise NotSaved(f"{why} (rank {rank})") from error
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, writer.fs.written, group)
    return {name: entry for part in everyone for name, entry in part.items()}


def write_text(path: Path, text: str) -> dict[str, Any]:
    """Write a file and sync it; returns its entry."""
    file = _File(path)
    with io.BufferedWriter(file) as stream:
        stream.write(text.encode())
    return file.entry()


def file_entry(path: Path) -> dict[str, Any]:
    """The entry of what a file contains now."""
    checksum, size, block = xxhash.xxh3_64(), 0, memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as f:
        while n := f.readinto(block):
            checksum.update(block[:n])
            size += n
    return {"size": size, "xxh3_64": checksum.hexdigest()}
