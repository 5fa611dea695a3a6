"""Writing a checkpoint so that it is whole or not there: into a temporary folder, renamed last.

The manifest's entry of a file is of the bytes that were to be written, not of what a disk or a page
cache made of them.
"""

import errno
import io
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils.serialization import config as torch_config

from lingua.base.dump_dir import CONFIG, MANIFEST, METADATA, STATE, step_folder
from lingua.base.errors import UserError
from lingua.base.files import SyncedFile, sync_folder
from lingua.checkpoint.digest import digest, once
from lingua.checkpoint.folder import (
    Entry,
    checksum_of,
    find,
    find_on_rank_0,
    read_checkpoint,
    unpublished,
)
from lingua.parallel.mesh import gather_on_every_rank, gather_on_rank_0, on_rank_0, world_sum_

BLOCK = 1 << 20  # bytes of small writes that are collected


class NotSaved(UserError):
    """A save that failed. Every rank raises it; nothing is published and no file is left."""


@dataclass
class Layout:
    """Where the files of a run have its tensors, which is the same in every save: rank 0 learns of
    all ranks' parts once, and makes `.metadata` once, which takes minutes on thousands of ranks."""

    places: list[WriteResult] = field(default_factory=list)  # of this rank, in its file
    gathered: list[tuple[SavePlan, list[WriteResult]]] | None = None  # news to rank 0, by rank
    metadata: bytes = b""  # rank 0's `.metadata`, as DCP writes it

    def write(self, folder: Path) -> Entry:
        """Write `.metadata`, on rank 0. Returns its entry."""
        if self.gathered is not None:
            plans, places = zip(*self.gathered, strict=True)
            _, metadata = DefaultSavePlanner().create_global_plan(list(plans))
            metadata.storage_data = {p.index: p.storage_data for part in places for p in part}
            self.metadata, self.gathered = pickle.dumps(metadata), None
        return write_file(folder / METADATA, self.metadata)


def save(
    root: Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    config: str,
    start: int = 0,
    group: dist.ProcessGroup | None = None,
    check: Callable[[], None] = lambda: None,
    layout: Layout | None = None,
) -> Path:
    """Write the checkpoint of `step` and publish it. Called by every rank.

    Args:
        tensors: DTensors, or plain tensors, equal on every rank that has them; those on the meta
            device are left out.
        state: JSON-able; written as `train_state.json`, with the hash of the tensors.
        config: text of `config.yaml`.
        start: number of this start of the run.
        group: of all ranks, over gloo; another thread than the main one needs one of its own.
        check: called on rank 0 before the folder is published and after a failure; what it raises
            prevents the former and takes the place of the latter.
        layout: kept from one save to the next by who saves several times.

    Returns its folder. A step that is already published, and not damaged since, is left as it is.
    Raises NotSaved where a write failed on some rank.
    """
    final = root / step_folder(step)
    published = find_on_rank_0(lambda: [c for c in find(root) if c.step == step])
    if published:
        from lingua.checkpoint.saved import damage  # imported where a step was saved before

        if not damage(published[0], group):
            return final
    folder = Path(on_rank_0(lambda: str(unpublished(final, start))))
    layout = layout or Layout()
    try:
        _writing(lambda: folder.mkdir(parents=True))
        files = _write_tensors(folder, tensors, group, layout)
        state = state | {"tensors": digest(tensors, group)}

        def write() -> None:
            files[METADATA] = layout.write(folder)
            publish(folder, final, step, files, state, config, start, check)

        _writing(write)
    except UserError as error:  # every rank is here
        on_rank_0(lambda: shutil.rmtree(folder, ignore_errors=True))
        on_rank_0(check)  # another run that took `root` removes what it finds half written
        if isinstance(error, NotSaved):
            raise NotSaved(f"step {step} could not be saved into {root}: {error}") from None
        raise
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


