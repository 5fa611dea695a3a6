"""Checkpoints that are whole or not there, and load on any topology.

One folder per step. Tensors go through torch.distributed.checkpoint (DCP), keyed by parameter name;
everything else is `train_state.json`, one file for the run. A save writes into a temporary folder,
lists every file with size and checksum in `manifest.json`, and renames the folder last, so a folder
with a manifest that holds is a checkpoint and anything else is a leftover. `checkpoint_write` has
the files that are written, `checkpoint_load` reads the tensors, `resume` says what may differ from
what was saved, `checkpoint_saver` is a run's saves.

    python -m lingua.checkpoint --help     to look at checkpoints from outside a run
"""

import json
import logging
import math
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lingua.args import Free
from lingua.checkpoint_write import NotSaved, describe, write_tensors, write_text
from lingua.distributed import on_rank_0
from lingua.errors import UserError
from lingua.files import sync_folder
from lingua.init import canonical_name

MANIFEST, STATE, CONFIG = "manifest.json", "train_state.json", "config.yaml"
NAME = re.compile(r"\d{10}")
LEFTOVER = re.compile(r"\d{10}\.tmp-[0-9a-f]{8}")
MARK = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
BEST = "best"  # the mark of the checkpoint with the lowest held-out loss

logger = logging.getLogger(__name__)


@dataclass
class SaveEvery:
    every: Free[int] = 1000  # steps between two saves; 0 or -1: none
    keep: Free[int] = -1  # how many of the newest to keep; 0 or -1: all


