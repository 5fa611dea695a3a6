"""What a new run starts from (`checkpoint.init_from`), and what programs open: a checkpoint, or
what another program wrote, which lingua.tools.exchange reads.

The model alone is taken; with `checkpoint.continue_training_from_init` everything is: a checkpoint
of ours is resumed in another folder, which branches the run; from one of Meta Lingua's come model,
AdamW state and step.
"""

import logging
import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lingua.app import App
from lingua.base.dump_dir import CHECKPOINTS, CONFIG, MANIFEST, METADATA, STEP_FOLDER
from lingua.base.errors import UserError, tool_needed_by
from lingua.base.files import read_bytes
from lingua.base.format import counted
from lingua.base.urls import is_url, local_copy
from lingua.checkpoint.args import CheckpointArgs
from lingua.checkpoint.changes import Change, Classes, changes, changes_table, check_changes
from lingua.checkpoint.digest import digest_text, hash_part
from lingua.checkpoint.folder import Checkpoint, find, find_on_rank_0, read_checkpoint, read_state
from lingua.checkpoint.saved import ABSENT, Saved, first_undamaged, flat_config, pick, read_saved
from lingua.checkpoint.source import TensorSource, on_every_rank, open_checkpoint
from lingua.checkpoint.state import Progress
from lingua.checkpoint.tensors import Part, local_parts, tensors_of
from lingua.config.load import resume_classes, to_yaml
from lingua.config.values import LocatedValue, Values, parse_mapping, plain, read_file
from lingua.data.rows import TOKENIZER
from lingua.parallel.mesh import world_sum_
from lingua.parallel.patterns import check_named
from lingua.parallel.plan import within
from lingua.tokenizer.interface import Tokenizer

if TYPE_CHECKING:
    from lingua.optim.optimizer import LoopOptimizer

INIT_FROM = "checkpoint.init_from"
BASE = INIT_FROM  # its content among the fingerprints of a run whose model has a base (Built.base)
HF_CONFIG = "config.json"  # in a folder of Hugging Face's transformers
PEFT_CONFIG = "adapter_config.json"  # in one of its PEFT
CONSOLIDATED, PARAMS = "consolidated.pth", "params.json"  # in a checkpoint of Meta Lingua's
MODEL = ("model.", "lora.")  # groups that say what a model's tensors compute
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
        init_new: list[str],
        base: Collection[str] = (),
    ) -> Progress:
        """Fill the model, with a step the optimizer too, and log it with what `check` found. Called
        by every rank. Returns where the run starts. Raises UserError, which names the tensors that
        do not fit, before anything is loaded.

        init_new: patterns of parameters that keep their values where the source has none.
        base: where the model has one, names; the others may keep their values, too.
        """
        source, step = self.source, self.step
        only = "model." if step is None else ""
        tensors = {n: t for n, t in tensors_of(model, optimizer).items() if n.startswith(only)}
        if source.parts is not None and not base:
            advice = "app=apps.lora goes on with them, convert makes one model of both"
            raise UserError(f"{INIT_FROM}: {source.path} has adapters over a base; {advice}")
        new = _new_ones(tensors, init_new, base, source.tensors)
        source.load({n: t for n, t in tensors.items() if n.removeprefix("model.") not in new}, only)
        if step is None:
            what = "optimizer, step and data start from scratch"
            logger.info(f"starting from the model of {source}: {what}")
            if init_new or new:
                why = "checkpoint.init_new:" if init_new else "beside its base,"
                logger.info(f"{why} initial values for {_listed(new)}")
        else:
            logger.info(f"continuing with model, AdamW state and step of {source}")
            logger.info(
                "its position in its data cannot be carried over: this run's rows continue at "
                f"{step} steps x {global_batch_size} rows = {step * global_batch_size}"
            )
        for line in changes_table(differing):
            logger.info(line)
        return Progress(step=step or 0, position=(step or 0) * global_batch_size)

    def fingerprints(self, base: Collection[str]) -> dict[str, str]:
        """The content of the base of a model, which has these names, if any. Called by every rank.
        Raises UserError."""
        return {BASE: content(self.source, {f"model.{n}" for n in base})} if base else {}

    def load_base(self, model: nn.Module, base: Collection[str]) -> None:
        """Fill the tensors of a model that are its base. Called by every rank. Raises UserError."""
        tensors = {n: t for n, t in tensors_of(model).items() if n.removeprefix("model.") in base}
        stored = {name: t for name, t in self.source.tensors.items() if name in tensors}
        replace(self.source, tensors=stored).load(tensors)
        logger.info(f"the base is that of {self.source}")


