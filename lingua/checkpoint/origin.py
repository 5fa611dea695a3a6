"""What a new run starts from, other than initial weights: `checkpoint.init_ckpt_path`.

From any source of tensors the model alone is taken; step, optimizer and data start from scratch.
With `checkpoint.continue_training_from_init` everything is: a checkpoint of ours is resumed in
another folder, which branches the run; from one of Meta Lingua's come model, AdamW state and step.
A run that has checkpoints of its own resumes those.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lingua.checkpoint.resume import (
    TOKENIZER,
    Change,
    Progress,
    Saved,
    changes,
    changes_table,
    check_changes,
    find_saved,
    flat_text,
    read_saved,
)
from lingua.checkpoint.retention import CheckpointArgs
from lingua.checkpoint.source import TensorSource, find_source
from lingua.checkpoint.tensors import tensors_of
from lingua.errors import UserError
from lingua.parallel.mesh import on_rank_0
from lingua.tokenizer import Tokenizer

# Keys of a model that do not change what its weights compute, only how they are trained.
TRAINING_ONLY = ("model.init_base_std", "model.init_std_factor", "model.dropout")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """Tensors that a new run starts from."""

    source: TensorSource
    everything: bool = False  # optimizer and step as well as the model

    @property
    def step(self) -> int:
        """The updates that count as made."""
        return (self.source.step or 0) if self.everything else 0


def find_start(
    root: Path, args: CheckpointArgs, keys: Mapping[str, Any]
) -> tuple[Saved | None, Origin | None]:
    """The checkpoint to resume, or else what to start from, if anything. Called by every rank.

    Args:
        root: folder of this run's own checkpoints.
        keys: of the config, dotted.

    Raises:
        UserError: checkpoint.init_ckpt_path names nothing that can be started from.
    """
    saved = find_saved(root, args.verify, keys)
    if args.init_ckpt_path is None:
        return saved, None
    shown = f"checkpoint.init_ckpt_path = {args.init_ckpt_path}"
    if saved is not None:
        logger.info(f"{shown} is not read: this run has checkpoints of its own")
        return saved, None
    try:
        source = find_source(Path(args.init_ckpt_path), args.verify, logger.warning)
    except UserError as error:
        raise UserError(f"checkpoint.init_ckpt_path: {error}", error.local) from None
    if not args.continue_training_from_init:
        return None, Origin(source)
    if source.checkpoint is not None:
        saved = on_rank_0(lambda: read_saved(source.checkpoint, keys))
        logger.info(
            f"branching from another run: model, optimizer, step and position of {source.path}"
        )
        return saved, None
    if source.kind == "file" or source.step is None:
        raise UserError(
            f"{shown} gives a model alone, with which checkpoint.continue_training_from_init = "
            "true cannot continue: name a checkpoint (a folder with its train state), or set it "
            "to false"
        )
    return None, Origin(source, everything=True)


def check_origin(
    origin: Origin | None,
    config: dict[str, Any],
    tokenizer: Tokenizer,
    classes: Mapping[str, str],
    allowed: list[str],
) -> list[Change]:
    """Config keys that differ from the origin's and matter for what is taken from it: those that
    define the model are guarded, what it was trained on is announced.

    Raises:
        UserError: a guarded one differs and `checkpoint.allow_change` does not name it.
    """
    if origin is None:
        return []
    source = origin.source
    if origin.step >= config["steps"]:
        raise UserError(
            f"steps = {config['steps']}: must be above {origin.step}, the steps that "
            f"{source.path} has made"
        )
    saved = flat_text(source.config, config)
    if origin.everything:
        saved["optim.name"] = "adamw"  # Meta Lingua has no other
    saved[TOKENIZER] = source.state.get("data", {}).get(TOKENIZER, "(absent)")
    kinds = {key: _change_class(key, kind, origin.everything) for key, kind in classes.items()}
    found = changes(
        saved, config | {TOKENIZER: tokenizer.fingerprint()}, kinds | {TOKENIZER: "announced"}
    )
    found = [c for c in found if c.saved != "(absent)"]
    check_changes(found, allowed, instead="start without checkpoint.init_ckpt_path")
    return found


def _change_class(key: str, resume_class: str, everything: bool) -> str:
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
    """Fill the model, and with `everything` the optimizer, and log it. Called by every rank.

    Args:
        found: of `check_origin`.

    Returns:
        Where the run starts.

    Raises:
        UserError: names the tensors that do not fit, before anything is loaded.
    """
    source, step, only = origin.source, origin.step, "" if origin.everything else "model."
    tensors = {n: t for n, t in tensors_of(model, optimizer).items() if n.startswith(only)}
    source.load(tensors, only)
    if not origin.everything:
        logger.info(
            f"starting from the model of {source}: optimizer, step and data start from scratch"
        )
    else:
        logger.info(f"continuing with model, AdamW state and step of {source}")
        logger.info(
            "its position in its data cannot be carried over: this run's rows continue at "
            f"{step} steps x {global_batch_size} rows = {step * global_batch_size}"
        )
        if source.state.get("acc_step"):
            logger.warning("it was saved within a step: gradients of that step are lost")
    dtypes = {(source.tensors[name].dtype, t.dtype) for name, t in tensors.items()}
    if cast := sorted(str(there) for there, here in dtypes if there != here):
        logger.info(f"its {', '.join(cast)} tensors become float32")
    for line in changes_table(found) if found else ():
        logger.info(line)
    return Progress(step=step, position=step * global_batch_size)
