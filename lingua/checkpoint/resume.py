"""What a run starts from: which checkpoint, what may differ from it, what is saved besides tensors.

A run that has checkpoints resumes the newest. Everything but tensors is in `train_state.json` and
`config.yaml`, equal for all ranks, so it resumes on any topology. Rank 0 decides, all ranks follow.

A new run may start from other tensors (`checkpoint.init_ckpt_path`). The model alone is taken; with
`checkpoint.continue_training_from_init` everything is: a checkpoint of ours is resumed in another
folder, which branches the run; from one of Meta Lingua's come model, AdamW state and step.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import isfinite
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lingua.checkpoint.folder import CONFIG, Checkpoint, Progress, newest, read_state
from lingua.checkpoint.retention import CheckpointArgs
from lingua.checkpoint.source import TensorSource, find_source, is_of_transformers
from lingua.checkpoint.tensors import tensors_of
from lingua.config.load import from_values
from lingua.config.schema import MOST_ROWS, bounds
from lingua.config.values import parse_mapping, plain, read_file
from lingua.data.args import Stage
from lingua.data.stream import shares
from lingua.data.text import CONTENT
from lingua.errors import UserError
from lingua.format import align
from lingua.tokenizer import Tokenizer

MIXTURE = ("data.sources", "data.stages")
TOKENIZER = "data.tokenizer.content"
ABSENT = "(absent)"  # in place of the value of a key that was not saved
# Keys of a model that do not change what its weights compute, only how they are trained.
TRAINING_ONLY = ("model.init_base_std", "model.init_std_factor", "model.dropout")

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
class Mixture:
    """What a resume reads of a saved `data` group. Other values are only compared."""

    sources: dict[str, float] | None = None
    stages: list[Stage] | None = None
    global_batch_size: int | None = None

    def validate(self) -> Iterator[tuple[str, str]]:
        for weights in (self.sources or {}, *(stage.sources for stage in self.stages or ())):
            if not all(map(isfinite, weights.values())):
                yield "sources", "must have finite weights"
        yield from bounds(self, 1, "global_batch_size", most=MOST_ROWS)


@dataclass
class SavedConfig:
    data: Mixture = field(default_factory=Mixture)


def flat_config(config: Path | TensorSource, keys: Iterable[str]) -> dict[str, Any]:
    """The values of those of `keys`, dotted names, that a written config file, or that of a source,
    has. It is read as data, since it may be somebody else's: `${...}` stays text. Raises UserError.
    """
    if isinstance(config, Path):
        tree, where = plain(read_file(config, str(config))), str(config)
    else:
        where = f"config of {config.path}"
        tree = plain(parse_mapping(config.config, where))
    flat = pick(tree, keys)
    mixture = {name: flat.get(f"data.{name}") for name in Mixture.__dataclass_fields__}
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
        advice = "with checkpoint.init_ckpt_path, without continue_training_from_init"
        what = "has only a model, and no run to resume; a new run starts from it"
        raise UserError(f"{checkpoint.path} {what} {advice}")
    config = flat_config(checkpoint.path / CONFIG, keys)
    return Saved(checkpoint, config, state.progress, tuple(state.topology), state.data)


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
    found: list[Change], allowed: list[str], instead: str = "use another dump_dir"
) -> None:
    """Raise UserError for guarded changes that `checkpoint.allow_change` does not name."""
    refused = [c for c in found if c.resume_class == "guarded" and c.key not in allowed]
    if refused:
        heading = "these keys define the run and differ from the checkpoint's:"
        lines = [f"{c.key}: {c.saved} in the checkpoint, {c.now} now{c.note}" for c in refused]
        keys = ", ".join(c.key for c in refused)
        advice = f"set them back, {instead}, or name them in checkpoint.allow_change: [{keys}]"
        raise UserError("\n  ".join([heading, *lines]) + f"\n{advice}")


def changes_table(found: list[Change]) -> list[str]:
    """Lines of a table: key, saved, now, class. None where nothing changed."""
    rows = [(c.key, str(c.saved), str(c.now), str(c.resume_class)) for c in found]
    return align([("key", "saved", "now", "class"), *rows], left=4) if rows else []


def check_config(
    saved: Saved | None, config: dict[str, Any], classes: Classes, allowed: list[str]
) -> list[Change]:
    """Config keys that differ from the checkpoint's and are not free. Raises UserError as
    `check_changes` does.

    The mixture is compared by what it gave the steps up to the checkpoint: equal shares in other
    words, and stages that begin later, are announced.
    """
    if saved is None:
        return []
    step, position = saved.progress.step, saved.progress.position
    note = ""
    if _mixture_before(saved.config, step) == _mixture_before(config, step):
        classes = {**classes, **dict.fromkeys(MIXTURE, "announced")}
    else:
        note = f"; {step} steps are done, so only stages from_step {step} on may be edited"
    found = changes(saved.config, config, classes)
    found = [replace(c, note=note) if c.key in MIXTURE else c for c in found]
    check_changes(found, allowed)
    if config.get("data.stages") and position != step * config["data.global_batch_size"]:
        raise UserError(
            f"data.stages: begin at from_step * data.global_batch_size rows, but this run, whose "
            f"global batch size was changed, has used {position} rows in {step} steps; set "
            "data.global_batch_size back, or leave out data.stages"
        )
    return found


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
    read = {f"{CONTENT}{name}" for _, of_stage in past for name in of_stage}
    unread = {key for key in data if key.startswith(CONTENT)} - read
    classes = {key: "announced" if key in unread else "guarded" for key in data}
    found = changes(saved.data, data, classes)
    check_changes(found, allowed)
    return found


# ---------------------------------------------------------------------------------- what is logged


def log_resume(saved: Saved, found: list[Change], topology: tuple[int, ...]) -> None:
    """Log what is resumed and what is different."""
    logger.info(f"resuming {saved.checkpoint.path} (step {saved.progress.step})")
    if saved.topology != topology:
        logger.info(
            "topology (dp_replicate, dp_shard, tp): "
            f"{saved.topology} when it was saved, {topology} now; the run is the same"
        )
    for line in changes_table(found):
        logger.info(line)


# ------------------------------------------------------------------ a new run from other tensors


@dataclass(frozen=True)
class Origin:
    """Tensors that a new run starts from."""

    source: TensorSource
    step: int | None = None  # updates that count as made, with the optimizer's state; None: neither


def find_start(
    root: Path, args: CheckpointArgs, keys: Iterable[str]
) -> tuple[Saved | None, Origin | None]:
    """The checkpoint to resume, or else what to start from, if anything. Called by every rank.
    Raises UserError where checkpoint.init_ckpt_path, or init_from, names nothing to start from; a
    folder of transformers is left to lingua.hugging_face.

    Args:
        root: folder of this run's own checkpoints.
        keys: of the config, dotted.
    """
    own = newest(root, args.verify, logger.warning)
    path, key = args.init_ckpt_path, "init_ckpt_path"
    if args.init_from is not None and not is_of_transformers(args.init_from):
        path, key = args.init_from, "init_from"
    if own is not None:
        if path is not None:
            logger.info(f"{path} is not read: this run has checkpoints of its own")
        return read_saved(own, keys), None
    if path is None:
        return None, None
    try:
        source = find_source(Path(path), args.verify, logger.warning)
    except UserError as error:
        raise UserError(f"checkpoint.{key}: {error}", error.local) from None
    if not args.continue_training_from_init:
        return None, Origin(source)
    checkpoint = source.checkpoint
    if checkpoint is not None:
        what = "model, optimizer, step and position"
        logger.info(f"branching from another run: {what} of {source.path}")
        return read_saved(checkpoint, keys), None
    if source.kind == "file" or source.step is None:
        raise UserError(
            f"checkpoint.init_ckpt_path = {path}: gives a model alone; must be a checkpoint, a "
            "folder with its train state, when checkpoint.continue_training_from_init is true"
        )
    return None, Origin(source, source.step)


def check_origin(
    origin: Origin | None,
    config: dict[str, Any],
    tokenizer: Tokenizer,
    classes: Classes,
    allowed: list[str],
) -> list[Change]:
    """Config keys that differ from the origin's and matter for what is taken from it: those that
    define the model are guarded, what it was trained on is announced. Raises UserError as
    `check_changes` does.
    """
    if origin is None:
        return []
    source, everything = origin.source, origin.step is not None
    if (origin.step or 0) >= config["steps"]:
        raise UserError(
            f"steps = {config['steps']}: must be above {origin.step or 0}, the steps that "
            f"{source.path} has made"
        )
    saved = flat_config(source, config)
    if everything:
        saved["optim.name"] = "adamw"  # Meta Lingua has no other
    data = {} if source.checkpoint is None else read_state(source.checkpoint).data
    saved[TOKENIZER] = data.get(TOKENIZER, ABSENT)
    now = config | {TOKENIZER: tokenizer.fingerprint()}
    classes = {**classes, TOKENIZER: "guarded"}
    classes = {key: _change_class(key, kind, everything) for key, kind in classes.items()}
    found = [c for c in changes(saved, now, classes) if c.saved != ABSENT]
    check_changes(found, allowed, instead="start without checkpoint.init_ckpt_path")
    return found


def _change_class(key: str, resume_class: str | None, everything: bool) -> str | None:
    """The class of a change of a key where a new run starts from an old one's tensors."""
    if key in TRAINING_ONLY:
        return "free"
    if key.startswith("model.") or (everything and key.startswith(("optim.", "steps"))):
        return resume_class
    return "announced" if key.startswith("data.") and resume_class == "guarded" else "free"


def start_from(
    origin: Origin,
    found: list[Change],
    model: nn.Module,
    optimizer: Optimizer,
    global_batch_size: int,
) -> Progress:
    """Fill the model, with a step the optimizer too, and log it with what `check_origin` found.
    Called by every rank. Returns where the run starts. Raises UserError, which names the tensors
    that do not fit, before anything is loaded.
    """
    source, step = origin.source, origin.step
    only = "model." if step is None else ""
    tensors = {n: t for n, t in tensors_of(model, optimizer).items() if n.startswith(only)}
    source.load(tensors, only)
    if step is None:
        what = "optimizer, step and data start from scratch"
        logger.info(f"starting from the model of {source}: {what}")
    else:
        logger.info(f"continuing with model, AdamW state and step of {source}")
        logger.info(
            "its position in its data cannot be carried over: this run's rows continue at "
            f"{step} steps x {global_batch_size} rows = {step * global_batch_size}"
        )
    for line in changes_table(found):
        logger.info(line)
    return Progress(step=step or 0, position=(step or 0) * global_batch_size)
