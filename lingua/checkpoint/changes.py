"""What may differ from the checkpoint that a run resumes: keys of its config, and its data."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from lingua.base.errors import UserError
from lingua.base.format import align
from lingua.checkpoint.saved import ABSENT, Saved
from lingua.checkpoint.state import versions
from lingua.data.rows import CONTENT
from lingua.data.stream import shares
from lingua.parallel.mesh import WORDS

MIXTURE = ("data.sources", "data.stages")
EXACT = ("data.batch_size", "distributed.threads")  # what rounding depends on

Classes = Mapping[str, str | None]  # resume class of each config key

logger = logging.getLogger(__name__)


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
    saved: Saved, config: dict[str, Any], classes: Classes, allowed: list[str]
) -> list[Change]:
    """Config keys that differ from the checkpoint's and are not free. Raises UserError as
    `check_changes` does.

    Keys of EXACT count as guarded in a run that is `deterministic: mesh`. The mixture is compared
    by what it gave the steps up to the checkpoint: equal shares in other words, and stages that
    begin later, are announced.
    """
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


def check_data(saved: Saved, data: dict[str, str], allowed: list[str]) -> list[Change]:
    """Sources and tokenizer whose content is not what it was behind the same name. Raises UserError
    as `check_changes` does. A source that gave no row before the checkpoint may be new or another.

    data: fingerprints by name: of what rows are made of, and of the tokenizer.
    """
    past = _mixture_before(saved.config, saved.progress.step)
    read = {f"{CONTENT}{name}" for _, weights in past for name in weights}
    unread = {key for key in data if key.startswith(CONTENT)} - read
    classes = {key: "announced" if key in unread else "guarded" for key in data}
    differing = changes(saved.data, data, classes)
    check_changes(differing, allowed)
    return differing


def kernel_changes(saved: Saved, device: str) -> list[Change]:
    """What the rounding of kernels on this type of device depends on and is not what it was, for a
    run that promises bits. An older checkpoint may not have it."""
    then, now = saved.versions, versions()
    keys = ("torch", "cpu_capability") if device == "cpu" else ("torch",)
    differing = [key for key in keys if then.get(key, now[key]) != now[key]]
    return [Change(key, then[key], now[key], "announced") for key in differing]


def log_resume(saved: Saved, differing: list[Change], topology: tuple[int, ...]) -> None:
    """Log what is resumed and what is different."""
    logger.info(f"resuming {saved.checkpoint.path} (step {saved.progress.step})")
    if saved.topology != topology:
        names = ", ".join(WORDS[: max(len(saved.topology), len(topology))])
        both = f"{saved.topology} when it was saved, {topology} now"
        logger.info(f"topology ({names}): {both}; the run is the same")
    for line in changes_table(differing):
        logger.info(line)
