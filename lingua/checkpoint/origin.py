"""What a new run starts from (`checkpoint.init_from`), and what programs open: a checkpoint, or
what another program wrote, which lingua.tools.exchange reads.

The model alone is taken; with `checkpoint.continue_training_from_init` everything is: a checkpoint
of ours is resumed in another folder, which branches the run; from one of Meta Lingua's come model,
AdamW state and step.
"""

import logging
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from lingua.app import App
from lingua.base.dump_dir import CHECKPOINTS, CONFIG, MANIFEST, METADATA, STEP_FOLDER
from lingua.base.errors import UserError, tool_needed_by
from lingua.base.files import read_bytes
from lingua.checkpoint.args import CheckpointArgs
from lingua.checkpoint.changes import Change, Classes, changes, changes_table, check_changes
from lingua.checkpoint.folder import Checkpoint, find, find_on_rank_0, read_checkpoint, read_state
from lingua.checkpoint.saved import ABSENT, Saved, first_undamaged, flat_config, pick, read_saved
from lingua.checkpoint.source import TensorSource, on_every_rank, open_checkpoint
from lingua.checkpoint.state import Progress
from lingua.checkpoint.tensors import tensors_of
from lingua.config.load import resume_classes
from lingua.config.values import LocatedValue, Values, plain, read_file
from lingua.data.rows import TOKENIZER
from lingua.tokenizer.interface import Tokenizer

if TYPE_CHECKING:
    from lingua.optim.optimizer import LoopOptimizer

