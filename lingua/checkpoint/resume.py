"""Going on with a run: which checkpoint, what may differ from it, and what it restores.

Rank 0 decides and all ranks follow. Tensors are loaded in place; everything else of the state is in
`train_state.json`, equal for all ranks, so a run resumes on any topology.
"""

import logging
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch.optim import Optimizer

from lingua import __version__
from lingua.checkpoint.folder import CONFIG, Checkpoint, newest, read_state
from lingua.checkpoint.tensors import settings_of
from lingua.data.stream import shares
from lingua.data.text import CONTENT
from lingua.errors import UserError
from lingua.format import align
from lingua.parallel.mesh import on_rank_0

MIXTURE = ("data.sources", "data.stages")
TOKENIZER = "data.tokenizer.content"

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run is: everything that is state besides tensors and config."""

    step: int = 0  # completed updates, those that were skipped for a bad gradient included
    position: int = 0  # rows consumed: where the row stream goes on
    skipped_steps: int = 0  # updates suppressed since their gradient was not finite
    trained_s: float = 0.0  # seconds of training, over all starts


@dataclass(frozen=True)
class Saved:
    """The checkpoint to resume from, with its configuration and state."""

    checkpoint: Checkpoint
    config: dict[str, Any]  # flat
    state: dict[str, Any]

    @property
    def progress(self) -> Progress:
        return Progress(**self.state["progress"])

    @property
    def topology(self) -> tuple[int, ...]:
        return tuple(self.state["topology"])


def flat_config(path: Path, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a written config file has for `keys`, by their dotted names."""
    return flat_text(path.read_text(encoding="utf-8"), keys)


