"""A checkpoint's folder: one per step, whole or not a checkpoint.

Tensors go through torch.distributed.checkpoint (DCP), keyed by parameter name; everything else is
`train_state.json`, one file for the run. `manifest.json` lists every file with size and checksum.
"""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash

from lingua.checkpoint.write import describe
from lingua.errors import UserError
from lingua.parallel.mesh import on_rank_0

MANIFEST, STATE, CONFIG = "manifest.json", "train_state.json", "config.yaml"


NAME = re.compile(r"\d{10}")


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose manifest reads well: what `find` returns, newest first."""

    path: Path
    step: int
    serial: int  # order of publication, which can differ from the order of steps
    files: dict[str, dict[str, Any]]  # name -> {"size": bytes, "xxh3_64": hexadecimal}


def checksum_of(manifest: dict) -> str:
    text = json.dumps({k: v for k, v in manifest.items() if k != "xxh3_64"}, sort_keys=True)
    return xxhash.xxh3_64_hexdigest(text.encode())


def read_checkpoint(path: Path) -> tuple[Checkpoint | None, str]:
    """The checkpoint in a folder, or None and why the folder is not one. Compares sizes too."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["xxh3_64"] != checksum_of(manifest):
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
            if files := foreign_files(checkpoint):
                report(f"{path}: {', '.join(files)} not in its manifest: not read")
    return sorted(found, key=lambda c: c.serial, reverse=True)


def foreign_files(checkpoint: Checkpoint) -> list[str]:
    # `glob` finds nothing in a folder that another process has just removed; `iterdir` raises.
    names = {path.name for path in checkpoint.path.glob("*")}
    return sorted(names - {MANIFEST, *checkpoint.files})


def newest(root: Path, verify: str, report: Callable[[str], None]) -> Checkpoint | None:
    """The last published checkpoint that verifies, None where there is none at all. Called by every
    rank; rank 0 chooses.

    Raises:
        UserError: there are checkpoints, but none verifies. To begin anew beside them would remove
            what may be whole (a disk that fails, a folder without permission).
    """
    for checkpoint in on_rank_0(lambda: find(root, report)):
        damaged = damaged_files(checkpoint) if verify == "full" else []
        if not damaged:
            return checkpoint
        if dist.get_rank() == 0:
            report(f"{checkpoint.path} is damaged ({'; '.join(damaged)}): skipped")
    if on_rank_0(lambda: any(NAME.fullmatch(path.name) for path in root.glob("*"))):
        raise UserError(
            f"{root}: has checkpoints, but none that can be used; move them away to begin anew"
        )
    return None


def damaged_files(checkpoint: Checkpoint, group: dist.ProcessGroup | None = None) -> list[str]:
    """Files that are not what the manifest says, each with why: `__0_0.distcp: wrong checksum`.
    Called by every rank: each file is read by one, and the verdicts are shared."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = sorted(checkpoint.files.items())[rank::world]
    wrong = {name: _wrong(checkpoint.path / name, entry) for name, entry in mine}
    bad = [f"{name}: {why}" for name, why in wrong.items() if why]
    verdicts: list[list[str]] = [[]] * world
    dist.all_gather_object(verdicts, bad, group)
    return sorted(line for part in verdicts for line in part)


def _wrong(path: Path, entry: dict) -> str:
    try:
        return "" if describe(path) == entry else "wrong checksum"
    except OSError as error:
        return str(error.strerror)


def read_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `save` was given as `state`."""
    return json.loads((checkpoint.path / STATE).read_text(encoding="utf-8"))
