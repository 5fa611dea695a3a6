"""Filling tensors from where they can be read, on any topology; nothing that does not fit."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lingua.checkpoint.source import TensorSource, on_every_rank
from lingua.checkpoint.tensors import local_parts
from lingua.errors import UserError


def load(source: TensorSource, tensors: Mapping[str, Tensor], only: str = "") -> None:
    """Fill `tensors` in place, on any topology. Called by every rank, or by a process without a
    process group.

    Args:
        only: how the names begin that are loaded; what the source has under others is not read.

    Raises:
        UserError: names the tensors that do not fit, before anything is loaded; or it cannot be
            read.
    """
    tensors = {name: t for name, t in tensors.items() if name.startswith(only)}
    shapes = {n: tuple(t.shape) for n, t in source.tensors.items() if n.startswith(only)}
    expected = {name: tuple(t.shape) for name, t in tensors.items()}
    check_fit(f"{source.path} does not fit this model", expected, shapes)
    on_every_rank(source.path, lambda: source.read(local_parts(tensors)))


def read_whole(source: TensorSource, names: Iterable[str]) -> dict[str, Tensor]:
    """Whole tensors on the CPU. Called as `load` is."""
    tensors = {name: torch.empty_like(source.tensors[name], device="cpu") for name in names}
    on_every_rank(source.path, lambda: source.read(local_parts(tensors)))
    return tensors


def check_fit(
    title: str,
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    here: str = "here",
    there: str = "in the checkpoint",
) -> None:
    """Raise UserError where shapes by name are not those that are expected.

    Args:
        title: what the message begins with; a line for each tensor follows.
        here, there: where the shapes are expected and found, in words.
    """
    wrong = []
    for name, shape in expected.items():
        if name not in found:
            wrong.append(f"{name}: {shape} {here}, not {there}")
        elif found[name] != shape:
            wrong.append(f"{name}: {shape} {here}, {found[name]} {there}")
    wrong += [f"{name}: {there}, not {here}" for name in found if name not in expected]
    if wrong:
        shown = [*wrong[:10], *([f"and {len(wrong) - 10} more"] if len(wrong) > 10 else [])]
        raise UserError(f"{title}:\n  " + "\n  ".join(shown))
