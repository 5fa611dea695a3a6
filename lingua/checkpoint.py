"""Checkpoints that are whole or not there, and load on any topology.

One folder per step. Tensors go through torch.distributed.checkpoint (DCP), keyed by parameter name;
everything else is `train_state.json`, one file for the run. A save writes into a temporary folder,
lists every file with size and checksum in `manifest.json`, and renames the folder last, so a folder
with a manifest that holds is a checkpoint and anything else is a leftover. `checkpoint_load` reads
the tensors, `resume` says what may differ from what was saved.
"""

import json
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from lingua.args import Free
from lingua.distributed import on_rank_0
from lingua.errors import UserError
from lingua.init import canonical_name

MANIFEST, STATE, CONFIG = "manifest.json", "train_state.json", "config.yaml"
NAME = re.compile(r"\d{10}")
LEFTOVER = re.compile(r"\d{10}\.tmp-[0-9a-f]{8}")


@dataclass
class SaveEvery:
    every: Free[int] = 1000  # steps between two saves; 0 or -1: none
    keep: Free[int] = -1  # how many of the newest to keep; 0 or -1: all


@dataclass
class CheckpointArgs:
    dump: SaveEvery = field(default_factory=SaveEvery)  # to resume from
    eval: SaveEvery = field(default_factory=lambda: SaveEvery(every=0))  # to evaluate later
    path: Free[str | None] = None  # folder of the checkpoints; null: <dump_dir>/checkpoints
    # what is compared with the manifest before loading: sizes and checksums, or sizes alone
    verify: Free[Literal["full", "size"]] = "full"
    # guarded config keys that may differ from the checkpoint's when resuming
    allow_change: Free[list[str]] = field(default_factory=list)

    def due(self, step: int) -> bool:
        """Whether a save is due once `step` is complete."""
        return any(kind.every > 0 and step % kind.every == 0 for kind in (self.dump, self.eval))


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose manifest reads well: what `find` returns, newest first."""

    path: Path
    step: int
    serial: int  # order of publication, which can differ from the order of steps
    files: dict[str, dict[str, Any]]  # name -> {"size": bytes, "crc32": hexadecimal}


# --------------------------------------------------------------------------------------- state


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of a run by name: `model.<name>` and `optim.<state>.<parameter name>`.

    These are the live tensors: saving reads them, loading fills them in place.
    """
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    tensors: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        tensors[f"model.{canonical_name(name)}"] = p.detach()
        for key, value in sorted(optimizer.state.get(p, {}).items()):
            tensors[f"optim.{key}.{canonical_name(name)}"] = value
    for name, b in model.named_buffers():
        if name not in transient:
            tensors[f"model.{canonical_name(name)}"] = b
    return tensors


# ---------------------------------------------------------------------------------------- save


def save(root: Path, step: int, tensors: dict[str, Tensor], state: dict, config: str) -> Path:
    """Write the checkpoint of `step` and publish it. Called by every rank.

    Args:
        tensors: plain tensors, equal on every rank, or DTensors.
        state: JSON-able; written as `train_state.json`.
        config: text of `config.yaml`.

    Returns:
        The folder. A step that is already published, and not damaged since, is left as it is.

    Raises:
        Exception: a write failed on some rank. All ranks raise and nothing is published.
    """
    final = root / f"{step:010d}"
    published = on_rank_0(lambda: read_checkpoint(final)[0])
    if published is not None and not damaged_files(published):
        return final

    def begin() -> Path:
        temporary = root / f"{final.name}.tmp-{uuid.uuid4().hex[:8]}"
        temporary.mkdir(parents=True)
        return temporary

    folder = on_rank_0(begin)
    dcp.save(
        tensors,
        storage_writer=FileSystemWriter(folder, single_file_per_rank=True, sync_files=True),
        planner=DefaultSavePlanner(),
    )
    try:
        mine = {p.name: _describe(p) for p in folder.glob(f"__{dist.get_rank()}_*")}
    except OSError as error:
        mine = error
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for part in everyone:
        if isinstance(part, OSError):
            raise part
    files = {name: entry for part in everyone for name, entry in part.items()}
    on_rank_0(lambda: _publish(folder, final, step, files, state, config))
    return final


