"""What a run resumes: the newest of its checkpoints, or what it starts from.

A run that has checkpoints resumes the newest. Everything but tensors is in `train_state.json` and
`config.yaml`, equal for all ranks, so it resumes on any topology. Rank 0 decides, all ranks follow.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lingua.app import App
from lingua.base.dump_dir import CONFIG
from lingua.base.errors import UserError
from lingua.checkpoint.args import CheckpointArgs
from lingua.checkpoint.folder import Checkpoint, newest, read_state
from lingua.checkpoint.state import Progress
from lingua.config.load import from_values
from lingua.config.schema import MAX_ROWS, bounds
from lingua.config.values import parse_mapping, plain, read_file
from lingua.data.args import Stage

if TYPE_CHECKING:
    from lingua.checkpoint.origin import Origin
    from lingua.checkpoint.source import TensorSource

TOKENIZER = "data.tokenizer.content"
ABSENT = "(absent)"  # in place of the value of a key that was not saved

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """The checkpoint to resume from, with its configuration and state."""

    checkpoint: Checkpoint
    config: dict[str, Any]  # flat
    progress: Progress
    topology: tuple[int, ...]
    data: dict[str, Any]  # fingerprints
    versions: dict[str, Any] = field(default_factory=dict)  # earlier versions have fewer


@dataclass
class SavedMixture:
    """Values of a saved `data` group that a resume computes with. Others are only compared."""

    sources: dict[str, float] | None = None
    stages: list[Stage] | None = None
    global_batch_size: int | None = None

    def validate(self) -> Iterator[tuple[str, str]]:
        for weights in (self.sources or {}, *(stage.sources for stage in self.stages or ())):
            if not all(map(isfinite, weights.values())):
                yield "sources", "must have finite weights"
        yield from bounds(self, 1, "global_batch_size", maximum=MAX_ROWS)


@dataclass
class SavedConfig:
    data: SavedMixture = field(default_factory=SavedMixture)


def flat_config(config: "Path | TensorSource", keys: Iterable[str]) -> dict[str, Any]:
    """The values of those of `keys`, dotted names, that a written config file, or that of a source,
    has. It is read as data, since it may be somebody else's: `${...}` stays text. Raises UserError.
    """
    if isinstance(config, Path):
        where, tree = str(config), read_file(config, str(config))
    else:
        where, tree = config.config_path, parse_mapping(config.config, config.config_path)
    flat = pick(plain(tree), keys)
    mixture = {name: flat.get(f"data.{name}") for name in SavedMixture.__dataclass_fields__}
    from_values(SavedConfig(), {"data": mixture}, where)
    return flat


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
    config = flat_config(checkpoint.path / CONFIG, keys)
    topology = tuple(state.topology)
    return Saved(checkpoint, config, state.progress, topology, state.data, state.versions)


def find_start(
    root: Path, args: CheckpointArgs, keys: Iterable[str], app: App | None = None
) -> "tuple[Saved | None, Origin | None]":
    """The checkpoint to resume, or else what to start from, if anything. Called by every rank.
    Raises UserError where checkpoint.init_from names nothing to start from.

    Args:
        root: folder of this run's own checkpoints.
        keys: of the config, dotted.
        app: that of the run; None: apps.main.
    """
    resumed = newest(root, args.verify, logger.warning)
    if resumed is not None:
        if args.init_from is not None:
            logger.info(f"{args.init_from} is not read: this run has checkpoints of its own")
        return read_saved(resumed, keys), None
    if args.init_from is None:
        return None, None
    from lingua.checkpoint.origin import find_origin  # imported for a run that has one

    return find_origin(args, keys, app)
