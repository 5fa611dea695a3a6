"""What a run resumes: which checkpoint, and what may differ from it.

A run that has checkpoints resumes the newest. Everything but tensors is in `train_state.json` and
`config.yaml`, equal for all ranks, so it resumes on any topology. Rank 0 decides, all ranks follow.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lingua.app import App
from lingua.base.dump_dir import CONFIG
from lingua.base.errors import UserError
from lingua.base.format import align
from lingua.checkpoint.folder import Checkpoint, newest, read_state
from lingua.checkpoint.retention import CheckpointArgs
from lingua.checkpoint.source import TensorSource
from lingua.checkpoint.state import Progress
from lingua.config.load import from_values
from lingua.config.schema import MAX_ROWS, bounds
from lingua.config.values import parse_mapping, plain, read_file
from lingua.data.args import Stage
from lingua.data.rows import CONTENT
from lingua.data.stream import shares

if TYPE_CHECKING:
    from lingua.checkpoint.origin import Origin

MIXTURE = ("data.sources", "data.stages")
EXACT = ("data.batch_size", "distributed.threads")  # what rounding depends on
TOKENIZER = "data.tokenizer.content"
ABSENT = "(absent)"  # in place of the value of a key that was not saved

Classes = Mapping[str, str | None]  # resume class of each config key

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """The checkpoint to resume from, with its configuration and state."""

    checkpoint: Checkpoint
    config: dict[str, Any]  # flat
    progress: Progress
    topology: tuple[int, ...]
    data: dict[str, Any]  # fingerprints


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


def flat_config(config: Path | TensorSource, keys: Iterable[str]) -> dict[str, Any]:
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
    return Saved(checkpoint, config, state.progress, tuple(state.topology), state.data)


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


# ------------------------------------------------------------------------------ what may change


@dataclass(frozen=True)
class Change:
    """A config key whose value is not the one that was saved."""

    key: str
    saved: Any
    now: Any
    resume_class: str | None  # "announced" or "guarded"
    note: str = ""  # what of it may change, where some may


def changes(saved: Mapping[str, Any], now: Mapping[str, Any], classes: Classes) -> list[Change]:
    """Keys, flattened, that differ and are not free. A checkpoint older than a key means null
    or false."""
    return [
        Change(key, saved.get(key, ABSENT), value, classes[key])
        for key, value in now.items()
        if classes[key] != "free"
        and saved.get(key, ABSENT) != value
        and not (key not in saved and (value is None or value is False))
    ]


def check_changes(
    differing: list[Change], allowed: list[str], instead: str = "use another dump_dir"
) -> None:
    """Raise UserError for guarded changes that `checkpoint.allow_change` does not name."""
    refused = [c for c in differing if c.resume_class == "guarded" and c.key not in allowed]
    if refused:
        heading = "these keys define the run and differ from the checkpoint's:"
        lines = [f"{c.key}: {c.saved} in the checkpoint, {c.now} now{c.note}" for c in refused]
        keys = ", ".join(c.key for c in refused)
        advice = f"set them back, {instead}, or name them in checkpoint.allow_change: [{keys}]"
        raise UserError("\n  ".join([heading, *lines]) + f"\n{advice}")


def changes_table(differing: list[Change]) -> list[str]:
    """Returns the lines of a table (key, saved, now, class); none where nothing changed."""
    rows = [(c.key, str(c.saved), str(c.now), str(c.resume_class)) for c in differing]
    return align([("key", "saved", "now", "class"), *rows], left=4) if rows else []


def check_config(
    saved: Saved | None, config: dict[str, Any], classes: Classes, allowed: list[str]
) -> list[Change]:
    """Config keys that differ from the checkpoint's and are not free. Raises UserError as
    `check_changes` does.

    Keys of EXACT count as guarded in a run that is `deterministic: mesh`. The mixture is compared
    by what it gave the steps up to the checkpoint: equal shares in other
    words, and stages that begin later, are announced.
    """
    if saved is None:
        return []
    step, position = saved.progress.step, saved.progress.position
    if config.get("deterministic") == saved.config.get("deterministic") == "mesh":
        classes = {**classes, **dict.fromkeys(EXACT, "guarded")}
    note = ""
    if _mixture_before(saved.config, step) == _mixture_before(config, step):
        classes = {**classes, **dict.fromkeys(MIXTURE, "announced")}
    else:
        note = f"; {step} steps are done, so only stages from_step {step} on may be edited"
    differing = changes(saved.config, config, classes)
    differing = [replace(c, note=note) if c.key in MIXTURE else c for c in differing]
    check_changes(differing, allowed)
    if config.get("data.stages") and position != step * config["data.global_batch_size"]:
        raise UserError(
            f"data.stages: begin at from_step * data.global_batch_size rows, but this run, whose "
            f"global batch size was changed, has used {position} rows in {step} steps; set "
            "data.global_batch_size back, or leave out data.stages"
        )
    return differing


def _mixture_before(config: Mapping[str, Any], step: int) -> list[tuple[int, dict[str, Fraction]]]:
    """(from step, shares) of the stages that the first `step` steps drew their rows from."""
    stages = config.get("data.stages") or []  # a checkpoint may be older than the key
    stages_before = [(0, config.get("data.sources", {}))]
    stages_before += [(s["from_step"], s["sources"]) for s in stages if s["from_step"] < step]
    return [(start, shares(weights)) for start, weights in stages_before]


def check_data(saved: Saved | None, data: dict[str, str], allowed: list[str]) -> list[Change]:
    """Sources and tokenizer whose content is not what it was behind the same name. Raises UserError
    as `check_changes` does. A source that gave no row before the checkpoint may be new or another.

    data: fingerprints by name: of what rows are made of, and of the tokenizer.
    """
    if saved is None:
        return []
    past = _mixture_before(saved.config, saved.progress.step)
    read = {f"{CONTENT}{name}" for _, weights in past for name in weights}
    unread = {key for key in data if key.startswith(CONTENT)} - read
    classes = {key: "announced" if key in unread else "guarded" for key in data}
    differing = changes(saved.data, data, classes)
    check_changes(differing, allowed)
    return differing


# ---------------------------------------------------------------------------------- what is logged


def log_resume(saved: Saved, differing: list[Change], topology: tuple[int, ...]) -> None:
    """Log what is resumed and what is different."""
    logger.info(f"resuming {saved.checkpoint.path} (step {saved.progress.step})")
    if saved.topology != topology:
        logger.info(
            "topology (dp_replicate, dp_shard, tp): "
            f"{saved.topology} when it was saved, {topology} now; the run is the same"
        )
    for line in changes_table(differing):
        logger.info(line)
