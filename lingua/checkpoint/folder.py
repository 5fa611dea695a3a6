"""A checkpoint's folder: one per step, whole or not a checkpoint.

Tensors go through torch.distributed.checkpoint (DCP), keyed by parameter name; everything else is
`train_state.json`, one file for the run. `manifest.json` lists every file with size and checksum.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash

from lingua.checkpoint.write import file_entry
from lingua.errors import UserError
from lingua.parallel.mesh import on_rank_0

MANIFEST, STATE, CONFIG = "manifest.json", "train_state.json", "config.yaml"
NAME = re.compile(r"\d{10}")  # of a checkpoint's folder: the step


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a valid manifest whose files have the sizes that it lists."""

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
                return None, f"{name} has {size} bytes, its manifest lists {entry['size']}"
    except FileNotFoundError as error:
        return None, f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError, OSError) as error:
        return None, f"{MANIFEST} cannot be read: {error}"
    return checkpoint, ""


def find(root: Path, report: Callable[[str], None] = lambda line: None) -> list[Checkpoint]:
    """The checkpoints in a folder, the last published first.

    `report` is called with a line for each folder that is skipped."""
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
        UserError: there are checkpoints, but none verifies. To start from scratch beside them would
            remove what may be whole (a disk that fails, a folder without permission).
    """
    checkpoint, _ = first_undamaged(on_rank_0(lambda: find(root, report)), verify, report)
    if checkpoint is None and on_rank_0(
        lambda: any(NAME.fullmatch(path.name) for path in root.glob("*"))
    ):
        raise UserError(
            f"{root}: has checkpoints, but none that can be used; move them away to start from "
            "scratch"
        )
    return checkpoint


def first_undamaged(
    found: list[Checkpoint], verify: str, report: Callable[[str], None]
) -> tuple[Checkpoint | None, str]:
    """The first checkpoint that verifies, or None and why the last one does not. Called by every
    rank; with `verify: size` the sizes that were compared when it was found are enough."""
    why = ""
    for checkpoint in found:
        damaged = damaged_files(checkpoint) if verify == "full" else []
        if not damaged:
            return checkpoint, ""
        why = f"{checkpoint.path} is damaged: {'; '.join(damaged)}"
        if dist.get_rank() == 0:
            report(f"{checkpoint.path} is damaged ({'; '.join(damaged)}): skipped")
    return None, why


def damaged_files(checkpoint: Checkpoint, group: dist.ProcessGroup | None = None) -> list[str]:
    """Files that differ from the manifest, each with why: `__0_0.distcp: wrong checksum`.
    Called by every rank: each file is read by one, and the results are shared."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = sorted(checkpoint.files.items())[rank::world]
    wrong = {name: _wrong(checkpoint.path / name, entry) for name, entry in mine}
    bad = [f"{name}: {why}" for name, why in wrong.items() if why]
    results: list[list[str]] = [[]] * world
    dist.all_gather_object(results, bad, group)
    return sorted(line for part in results for line in part)


def verify(checkpoint: Checkpoint) -> None:
    """Raises UserError where a file differs from the manifest. Called by every rank."""
    if damaged := damaged_files(checkpoint):
        raise UserError(f"{checkpoint.path} is damaged: {'; '.join(damaged)}")


def _wrong(path: Path, entry: dict) -> str:
    try:
        return "" if file_entry(path) == entry else "wrong checksum"
    except OSError as error:
        return str(error.strerror)


def read_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """The content of `train_state.json`."""
    return json.loads((checkpoint.path / STATE).read_text(encoding="utf-8"))
