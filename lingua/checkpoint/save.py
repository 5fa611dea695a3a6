"""Writing a checkpoint so that it is whole or not there: into a temporary folder, renamed last."""

import json
import shutil
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from lingua.checkpoint.folder import (
    CONFIG,
    MANIFEST,
    STATE,
    checksum_of,
    damaged_files,
    find,
    read_checkpoint,
)
from lingua.checkpoint.write import NotSaved, write_tensors, write_text
from lingua.errors import UserError
from lingua.files import sync_folder
from lingua.parallel.mesh import on_rank_0


def save(
    root: Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict,
    config: str,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write the checkpoint of `step` and publish it. Called by every rank.

    Args:
        tensors: plain tensors, equal on every rank, or DTensors.
        state: JSON-able; written as `train_state.json`.
        config: text of `config.yaml`.
        group: of all ranks, over gloo; another thread than the main one needs one of its own.

    Returns:
        The folder. A step that is already published, and not damaged since, is left as it is.

    Raises:
        NotSaved: a write failed on some rank.
    """
    final = root / f"{step:010d}"
    published = on_rank_0(lambda: read_checkpoint(final)[0])
    if published is not None and not damaged_files(published, group):
        return final
    folder = on_rank_0(lambda: root / f"{final.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        _writing(lambda: folder.mkdir(parents=True))
        files = write_tensors(folder, tensors, group)
        _writing(lambda: _publish(folder, final, step, files, state, config))
    except UserError as error:  # every rank is here
        on_rank_0(lambda: shutil.rmtree(folder, ignore_errors=True))
        if isinstance(error, NotSaved):
            raise NotSaved(f"step {step} could not be saved into {root}: {error}") from None
        raise
    return final


def _writing(work: Callable[[], None]) -> None:
    """Let rank 0 write; an error of its file system is NotSaved on every rank."""

    def attempt() -> None:
        try:
            work()
        except OSError as error:
            raise NotSaved(str(error)) from error

    on_rank_0(attempt)


def _publish(
    folder: Path, final: Path, step: int, files: dict[str, dict], state: dict, config: str
) -> None:
    files[STATE] = write_text(folder / STATE, json.dumps(state, indent=1))
    files[CONFIG] = write_text(folder / CONFIG, config)
    serial = 1 + max((c.serial for c in find(final.parent)), default=0)
    manifest = {
        "format": 1,
        "step": step,
        "serial": serial,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": dict(sorted(files.items())),
    }
    manifest["xxh3_64"] = checksum_of(manifest)
    write_text(folder / MANIFEST, json.dumps(manifest, indent=1))
    whole, why = read_checkpoint(folder)
    if whole is None:
        raise UserError(f"{folder}: {why}. Is it on a file system that all processes share?")
    sync_folder(folder)
    if final.exists():  # a damaged one of the same step: out of the way, never modified
        final.rename(final.parent / f"{final.name}.tmp-{uuid.uuid4().hex[:8]}")
    folder.rename(final)
    sync_folder(final.parent)


def publish_config(root: Path, config: str) -> Path:
    """A checkpoint of step 0 without tensors, in an empty folder: the configuration of a model that
    is not trained yet. By one process."""
    folder, final = root / "config", root / f"{0:010d}"
    folder.mkdir()
    (folder / ".metadata").touch()
    _publish(folder, final, 0, {}, {}, config)
    return final