def _new_ones(
    tensors: dict[str, Tensor], patterns: list[str], base: Collection[str], stored: Collection[str]
) -> dict[str, int]:
    """The parameters and buffers of these patterns, or beside a base, that are not `stored`, and
    their elements. Raises UserError where a pattern names none of the model's."""
    sizes = {n.removeprefix("model."): t.numel() for n, t in tensors.items()}
    check_named("checkpoint.init_new", patterns, sizes, "parameter")
    absent = {n: size for n, size in sizes.items() if f"model.{n}" not in stored}
    beside = absent.keys() - base if base else set[str]()
    return {n: size for n, size in absent.items() if n in beside or within(n, patterns)}


def _listed(sizes: dict[str, int]) -> str:
    more = [f"and {len(sizes) - 3} more"] if len(sizes) > 4 else []
    shown = ", ".join([*sizes][: 3 if more else 4] + more)
    return f"{counted(len(sizes), 'parameter')} of {sum(sizes.values()):,} elements: {shown}"


def _change_class(key: str, resume_class: str | None, everything: bool) -> str | None:
    """The class of a change of a key where a new run starts from an old one's tensors."""
    if key in TRAINING_ONLY:
        return "free"
    if key.startswith(MODEL) or (everything and key.startswith(("optim.", "steps"))):
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
    keys = [k for k, kind in kinds.items() if k.startswith(MODEL) and kind == "guarded"]
    keys = [k for k in keys if k not in TRAINING_ONLY]
    keys += [] if given.intersection(TOKENIZER_KEYS) else TOKENIZER_KEYS + TEXT_KEYS
    dotted = {f"{k}." for k in given}  # a group that is given, such as null, has its keys
    keys = [
        k for k in keys if not any(f"{k}.".startswith(d) or d.startswith(f"{k}.") for d in dotted)
    ]
    if not keys:  # the config of a run that has started
        return {}
    given_path, run_config = str(args.checkpoint.init_from), args.folder / CONFIG
    try:
        path = local_copy(given_path, alone=True)
        if is_hf_folder(path):
            key = "data.tokenizer" if TOKENIZER_KEYS[0] in keys else None
            with tool_needed_by(str(path)):
                from lingua.tools.exchange.hugging_face import config_of_hf_folder
            tree, file = config_of_hf_folder(app, path, key), path / HF_CONFIG
        elif checkpoints := locate(path, lambda line: None):
            file = checkpoints[0].path / CONFIG
            tree = plain(read_file(file, str(file)))
        elif (file := path / PEFT_CONFIG).is_file():
            source = on_every_rank(path, lambda: _open_foreign(path, app, None), alone=True)
            tree = plain(parse_mapping(source.config, str(file)))
        else:  # Meta Lingua's, or a file
            return {}
    except UserError as error:
        if not run_config.exists():  # a run that has started needs the other no more
            raise UserError(f"{INIT_FROM}: {error}", error.local) from None
        tree, file = plain(read_file(run_config, str(run_config))), run_config
    values = pick(tree, keys)
    tokenizer = str(values.get(TOKENIZER_KEYS[1]))
    if is_url(given_path) and tokenizer.startswith(f"{path}/"):  # another machine has no such copy
        values[TOKENIZER_KEYS[1]] = given_path.rstrip("/") + tokenizer.removeprefix(str(path))
    return {k: LocatedValue.of(value, str(file)) for k, value in values.items()}


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
    foreign = path.is_file() or is_hf_folder(path) or (path / PEFT_CONFIG).is_file()
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
    base: str | None = None,
) -> TensorSource:
    """Open what a config key names. Called by every rank, or by a process without a group. Raises
    UserError, which begins with the key. A checkpoint whose model has a base has that too.

    Args:
        path: what `locate` takes, or its URL; of several checkpoints it is the newest that
            verifies. Or a folder of transformers, a checkpoint of Meta Lingua's, its folder
            `consolidated`, or a file of torch.save.
        app: whose models a folder of transformers has; None: apps.main.
        verify: `full`, in a process group, or `size`: as checkpoint.verify.
        report: logs a line for each checkpoint that is skipped.
        alone: this is one process of a group, whose others do not call; verify is `size`.
        base: where the base of the model is, if it has one; None: where its run found it.
    """
    try:
        source = _open(local_copy(path, alone), app, verify, report, alone, base)
        if _has_a_part(source):
            return _with_base(source, app, verify, report, alone, base)
        if base is not None and source.parts is None:
            raise UserError(f"base_model = {base}: {source.path} has a whole model, and no base")
    except UserError as error:
        raise UserError(f"{key}: {error}", error.local) from None
    return source