INIT_FROM = "checkpoint.init_from"
HF_CONFIG = "config.json"  # in a folder of Hugging Face's transformers
CONSOLIDATED, PARAMS = "consolidated.pth", "params.json"  # in a checkpoint of Meta Lingua's
# Keys of a model that do not change what its weights compute, only how they are trained.
TRAINING_ONLY = ("model.init_base_std", "model.init_std_factor", "model.dropout")
TOKENIZER_KEYS = ["data.tokenizer.name", "data.tokenizer.path"]
TEXT_KEYS = ["data.tokenizer.bos", "data.tokenizer.eos", "data.add_bos", "data.add_eos"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """Tensors that a new run starts from."""

    source: TensorSource
    step: int | None = None  # updates that count as made, with the optimizer's state; None: neither

    def check(
        self,
        model: Any,
        config: dict[str, Any],
        tokenizer: Tokenizer,
        classes: Classes,
        allowed: list[str],
    ) -> list[Change]:
        """Config keys that differ from those of the tensors and matter for what is taken: what
        defines the model is guarded, what it was trained on is announced. Raises UserError as
        `check_changes` does.

        model: the `model` group of the config.
        """
        source, everything = self.source, self.step is not None
        if source.check_model is not None:
            source.check_model(model, allowed)
        if is_hf_folder(source.path) and TOKENIZER not in allowed:
            with tool_needed_by(str(source.path)):
                from lingua.tools.exchange.hugging_face import check_tokenizer
            check_tokenizer(source.path, tokenizer)
        if (self.step or 0) >= config["steps"]:
            raise UserError(
                f"steps = {config['steps']}: must be above {self.step or 0}, the steps that "
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
        differing = [c for c in changes(saved, now, classes) if c.saved != ABSENT]
        check_changes(differing, allowed, instead=f"start without {INIT_FROM}")
        return differing

    def load_into(
        self,
        model: nn.Module,
        optimizer: "LoopOptimizer",
        differing: list[Change],
        global_batch_size: int,
    ) -> Progress:
        """Fill the model, with a step the optimizer too, and log it with what `check` found. Called
        by every rank. Returns where the run starts. Raises UserError, which names the tensors that
        do not fit, before anything is loaded.
        """
        source, step = self.source, self.step
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
        for line in changes_table(differing):
            logger.info(line)
        return Progress(step=step or 0, position=(step or 0) * global_batch_size)


def _change_class(key: str, resume_class: str | None, everything: bool) -> str | None:
    """The class of a change of a key where a new run starts from an old one's tensors."""
    if key in TRAINING_ONLY:
        return "free"
    if key.startswith("model.") or (everything and key.startswith(("optim.", "steps"))):
        return resume_class
    return "announced" if key.startswith("data.") and resume_class == "guarded" else "free"


def find_origin(
    args: CheckpointArgs, keys: Iterable[str], app: App | None
) -> tuple[Saved | None, Origin | None]:
    """Open what `checkpoint.init_from` names: a checkpoint whose run is branched, or tensors. The
    arguments are those of find_start. Called by every rank. Raises UserError."""
    path = str(args.init_from)
    source = open_source(INIT_FROM, path, app, args.verify, logger.warning)
    if not args.continue_training_from_init:
        return None, Origin(source)
    checkpoint = source.checkpoint
    if checkpoint is not None:
        what = "model, optimizer, step and position"
        logger.info(f"branching from another run: {what} of {source.path}")
        return read_saved(checkpoint, keys), None
    if source.kind == "file" or source.step is None:
        raise UserError(
            f"{INIT_FROM} = {path}: gives a model alone; must be a checkpoint, a folder with its "
            "train state, when checkpoint.continue_training_from_init is true"
        )
    return None, Origin(source, source.step)


def config_of_init_checkpoint(app: App, args: Any, given: set[str]) -> Values:
    """Returns the config keys that define the model which a run with these `args` starts from: its
    sizes, and its tokenizer unless one is `given`. Raises UserError."""
    kinds = resume_classes(app.config)
    keys = [k for k, kind in kinds.items() if k.startswith("model.") and kind == "guarded"]
    keys = [k for k in keys if k not in TRAINING_ONLY]
    keys += [] if given.intersection(TOKENIZER_KEYS) else TOKENIZER_KEYS + TEXT_KEYS
    dotted = {f"{k}." for k in given}  # a group that is given, such as null, has its keys
    keys = [
        k for k in keys if not any(f"{k}.".startswith(d) or d.startswith(f"{k}.") for d in dotted)
    ]
    if not keys:  # the config of a run that has started
        return {}
    path, run_config = Path(args.checkpoint.init_from), args.folder / CONFIG
    try:
        if is_hf_folder(path):
            key = "data.tokenizer" if TOKENIZER_KEYS[0] in keys else None
            with tool_needed_by(str(path)):
                from lingua.tools.exchange.hugging_face import config_of_hf_folder
            tree, file = config_of_hf_folder(app, path, key), path / HF_CONFIG
        elif checkpoints := locate(path, lambda line: None):
            file = checkpoints[0].path / CONFIG
            tree = plain(read_file(file, str(file)))
        else:  # Meta Lingua's, or a file
            return {}
    except UserError as error:
        if not run_config.exists():  # a run that has started needs the other no more
            raise UserError(f"{INIT_FROM}: {error}", error.local) from None
        tree, file = plain(read_file(run_config, str(run_config))), run_config
    return {k: LocatedValue.of(value, str(file)) for k, value in pick(tree, keys).items()}


# ---- opening


def locate(path: Path, report: Callable[[str], None]) -> list[Checkpoint]:
    """The checkpoint at `path`; or those in the folder of checkpoints or the dump dir at `path`,
    the last published first; none where another program wrote what is at `path`. By one process.
    Raises UserError where it has none that is whole. `report` logs a line for each that is skipped.
    """
    if not os.path.exists(path):  # nor one whose name is too long
        may_be_hub = re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(path)) and not os.path.exists(
            path.parent
        )
        hint = f"; `hf download {path} --local-dir FOLDER` fetches a model of the hub"
        raise UserError(f"{path}: no such file or folder{hint if may_be_hub else ''}")
    has = {n for n in (MANIFEST, METADATA, PARAMS, CONSOLIDATED) if (path / n).exists()}
    foreign = path.is_file() or is_hf_folder(path)
    if foreign or CONSOLIDATED in has or has == {METADATA, PARAMS}:
        return []
    if STEP_FOLDER.fullmatch(path.name) or has & {MANIFEST, METADATA}:
        checkpoint, why = read_checkpoint(path)
        if checkpoint is None:
            raise UserError(f"{path} is not a whole checkpoint: {why}")
        return [checkpoint]
    if checkpoints := find(path / CHECKPOINTS, report) or find(path, report):
        return checkpoints
    need = "must be one, a folder of such folders, a dump_dir, or a folder with a config.json"
    raise UserError(f"{path} has no whole checkpoint: {need}")


def is_hf_folder(path: str | Path) -> bool:
    """Whether `path` is a folder of Hugging Face's transformers."""
    return os.path.isfile(os.path.join(path, HF_CONFIG))


def open_source(
    key: str,
    path: str | Path,
    app: App | None,
    verify: str,
    report: Callable[[str], None] = lambda line: None,
    alone: bool = False,
) -> TensorSource:
    """Open what a config key names. Called by every rank, or by a process without a group. Raises
    UserError, which begins with the key.

    Args:
        path: what `locate` takes; of several checkpoints it is the newest that verifies. Or a
            folder of transformers, a checkpoint of Meta Lingua's, its folder `consolidated`, or a
            file of torch.save.
        app: whose models a folder of transformers has; None: apps.main.
        verify: `full`, in a process group, or `size`: as checkpoint.verify.
        report: logs a line for each checkpoint that is skipped.
        alone: this is one process of a group, whose others do not call; verify is `size`.
    """
    path = Path(path)
    try:
        checkpoints = (
            locate(path, report) if alone else find_on_rank_0(lambda: locate(path, report))
        )
        if checkpoints:
            checkpoint, why = first_undamaged(checkpoints, verify, report)
            if checkpoint is None:
                raise UserError(why)
            file = checkpoint.path / CONFIG
            config = on_every_rank(file, lambda: read_bytes(file).decode(), alone)
            return replace(open_checkpoint(checkpoint, alone), config=config)
        return on_every_rank(path, lambda: _open_foreign(path, app), alone)
    except UserError as error:
        raise UserError(f"{key}: {error}", error.local) from None


def _open_foreign(path: Path, app: App | None) -> TensorSource:
    """Open what another program wrote. Raises UserError."""
    if is_hf_folder(path):
        with tool_needed_by(str(path)):
            from lingua.tools.exchange.hugging_face import form_of, open_folder
        return open_folder(form_of(app, path), path)[0]
    with tool_needed_by(str(path)):
        from lingua.tools.exchange.meta_lingua import open_meta_lingua
    return open_meta_lingua(path)
