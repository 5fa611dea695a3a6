"""Writing a checkpoint so that it is whole or not there: into a temporary folder, renamed last.

The manifest's entry of a file is of the bytes that were to be written, not of what a disk or a page
cache made of them.
"""

import io
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.utils.serialization import config as torch_config

from lingua.base.dump_dir import CONFIG, MANIFEST, STATE, step_folder
from lingua.base.errors import UserError
from lingua.base.files import SyncedFile, sync_folder
from lingua.checkpoint.digest import digest
from lingua.checkpoint.folder import (
    Entry,
    checksum_of,
    damage,
    find,
    find_on_rank_0,
    read_checkpoint,
    temporary,
)
from lingua.parallel.mesh import on_rank_0

BLOCK = 1 << 20  # bytes of small writes that are collected


class NotSaved(UserError):
    """A save that failed. Every rank raises it; nothing is published and no file is left."""


def save(
    root: Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    config: str,
    group: dist.ProcessGroup | None = None,
    check: Callable[[], None] = lambda: None,
) -> Path:
    """Write the checkpoint of `step` and publish it. Called by every rank.

    Args:
        tensors: DTensors, or plain tensors, equal on every rank that has them; those on the meta
            device are left out.
        state: JSON-able; written as `train_state.json`, with the hash of the tensors.
        config: text of `config.yaml`.
        group: of all ranks, over gloo; another thread than the main one needs one of its own.
        check: called on rank 0 before the folder is published and after a failure; what it raises
            prevents the former and takes the place of the latter.

    Returns its folder. A step that is already published, and not damaged since, is left as it is.
    Raises NotSaved where a write failed on some rank.
    """
    final = root / step_folder(step)
    published = find_on_rank_0(lambda: [c for c in find(root) if c.step == step])
    if published and not damage(published[0], group):
        return final
    folder = Path(on_rank_0(lambda: str(temporary(final))))
    try:
        _writing(lambda: folder.mkdir(parents=True))
        files = _write_tensors(folder, tensors, group)
        state = state | {"tensors": digest(tensors, group)}
        _writing(lambda: _publish(folder, final, step, files, state, config, check))
    except UserError as error:  # every rank is here
        on_rank_0(lambda: shutil.rmtree(folder, ignore_errors=True))
        on_rank_0(check)  # another run that took `root` removes what it finds half written
        if isinstance(error, NotSaved):
            raise NotSaved(f"step {step} could not be saved into {root}: {error}") from None
        raise
    return final


def publish_config(root: Path, config: str) -> Path:
    """A checkpoint of step 0 without tensors, in an empty folder: the configuration of a model that
    is not trained yet. By one process."""
    folder, final = root / "config", root / step_folder(0)
    folder.mkdir()
    _publish(folder, final, 0, {}, {}, config)
    return final


def _writing(work: Callable[[], None]) -> None:
    """Run `work` on rank 0; an error of its file system is NotSaved on every rank."""

    def attempt() -> str | None:
        try:
            work()
        except OSError as error:
            return str(error)
        return None

    if (why := on_rank_0(attempt)) is not None:
        raise NotSaved(why)


def _publish(
    folder: Path,
    final: Path,
    step: int,
    files: dict[str, Entry],
    state: dict[str, Any],
    config: str,
    check: Callable[[], None] = lambda: None,
) -> None:
    files[STATE] = write_text(folder / STATE, json.dumps(state, indent=1))
    files[CONFIG] = write_text(folder / CONFIG, config)
    manifest = {
        "format": 1,
        "step": step,
        "serial": 1 + max((c.serial for c in find(final.parent)), default=0),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": dict(sorted(files.items())),
    }
    manifest["xxh3_64"] = checksum_of(manifest)
    write_text(folder / MANIFEST, json.dumps(manifest, indent=1))
    whole, why = read_checkpoint(folder)
    if whole is None:
        raise UserError(f"{folder}: {why}. Is it on a file system that all processes share?")
    sync_folder(folder)
    check()
    if final.exists():  # a damaged one of the same step: out of the way, never modified
        final.rename(temporary(final))
    folder.rename(final)
    sync_folder(final.parent)


# ---------------------------------------------------------------------------------------- files


class _File(SyncedFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._checksum = xxhash.xxh3_64()

    def write(self, data: Any) -> int:
        n = super().write(data)
        self._checksum.update(memoryview(data)[:n])
        return n

    def entry(self) -> Entry:
        return {"size": self.size, "xxh3_64": self._checksum.hexdigest()}


class _Files(FileSystem):
    """DCP's access to files, which keeps the entries of those that are written, by name."""

    def __init__(self) -> None:
        self.written: dict[str, Entry] = {}

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Iterator[Any]:
        file = _File(Path(path))
        try:
            with io.BufferedWriter(file, BLOCK) as stream:
                yield stream
        except RuntimeError as error:
            # After a write that failed, torch reports how closing the file failed.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        # DCP renames `.metadata.tmp` last.
        self.written[Path(path).name.removesuffix(".tmp")] = file.entry()


def _write_tensors(
    folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None
) -> dict[str, Entry]:
    """Write DCP's files, each rank its own. Returns the entries of all ranks' files, by name."""
    # Its own sync leaves out what is still in its buffer; `_File` syncs.
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=False)
    writer.fs = files = _Files()
    # No checksum of each tensor: the manifest has one of each file.
    without_crc32 = torch_config.patch(  # type: ignore[attr-defined]  # torch adds it on import
        "save.compute_crc32", False
    )
    held = {name: t for name, t in tensors.items() if not t.is_meta}
    try:
        with without_crc32:
            dcp.save(held, storage_writer=writer, process_group=group)
    except CheckpointException as error:  # raised on every rank
        rank, (why, _) = min(error.failures.items())
        raise NotSaved(f"{why} (rank {rank})") from error
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, files.written, group)
    return {name: entry for part in everyone for name, entry in part.items()}


def write_text(path: Path, text: str) -> Entry:
    """Write a file and sync it; returns its entry."""
    file = _File(path)
    with io.BufferedWriter(file) as stream:
        stream.write(text.encode())
    return file.entry()