@dataclass
class CheckpointArgs:
    dump: SaveEvery = field(default_factory=SaveEvery)  # to resume from
    eval: SaveEvery = field(default_factory=lambda: SaveEvery(every=0))  # to evaluate later
    # of those saved, steps that this divides are kept for ever; 0: none for that reason
    keep_every: Free[int] = 0
    # measure the held-out loss at every save, and keep the checkpoint where it is the lowest
    keep_best: Free[bool] = False
    path: Free[str | None] = None  # folder of the checkpoints; null: <dump_dir>/checkpoints
    async_save: Free[bool] = False  # write from a copy in memory, while training goes on
    # a save that fails: `continue` training and try again at the next one, or `stop`; a run whose
    # last save fails ends with an error either way
    on_error: Free[Literal["continue", "stop"]] = "continue"
    # what is compared with the manifest before loading: sizes and checksums, or sizes alone
    verify: Free[Literal["full", "size"]] = "full"
    # what a run without a checkpoint of its own starts from: a checkpoint, a dump_dir (its newest),
    # a Meta Lingua checkpoint or a file of torch.save; null: initial weights
    init_ckpt_path: Free[str | None] = None
    # from init_ckpt_path take optimizer, step and position as well as the model
    continue_training_from_init: Free[bool] = False
    # or a folder of a Hugging Face Llama model, whose weights it starts with
    init_from: Free[str | None] = None
    # guarded config keys that may differ from the checkpoint's when resuming
    allow_change: Free[list[str]] = field(default_factory=list)

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.continue_training_from_init and self.init_ckpt_path is None:
            yield "init_ckpt_path", "must be given when continue_training_from_init is true"
        if self.init_from is not None and self.init_ckpt_path is not None:
            yield "init_from", "must not be given together with checkpoint.init_ckpt_path"

    def due(self, step: int) -> bool:
        """Whether a save is due once `step` is complete."""
        return any(kind.every > 0 and step % kind.every == 0 for kind in (self.dump, self.eval))


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose manifest reads well: what `find` returns, newest first."""

    path: Path
    step: int
    serial: int  # order of publication, which can differ from the order of steps
    files: dict[str, dict[str, Any]]  # name -> {"size": bytes, "xxh3_64": hexadecimal}


# --------------------------------------------------------------------------------------- state


def tensors_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Tensor]:
    """Every tensor of a run by name: `model.<name>` and `optim.<state>.<parameter name>`.

    These are the live tensors: saving reads them, loading fills them in place.
    """
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward without gradients the root is still whole
    tensors: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        tensors[f"model.{canonical_name(name)}"] = p.detach()
        state = {} if optimizer is None else optimizer.state.get(p, {})
        for key, value in sorted(state.items()):
            tensors[f"optim.{key}.{canonical_name(name)}"] = value
    for name, b in model.named_buffers():
        if name not in transient:
            tensors[f"model.{canonical_name(name)}"] = b
    return tensors


# ---------------------------------------------------------------------------------------- save


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
    manifest["xxh3_64"] = _checksum_of(manifest)
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
    """A checkpoint of step 0 without tensors, in an empty folder: it says what a model is before
    there is one. By one process."""
    folder, final = root / "config", root / f"{0:010d}"
    folder.mkdir()
    (folder / ".metadata").touch()
    _publish(folder, final, 0, {}, {}, config)
    return final


def _checksum_of(manifest: dict) -> str:
    text = json.dumps({k: v for k, v in manifest.items() if k != "xxh3_64"}, sort_keys=True)
    return xxhash.xxh3_64_hexdigest(text.encode())


def prune(root: Path, args: CheckpointArgs) -> list[Path]:
    """Remove what retention does not keep, and mark the best of the rest; on one rank, after a save
    was published.

    Kept are the newest `dump.keep` checkpoints, whatever they were saved for, the newest
    `eval.keep` of those that fall on `eval.every`, all that fall on `keep_every`, the best with
    `keep_best`, and all that are marked otherwise or have files that no save put there. Other files
    and folders are not touched, save the leftovers of saves that did not finish: no other save may
    be under way in the folder.

    Returns:
        The checkpoints removed.
    """
    gone = []
    try:
        found = find(root)
        keep = _to_keep(found, args)
        for c in found:
            if c.path in keep or set(marks(c.path)) - {BEST}:
                continue
            if others := _foreign_files(c):
                logger.warning(f"{c.path} is kept: it has files of others ({', '.join(others)})")
                continue
            # Under another name first: half a removal must not look like a checkpoint.
            c.path.rename(root / f"{c.path.name}.tmp-{uuid.uuid4().hex[:8]}")
            gone.append(c.path)
        _mark_best(root, [c for c in found if c.path not in gone])
        for path in root.iterdir():
            if LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        logger.warning(f"old checkpoints cannot be removed: {error}")
    return gone


def _to_keep(found: list[Checkpoint], args: CheckpointArgs) -> set[Path]:
    """Those that options keep; `found` is newest first."""
    evals = [c for c in found if args.eval.every > 0 and c.step % args.eval.every == 0]
    keep = {
        c.path
        for checkpoints, kind in ((found, args.dump), (evals, args.eval))
        for c in (checkpoints if kind.keep <= 0 else checkpoints[: kind.keep])
    }
    if args.keep_every > 0:
        keep |= {c.path for c in found if c.step % args.keep_every == 0}
    if args.keep_best:
        keep |= {c.path for c in best(found)}
    return keep


def best(found: list[Checkpoint]) -> list[Checkpoint]:
    """The one with the lowest held-out loss, the first published of equals; none where no step was
    measured when it was saved."""
    measured = []
    for checkpoint in found:
        with suppress(ValueError):  # damaged: it is none to keep
            loss = read_state(checkpoint).get("held_out")
            if loss is not None and math.isfinite(loss):
                measured.append((loss, checkpoint.serial, checkpoint))
    return [min(measured)[2]] if measured else []


def _mark_best(root: Path, found: list[Checkpoint]) -> None:
    lowest = best(found)
    files = [_mark_file(c.path, BEST) for c in lowest]
    for file in root.glob(f"*.{BEST}"):
        if file not in files:
            file.unlink()
    for c in lowest:
        mark(c.path, BEST)


# A mark is an empty file beside the checkpoint, `0000001200.best` of `0000001200`: it needs no
# change to what is published, and two who mark at once lose nothing.


def marks(path: Path) -> list[str]:
    """The names that the checkpoint `path` is marked with. One with any is never pruned, but for
    that of the best, which `prune` itself puts where it belongs."""
    return sorted(
        name
        for file in path.parent.glob(f"{path.name}.*")
        if MARK.fullmatch(name := file.suffix[1:]) and file.is_file()
    )


def mark(path: Path, name: str) -> None:
    """Keep the checkpoint `path` for ever, under a name."""
    _mark_file(path, name).touch()


def unmark(path: Path, name: str) -> None:
    _mark_file(path, name).unlink(missing_ok=True)


def _mark_file(path: Path, name: str) -> Path:
    if not MARK.fullmatch(name):
        raise UserError(f'mark "{name}": must be letters, digits, - and _, a letter first')
    return path.parent / f"{path.name}.{name}"


# ------------------------------------------------------------------------------- find and verify


def read_checkpoint(path: Path) -> tuple[Checkpoint | None, str]:
    """The checkpoint in a folder, or None and why the folder is not one. Compares sizes too."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["xxh3_64"] != _checksum_of(manifest):
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
            if files := _foreign_files(checkpoint):
                report(f"{path}: {', '.join(files)} not in its manifest: not read")
    return sorted(found, key=lambda c: c.serial, reverse=True)


def _foreign_files(checkpoint: Checkpoint) -> list[str]:
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


if __name__ == "__main__":
    # Imported here: they import this module.
    from lingua.checkpoint_commands import main
    from lingua.launch import run_program

    run_program(lambda: main(sys.argv[1:]))
