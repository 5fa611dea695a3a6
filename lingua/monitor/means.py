"""Means over the rows or the targets of a global batch, the same on every mesh."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lingua.base.errors import UserError
from lingua.data import IGNORE
from lingua.data.loader import MicroBatch
from lingua.model import Metrics
from lingua.parallel.mesh import dp_gather
from lingua.parallel.tensors import to_host

Parts = dict[str, list[Tensor]]  # by name float32 [2] for each micro-batch: a sum and its count


class Means:
    """Collects a data-parallel rank's sums and counts, by name."""

    def __init__(self) -> None:
        self.parts: Parts = {}

    def add(self, metrics: Metrics, micro: MicroBatch) -> None:
        """Add the values of a micro-batch, of the forms of `Losses.metrics`. Called by every rank,
        with the same names; does not wait for the device. Raises UserError for another shape."""
        for name, part in mean_parts(metrics, micro).items():
            self.parts.setdefault(name, []).append(part)

    def read(self, mesh: DeviceMesh) -> dict[str, float]:
        """The means over the data-parallel ranks. Called by every rank; the host waits."""
        return means(self.parts, dp_sums(self.parts, mesh))


def mean_parts(metrics: Metrics, micro: MicroBatch) -> dict[str, Tensor]:
    """The sum and the count of each of `Losses.metrics` over a micro-batch: float32 [2] by name.
    Padding rows and ignored targets are left out. Raises UserError for another shape."""
    if not metrics:
        return {}
    is_row, is_target = micro.row_ids >= 0, micro.targets != IGNORE
    masks = {m.shape: m for m in (is_target, is_target[0], is_row)}
    parts = {}
    for name, value in metrics.items():
        values, mask = value if isinstance(value, tuple) else (value, masks.get(value.shape))
        if mask is None or mask.shape != values.shape:
            shapes = ", ".join(str(list(shape)) for shape in masks)
            raise UserError(f'metric "{name}": has shape {list(values.shape)}; must be {shapes}')
        kept = torch.where(mask, values.detach().float(), 0.0)
        parts[name] = torch.stack((kept.sum(), mask.sum()))
    return parts


def dp_sums(parts: Parts, mesh: DeviceMesh) -> list[list[float]]:
    """[sum, count] of each name over data-parallel ranks that have as many micro-batches each.
    Called by every rank; the host waits."""
    ranks = dp_gather(torch.stack([torch.stack(pairs) for pairs in parts.values()]), mesh)
    columns = to_host(ranks.transpose(0, 1).flatten(1, 2).transpose(1, 2))[0]  # by name: two lists
    return [list(map(exact_sum, pair)) for pair in columns]


def exact_sum(values: Iterable[float]) -> float:
    """The sum of numbers, rounded once: it does not depend on their order."""
    terms = list(values)
    return math.fsum(terms) if all(map(math.isfinite, terms)) else sum(terms)


def means(names: Iterable[str], sums: list[list[float]]) -> dict[str, float]:
    """By name, of [sum, count] each; without a number where nothing was counted."""
    return {name: pair[0] / pair[1] for name, pair in zip(names, sums, strict=True) if pair[1]}