def flat_text(text: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The same of the text of a config file, which may be JSON."""
    tree = OmegaConf.create(text)
    flat = {}
    for key in keys:
        value = OmegaConf.select(tree, key, default="(absent)")
        flat[key] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return flat


def find_saved(root: Path, verify: str, keys: Mapping[str, Any]) -> Saved | None:
    """The checkpoint to resume from, or None to start from scratch. Called by every rank."""
    checkpoint = newest(root, verify, logger.warning)
    if checkpoint is None:
        return None
    return on_rank_0(lambda: read_saved(checkpoint, keys))


def read_saved(checkpoint: Checkpoint, keys: Mapping[str, Any]) -> Saved:
    """A checkpoint with its configuration and state."""
    state = read_state(checkpoint)
    if "progress" not in state:  # made by `convert` from a file
        raise UserError(
            f"{checkpoint.path} holds a model alone and no run to go on with. A new run starts "
            "from it with checkpoint.init_ckpt_path, without continue_training_from_init"
        )
    return Saved(checkpoint, flat_config(checkpoint.path / CONFIG, keys), state)


# ------------------------------------------------------------------------------ what may change


@dataclass(frozen=True)
class Change:
    """A config key whose value is not the one that was saved."""

    key: str
    saved: Any
    now: Any
    resume_class: str  # "announced" or "guarded"
    note: str = ""  # what of it may change, where some may


def changes(
    saved: Mapping[str, Any], now: Mapping[str, Any], classes: Mapping[str, str]
) -> list[Change]:
    """Keys, flattened, that differ and are not free."""
    return [
        Change(key, saved.get(key, "(absent)"), now[key], classes[key])
        for key in now
        if classes[key] != "free" and saved.get(key, "(absent)") != now[key]
    ]


def check_changes(
    found: list[Change], allowed: list[str], instead: str = "use another dump_dir"
) -> None:
    """Refuse guarded changes that `checkpoint.allow_change` does not name."""
    refused = [c for c in found if c.resume_class == "guarded" and c.key not in allowed]
    if refused:
        lines = [f"{c.key}: {c.saved} in the checkpoint, {c.now} now{c.note}" for c in refused]
        raise UserError(
            "these keys define the run and differ from the checkpoint's:\n  "
            + "\n  ".join(lines)
            + f"\nset them back, {instead}, or name them in checkpoint.allow_change: ["
            + ", ".join(c.key for c in refused)
            + "]"
        )


def changes_table(found: list[Change]) -> list[str]:
    """Lines of a table: key, saved, now, class."""
    rows = [("key", "saved", "now", "class")]
    rows += [(c.key, str(c.saved), str(c.now), c.resume_class) for c in found]
    return align(rows, left=4)


def check_config(
    saved: Saved | None, config: dict[str, Any], classes: Mapping[str, str], allowed: list[str]
) -> list[Change]:
    """Config keys that differ from the checkpoint's and are not free.

    The mixture is compared by what it gave the steps up to the checkpoint: equal shares in other
    words, and stages that begin later, are announced.

    Raises:
        UserError: a guarded one differs and `checkpoint.allow_change` does not name it.
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
    stages = config.get("data.stages")
    stages_before = [(0, config.get("data.sources", {}))]
    if isinstance(stages, list):  # a checkpoint may be older than the key
        stages_before += [(s["from_step"], s["sources"]) for s in stages if s["from_step"] < step]
    return [(start, shares(weights)) for start, weights in stages_before]


def check_data(saved: Saved | None, data: dict[str, str], allowed: list[str]) -> list[Change]:
    """Sources and tokenizer whose content is not what it was behind the same name.

    A source that gave no row before the checkpoint may be new or another: it is announced.

    Args:
        data: fingerprints by name: of what rows are made of, and of the tokenizer.

    Raises:
        UserError: there is one that `checkpoint.allow_change` does not name.
    """
    if saved is None:
        return []
    past = _mixture_before(saved.config, saved.progress.step)
    read = {f"{CONTENT}{name}" for _, of_stage in past for name in of_stage}
    unread = {key for key in data if key.startswith(CONTENT)} - read
    classes = {key: "announced" if key in unread else "guarded" for key in data}
    found = changes(saved.state["data"], data, classes)
    check_changes(found, allowed)
    return found


# ------------------------------------------------------------------------ what is logged and saved


def log_resume(
    saved: Saved, found: list[Change], optimizer: Optimizer, topology: tuple[int, ...]
) -> None:
    """Say what is resumed and what is different, on rank 0."""
    logger.info(f"resuming {saved.checkpoint.path} (step {saved.progress.step})")
    if saved.topology != topology:
        logger.info(
            "topology (dp_replicate, dp_shard, tp): "
            f"{saved.topology} when it was saved, {topology} now; the run is the same"
        )
    if found:
        for line in changes_table(found):
            logger.info(line)
    for line in settings_not_saved(saved.state["param_groups"], optimizer):
        logger.info(line)


def settings_not_saved(saved: list[dict[str, Any]], optimizer: Optimizer) -> Iterator[str]:
    """A line for each setting that the optimizer has for parameters whose group in an older
    checkpoint has none of that name."""
    then = {name: group for group in saved for name in group["param_names"]}
    unknown: dict[tuple[str, str], int] = {}
    for group in settings_of(optimizer):
        for name in group["param_names"]:
            for key in group.keys() - then.get(name, group).keys():
                unknown[key, str(group[key])] = unknown.get((key, str(group[key])), 0) + 1
    for (key, value), n in sorted(unknown.items()):
        yield f"{key} of {n} parameters is not in the checkpoint: {value}, as the config has it now"


def state_to_save(
    progress: Progress,
    optimizer: Optimizer,
    *,
    tokens: int,
    schedule: dict[str, float],
    topology: tuple[int, ...],
    data: dict[str, str],
    held_out: float | None,
) -> dict[str, Any]:
    """What `train_state.json` holds. `held_out` is in nats per byte, None where this step was not
    measured. The optimizer's groups, which name their parameters, are there
    to be read: on resume their values come from the config."""
    return {
        "progress": asdict(progress),
        "tokens": tokens,
        "schedule": schedule,
        "param_groups": settings_of(optimizer),
        "topology": list(topology),
        "data": data,
        "held_out": held_out,
        "versions": {
            "lingua": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