def publish(
    folder: Path,
    final: Path,
    step: int,
    files: dict[str, Entry],
    state: dict[str, Any],
    config: str,
    start: int = 0,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Make the checkpoint `final` of a folder with these files of tensors. By one process. A later
    start that takes the run meanwhile has renamed `folder`, and what it has published stays."""
    files[STATE] = write_file(folder / STATE, json.dumps(state, indent=1).encode())
    files[CONFIG] = write_file(folder / CONFIG, config.encode())
    manifest = {
        "format": 1,
        "step": step,
        "serial": 1 + max((c.serial for c in find(final.parent)), default=0),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": dict(sorted(files.items())),
    }
    manifest["xxh3_64"] = checksum_of(manifest)
    write_file(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    whole, why = read_checkpoint(folder)
    if whole is None:
        raise UserError(f"{folder}: {why}. Is it on a file system that all processes share?")
    sync_folder(folder)
    check()
    try:
        folder.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        damaged = unpublished(final, start)  # out of the way, never modified
        final.rename(damaged)
        try:
            folder.rename(final)
        except OSError:
            damaged.rename(final)
            raise
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
    """DCP's access to files, which keeps the entry of the one that is written."""

    entry: Entry | None = None

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
        self.entry = file.entry()


def _write_tensors(
    folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None, layout: Layout
) -> dict[str, Entry]:
    """Write DCP's files, each rank its own, as `dcp.save` would. Returns the entries of all ranks'
    files, by name. Ranks send some bytes each, and rank 0 what `layout` does not have."""
    rank, why, plan, places = dist.get_rank(), "", SavePlan([]), list[WriteResult]()
    entry: Entry = {"size": 0, "xxh3_64": "0"}
    to_write = once(tensors, group)
    try:
        plan, places, entry = write_part(folder, to_write, rank)
    except Exception as error:  # raised on every rank
        why = str(error) or type(error).__name__
    checksum = (int(entry["xxh3_64"], 16) + 2**63) % 2**64 - 2**63  # the same bits, with a sign
    news = torch.zeros(4, dist.get_world_size(), dtype=torch.int64)
    news[:, rank] = torch.tensor([why != "", places != layout.places, entry["size"], checksum])
    failed, changed, sizes, checksums = world_sum_(news, group).tolist()
    if any(failed):
        first = failed.index(True)
        raise NotSaved(f"{gather_on_every_rank(why, group)[first]} (rank {first})")
    if any(changed):
        layout.places, layout.gathered = places, gather_on_rank_0((plan, places), group)
    return {
        f"__{r}_0.distcp": {"size": size, "xxh3_64": f"{checksum % 2**64:016x}"}
        for r, (size, checksum) in enumerate(zip(sizes, checksums, strict=True))
        if size
    }


def write_part(
    folder: Path, tensors: dict[str, Tensor], rank: int
) -> tuple[SavePlan, list[WriteResult], Entry]:
    """Write DCP's file of what this rank has of `tensors`, `__<rank>_0.distcp`, unless that is
    nothing. Returns what was to be written, where each is, and the file's entry."""
    # Its own sync leaves out what is still in its buffer; `_File` syncs.
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=False)
    writer.fs = file = _Files()
    # No checksum of each tensor: the manifest has one of each file.
    without_crc32 = torch_config.patch(  # type: ignore[attr-defined]  # torch adds it on import
        "save.compute_crc32", False
    )
    planner, places = DefaultSavePlanner(), list[WriteResult]()
    planner.set_up_planner(tensors)
    plan = planner.create_local_plan()
    folder.mkdir(parents=True, exist_ok=True)  # rank 0 reports that no file system is shared
    if plan.items:
        [*_, named] = writer.prepare_global_plan([plan] * (rank + 1))  # files of this rank
        with without_crc32:
            places = writer.write_data(named, planner).wait()
    return plan, places, file.entry or {"size": 0, "xxh3_64": "0"}


def write_file(path: Path, data: bytes) -> Entry:
    """Write a file and sync it; returns its entry."""
    file = _File(path)
    with io.BufferedWriter(file) as stream:
        stream.write(data)
    return file.entry()