def _open(
    path: Path,
    app: App | None,
    verify: str,
    report: Callable[[str], None],
    alone: bool,
    base: str | None = None,
) -> TensorSource:
    """What is at `path`, of which a checkpoint may have a part of its model. As `open_source`."""
    checkpoints = locate(path, report) if alone else find_on_rank_0(lambda: locate(path, report))
    if not checkpoints:
        return on_every_rank(path, lambda: _open_foreign(path, app, base), alone)
    checkpoint, why = first_undamaged(checkpoints, verify, report)
    if checkpoint is None:
        raise UserError(why)
    file = checkpoint.path / CONFIG
    config = on_every_rank(file, lambda: read_bytes(file).decode(), alone)
    return replace(open_checkpoint(checkpoint, alone), config=config)


def _open_foreign(path: Path, app: App | None, base: str | None) -> TensorSource:
    """Open what another program wrote. Raises UserError."""
    with tool_needed_by(str(path)):
        from lingua.tools.exchange.foreign import open_foreign
    return open_foreign(path, app, base)


# ---- a model that is a base, which other files have, and what was trained beside it


def find_base(args: CheckpointArgs, saved: Saved | None, app: App) -> Origin:
    """What a run that resumes from `saved` reads the base of its model from: of a run that
    `checkpoint.init_from` names, the checkpoint that it read before. Called by every rank. Raises
    UserError."""
    path = args.init_from
    if path is None:
        raise UserError(f"{INIT_FROM}: must be given: the model that {app.path} changes")
    before = saved.config.get(INIT_FROM) if saved is not None else None
    if isinstance(before, str) and Path(before).resolve().is_relative_to(Path(path).resolve()):
        path = before
    return Origin(open_source(INIT_FROM, path, app, args.verify, logger.warning))


def content(source: TensorSource, names: Collection[str], alone: bool = False) -> str:
    """The `digest` of the tensors of a source with these names, as they are stored: each is read by
    one rank. Called by every rank, or by a process that is `alone` or without a group. Raises
    UserError."""
    if missing := sorted(set(names) - source.tensors.keys()):
        raise UserError(f"{source.path}: has no tensor {missing[0]}")
    chosen = {name: source.tensors[name] for name in sorted(names)}
    together, total = dist.is_initialized() and not alone, torch.zeros((), dtype=torch.int64)
    rank, world = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)

    def add_up() -> None:
        for name, t in [*chosen.items()][rank::world]:  # one in memory at a time
            for part in local_parts({name: torch.empty_like(t, device="cpu")}):
                source.read_parts([part])
                total.add_(hash_part(part))

    on_every_rank(source.path, add_up, alone)
    if together:
        world_sum_(total)
    return digest_text(chosen, total)


def _has_a_part(source: TensorSource) -> bool:
    """Whether it is a checkpoint of a run whose model has a base, which the checkpoint lacks."""
    return source.checkpoint is not None and BASE in read_state(source.checkpoint).data


def _with_base(
    own: TensorSource,
    app: App | None,
    verify: str,
    report: Callable[[str], None],
    alone: bool,
    named: str | None,
) -> TensorSource:
    """The whole model of a checkpoint that has a part of it. `named`: where the base is; others are
    as in `open_source`. Raises UserError where the base is another than that of the training."""
    assert own.checkpoint is not None
    advice = "base_model=PATH gives the place of the base that it was trained with"
    below, seen, config = own, {own.path.resolve()}, own.config
    # A run may begin with a part of another run, whose base is then its own.
    while _has_a_part(below):
        tree = plain(parse_mapping(below.config, below.config_path))
        path = named if named is not None else pick(tree, [INIT_FROM]).get(INIT_FROM)
        key = f"{INIT_FROM} of {below.path}" if named is None else "base_model"
        try:
            below = _open(local_copy(str(path), alone), app, verify, report, alone)
        except UserError as error:
            raise UserError(f"{key}: {error}; {advice}", error.local) from None
        if below.path.resolve() in seen:
            raise UserError(f"{key} = {path}: must be another model than what has it as its base")
        seen.add(below.path.resolve())
        if named is not None:
            group = tree.get("checkpoint")
            group = (group if isinstance(group, dict) else {}) | {"init_from": named}
            config, named = to_yaml(tree | {"checkpoint": group}), None
    source = over(replace(own, config=config), below.parts[1] if below.parts else below)
    expected = read_state(own.checkpoint).data[BASE]
    found = content(below, source.base_names, alone)
    if found != expected:
        what = f"is not what {own.path} was trained with: its content is {found}, not {expected}"
        raise UserError(f"{key} = {path}: {what}; {advice}")
    return source


def over(own: TensorSource, base: TensorSource) -> TensorSource:
    """A source whose tensors are its own, and those of a base that it lacks."""
    tensors = {n: t for n, t in base.tensors.items() if n.startswith("model.")} | own.tensors

    def read(parts: list[Part]) -> None:
        own.read_parts([part for part in parts if part.name in own.tensors])
        base.read_parts([part for part in parts if part.name not in own.tensors])

    return replace(own, tensors=tensors, read_parts=read, parts=(own, base))