def _publish(
    folder: Path, final: Path, step: int, files: dict[str, dict], state: dict, config: str
) -> None:
    _write(folder / STATE, json.dumps(state, indent=1))
    _write(folder / CONFIG, config)
    for name in (STATE, CONFIG, ".metadata"):
        files[name] = _describe(folder / name)
    serial = 1 + max((c.serial for c in find(final.parent)), default=0)
    manifest = {
        "format": 1,
        "step": step,
        "serial": serial,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": dict(sorted(files.items())),
    }
    manifest["crc32"] = _checksum_of(manifest)
    _write(folder / MANIFEST, json.dumps(manifest, indent=1))
    whole, why = read_checkpoint(folder)
    if whole is None:
        raise UserError(f"{folder}: {why}. Is it on a file system that all processes share?")
    _sync(folder)
    if final.exists():  # a damaged one of the same step: out of the way, never modified
        final.rename(final.parent / f"{final.name}.tmp-{uuid.uuid4().hex[:8]}")
    folder.rename(final)
    _sync(final.parent)


def _checksum_of(manifest: dict) -> str:
    text = json.dumps({k: v for k, v in manifest.items() if k != "crc32"}, sort_keys=True)
    return f"{zlib.crc32(text.encode()):08x}"


def _describe(path: Path) -> dict[str, Any]:
    crc, size = 0, 0
    with path.open("rb", buffering=0) as f:
        while block := f.read(1 << 24):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return {"size": size, "crc32": f"{crc:08x}"}


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(root: Path, args: CheckpointArgs) -> list[Path]:
    """Remove what retention does not keep; on one rank, after a save was published.

    Kept are the newest `dump.keep` checkpoints, whatever they were saved for, and the newest
    `eval.keep` of those that fall on `eval.every`. Other files and folders are not touched, save
    the leftovers of saves that did not finish.

    Returns:
        The checkpoints removed.
    """
    found = find(root)
    evals = [c for c in found if args.eval.every > 0 and c.step % args.eval.every == 0]
    keep = {
        c.path
        for checkpoints, kind in ((found, args.dump), (evals, args.eval))
        for c in (checkpoints if kind.keep <= 0 else checkpoints[: kind.keep])
    }
    gone = [c.path for c in found if c.path not in keep]
    for path in gone:  # under another name first: half a removal must not look like a checkpoint
        path.rename(root / f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    for path in root.iterdir():
        if LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    return gone


# ------------------------------------------------------------------------------- find and verify


def read_checkpoint(path: Path) -> tuple[Checkpoint | None, str]:
    """The checkpoint in a folder, or None and why the folder is not one. Compares sizes too."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["crc32"] != _checksum_of(manifest):
            return None, f"{MANIFEST} is damaged"
        checkpoint = Checkpoint(path, manifest["step"], manifest["serial"], manifest["files"])
        for name, entry in checkpoint.files.items():
            size = (path / name).stat().st_size
            if size != entry["size"]:
                return None, f"{name} has {size} bytes, its manifest says {entry['size']}"
    except FileNotFoundError as error:
        return None, f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError, OSError) as error:
        return None, f"{MANIFEST} cannot be read: {error}"
    return checkpoint, ""


def find(root: Path, report: Callable[[str], None] = lambda line: None) -> list[Checkpoint]:
    """The checkpoints in a folder, the last published first; `report` is told what is skipped."""
    found = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if not path.is_dir():
            continue
        if not NAME.fullmatch(path.name):
            report(f"{path} is not a checkpoint: skipped")
            continue
        checkpoint, why = read_checkpoint(path)
        if checkpoint is not None and checkpoint.step != int(path.name):
            checkpoint, why = None, f"its manifest is of step {checkpoint.step}"
        if checkpoint is None:
            report(f"{path} is not a whole checkpoint ({why}): skipped")
        else:
            found.append(checkpoint)
    return sorted(found, key=lambda c: c.serial, reverse=True)


def newest(root: Path, verify: str, report: Callable[[str], None]) -> Checkpoint | None:
    """The last published checkpoint that verifies. Called by every rank; rank 0 chooses."""
    for checkpoint in on_rank_0(lambda: find(root, report)):
        damaged = damaged_files(checkpoint) if verify == "full" else []
        if not damaged:
            return checkpoint
        if dist.get_rank() == 0:
            report(f"{checkpoint.path} is damaged ({', '.join(damaged)}: checksum): skipped")
    return None


def damaged_files(checkpoint: Checkpoint) -> list[str]:
    """Files whose checksum is not the manifest's. Called by every rank: each file is read by one,
    and the verdicts are shared."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = sorted(checkpoint.files.items())[rank::world]
    bad = [name for name, entry in mine if not _holds(checkpoint.path / name, entry)]
    verdicts: list[list[str]] = [[]] * world
    dist.all_gather_object(verdicts, bad)
    return sorted(name for part in verdicts for name in part)


def _holds(path: Path, entry: dict) -> bool:
    try:
        return _describe(path) == entry
    except OSError:
        return False


def read_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `save` was given as `state`."""
    return json.loads((checkpoint.path / STATE).read_text(encoding="utf-8"))
