"""The checkpoint that a run resumes: its configuration, the flat mapping that config.yaml is, and
its state, equal for all ranks, so that it resumes on any topology."""

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import xxhash

from lingua.base.dump_dir import CONFIG, STATE
from lingua.base.errors import UserError
from lingua.base.files import read_bytes
from lingua.checkpoint.folder import Checkpoint, none_usable, read_state
from lingua.checkpoint.state import Progress
from lingua.config.schema import MAX_ROWS
from lingua.config.values import parse_mapping, plain, read_file, show
from lingua.parallel.mesh import gather_on_every_rank

if TYPE_CHECKING:
    from lingua.checkpoint.source import TensorSource

ABSENT = "(absent)"  # in place of the value of a key that was not saved


@dataclass(frozen=True)
class Saved:
    """The checkpoint to resume from, with its configuration and state."""

    checkpoint: Checkpoint
    config: dict[str, Any]  # flat
    progress: Progress
    topology: tuple[int, ...]
    data: dict[str, Any]  # fingerprints
    versions: dict[str, Any] = field(default_factory=dict)  # earlier versions have fewer


def flat_config(config: "Path | Checkpoint | TensorSource", keys: Iterable[str]) -> dict[str, Any]:
    """The values of those of `keys`, dotted names, that a written config file, or that of a source,
    has. It is read as data, since it may be somebody else's: `${...}` stays text. Raises UserError.
    """
    if isinstance(config, Path | Checkpoint):
        known = None if isinstance(config, Path) else config.texts.get(CONFIG)
        path = config if isinstance(config, Path) else config.path / CONFIG
        where, tree = str(path), read_file(path, str(path), known)
    else:
        where, tree = config.config_path, parse_mapping(config.config, config.config_path)
    flat = pick(plain(tree), keys)
    for key, (need, holds) in COMPUTED_WITH.items():
        if flat.get(key) is not None and not holds(flat[key]):
            raise UserError(f"{key} = {show(flat[key])}: must be {need} ({where})")
    return flat


def _is_mixture(weights: Any) -> bool:
    return isinstance(weights, dict) and all(
        type(w) in (int, float) and isfinite(w) for w in weights.values()
    )


def _are_stages(stages: Any) -> bool:
    return isinstance(stages, list) and all(
        isinstance(stage, dict)
        and type(stage.get("from_step")) is int
        and _is_mixture(stage.get("sources"))
        for stage in stages
    )


# Values that a resume computes with. Others are only compared.
COMPUTED_WITH = {
    "data.sources": ("a mapping of finite weights", _is_mixture),
    "data.stages": ("a list of {from_step, sources}, with finite weights", _are_stages),
    "data.global_batch_size": (
        f"a whole number from 1 to {MAX_ROWS:,}",
        lambda rows: type(rows) is int and 1 <= rows <= MAX_ROWS,
    ),
}


def pick(tree: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """The values of those of `keys`, dotted names, that nested mappings have."""
    flat = {}
    for key in keys:
        value: Any = tree
        for name in key.split("."):
            value = value.get(name, ABSENT) if isinstance(value, dict) else ABSENT
        if value != ABSENT:
            flat[key] = value
    return flat


def read_saved(checkpoint: Checkpoint, keys: Iterable[str]) -> Saved:
    """A checkpoint with its configuration and state. Raises UserError."""
    state = read_state(checkpoint)
    if state.progress is None:  # made by `convert`
        advice = "with checkpoint.init_from, without continue_training_from_init"
        what = "has only a model, and no run to resume; a new run starts from it"
        raise UserError(f"{checkpoint.path} {what} {advice}")
    config, topology = flat_config(checkpoint, keys), tuple(state.topology)
    return Saved(checkpoint, config, state.progress, topology, state.data, state.versions)


# ---- which checkpoint


def newest(checkpoints: list[Checkpoint], verify: str, report: Callable[[str], None]) -> Checkpoint:
    """The first of a run's checkpoints that verifies. Called by every rank. Raises UserError where
    none does."""
    checkpoint, _ = first_undamaged(checkpoints, verify, report)
    if checkpoint is None:
        raise none_usable(checkpoints[0].path.parent)
    return checkpoint


def first_undamaged(
    checkpoints: list[Checkpoint], verify: str, report: Callable[[str], None]
) -> tuple[Checkpoint | None, str]:
    """The first checkpoint that verifies, or None and why the last one does not. Called by every
    rank; with `verify: size` the sizes that were compared when it was found are enough."""
    why = ""
    for checkpoint in checkpoints:
        texts = {}
        for name in (STATE, CONFIG):
            with suppress(OSError):  # who needs it names the error
                texts[name] = read_bytes(checkpoint.path / name)
        checkpoint = replace(checkpoint, texts=texts)
        why = damage(checkpoint) if verify == "full" else ""
        if not why:
            return checkpoint, ""
        if dist.get_rank() == 0:
            report(f"{why}: skipped")
    return None, why


def damage(checkpoint: Checkpoint, group: dist.ProcessGroup | None = None) -> str:
    """Describe the files that differ from the manifest; an empty string where none does. Called by
    every rank: each file is read by one, and the results are shared."""
    rank, world = dist.get_rank(), dist.get_world_size()
    bad = wrong_files(checkpoint, sorted(checkpoint.files)[rank::world])
    lines = sorted(line for part in gather_on_every_rank(bad, group) for line in part)
    return f"{checkpoint.path} is damaged ({'; '.join(lines)})" if lines else ""


def wrong_files(checkpoint: Checkpoint, names: Iterable[str]) -> list[str]:
    """A line for each of these files that differs from the manifest."""
    bad = []
    for name in names:
        try:
            if (text := checkpoint.texts.get(name)) is not None:
                checksum = xxhash.xxh3_64_hexdigest(text)
            else:
                with (checkpoint.path / name).open("rb", buffering=0) as f:
                    checksum = hashlib.file_digest(f, xxhash.xxh3_64).hexdigest()
            if checksum != checkpoint.files[name]["xxh3_64"]:
                bad.append(f"{name}: wrong checksum")
        except OSError as error:
            bad.append(f"{name}: {error.strerror}")
    return bad


def verify(checkpoint: Checkpoint) -> None:
    """Raises UserError where a file differs from the manifest. Called by every rank."""
    if why := damage(checkpoint):
        raise UserError(why)
