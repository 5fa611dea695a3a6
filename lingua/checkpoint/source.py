"""Tensors that can be read: of a checkpoint, or of what another program wrote (lingua.checkpoint.
origin).

Tensors have our names, `model.<name>` and `optim.<state>.<name>`. Nothing of what is read is
executed.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lingua.base.dump_dir import CONFIG, METADATA, STATE
from lingua.base.errors import UserError
from lingua.checkpoint.folder import Checkpoint
from lingua.checkpoint.tensors import Part, local_parts
from lingua.config.values import show
from lingua.parallel.mesh import gather_on_every_rank

T = TypeVar("T")
Shapes = dict[str, tuple[int, ...]]  # by name


@dataclass(frozen=True)
class TensorSource:
    """Tensors that can be read, and what is known about them."""

    path: Path
    kind: str  # what it is, for messages
    # shape and dtype of each by our names: on the meta device, or of a file mapped into memory
    tensors: dict[str, Tensor]
    read_parts: Callable[[list[Part]], None]  # fills the memory of each
    step: int | None = None  # updates made; None: not known
    config: str = "{}"  # text of YAML, or JSON
    checkpoint: Checkpoint | None = None  # where it is one of ours
    # where `path` has a part of the model alone: that part, and the source of the rest
    parts: "tuple[TensorSource, TensorSource] | None" = None
    # (`model` group of a run, checkpoint.allow_change): raises UserError where the run's model is
    # another than that of the tensors; None: its config has the keys to compare
    check_model: Callable[[Any, list[str]], None] | None = None

    def __post_init__(self) -> None:
        step = self.step
        if step is not None and (type(step) is not int or not 0 <= step < 10**10):
            raise UserError(f"{self.path}: step = {show(step)}: must be a whole number below 10^10")
        config = self.config
        if not isinstance(config, str) or config.encode(errors="ignore").decode() != config:
            raise UserError(f"{self.path}: config = {show(config)}: must be text of UTF-8")

    @property
    def base_names(self) -> set[str]:
        """The tensors of the model that the second of `parts` has."""
        own = self.parts[0].tensors if self.parts else self.tensors
        return {name for name in self.shapes("model.") if name not in own}

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.path} ({self.kind}{step})"

    @property
    def config_path(self) -> str:
        """The path of its config, for messages."""
        return str(self.path / CONFIG) if self.checkpoint else f"config of {self.path}"

    def load(self, tensors: Mapping[str, Tensor], only: str = "") -> None:
        """Fill `tensors` in place, on any topology. Called by every rank, or by a process without a
        process group. Raises UserError, which names the tensors that do not fit, before any is
        loaded, or why one cannot be read.

        only: how the names begin that are loaded; what is stored under others is not read.
        """
        tensors = {name: t for name, t in tensors.items() if name.startswith(only)}
        check_fit(
            f"{self.path} does not fit this model",
            {name: tuple(t.shape) for name, t in tensors.items()},
            self.shapes(only),
        )
        on_every_rank(self.path, lambda: self.read_parts(local_parts(tensors)))

    def whole(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole tensors on the CPU. Called as `load` is."""
        tensors = {name: torch.empty_like(self.tensors[name], device="cpu") for name in names}
        on_every_rank(self.path, lambda: self.read_parts(local_parts(tensors)))
        return tensors

    def shapes(self, only: str = "") -> Shapes:
        """Returns the shapes of the tensors whose names begin with `only`."""
        return {name: tuple(t.shape) for name, t in self.tensors.items() if name.startswith(only)}


def check_fit(
    title: str,
    expected: Shapes,
    stored: Shapes,
    here: str = "here",
    there: str = "in the checkpoint",
) -> None:
    """Raise UserError where shapes are not those that are expected: `title`, then a line for each.

    here, there: where the shapes are expected and stored, in words.
    """
    wrong = []
    for name in expected | stored:
        if name not in stored:
            wrong.append(f"{name}: {expected[name]} {here}, not {there}")
        elif name not in expected:
            wrong.append(f"{name}: {there}, not {here}")
        elif stored[name] != expected[name]:
            wrong.append(f"{name}: {expected[name]} {here}, {stored[name]} {there}")
    if wrong:
        more = [f"and {len(wrong) - 10} more"] if len(wrong) > 10 else []
        raise UserError("\n  ".join([f"{title}:", *wrong[:10], *more]))


def on_every_rank(path: Path, work: Callable[[], T], alone: bool = False) -> T:
    """Run `work`, which reads `path`, and return its result. Called by every rank, or by a process
    that is `alone` or without a group. Raises UserError on all ranks where it fails on one."""
    results, message = [], ""
    try:
        results.append(work())
    except UserError as error:
        message = str(error)
    except Exception as error:  # a damaged file may raise anything
        message = f"{path} cannot be read: {_reason(error)}"
    together = dist.is_initialized() and not alone
    messages = gather_on_every_rank(message) if together else [message]
    for message in filter(None, messages):
        raise UserError(message)
    return results[0]


def _reason(error: Exception) -> str:
    """An error's message without the advice of torch.load to trust the file."""
    if match := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return f"it refers to {match[1]}, which is not executed"
    return str(error).split(". ")[0] or type(error).__name__


def open_checkpoint(checkpoint: Checkpoint, alone: bool = False) -> TensorSource:
    """The tensors of our checkpoint; of one that `publish_config` wrote, none. Called as
    `on_every_rank`."""
    path, kind, step = checkpoint.path, "checkpoint", checkpoint.step
    if checkpoint.files.keys() == {STATE, CONFIG}:
        return TensorSource(path, kind, {}, lambda parts: None, step, checkpoint=checkpoint)
    from lingua.checkpoint.dcp import DCPFolder  # imported for a run that loads tensors

    folder = on_every_rank(path / METADATA, lambda: DCPFolder(path), alone)
    return TensorSource(path, kind, folder.tensors, folder.read, step, checkpoint=checkpoint)
