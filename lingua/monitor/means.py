"""Means over the rows or the targets of a global batch, the same on every mesh."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lingua.base.errors import UserError
from lingua.data import IGNORE
from lingua.data.loader import MicroBatch
from lingua.model import Metrics
from lingua.parallel.mesh import dp_sum_


class Means:
    """Collects a data-parallel rank's sums and counts, by name."""

    def __init__(self) -> None:
        self.parts: dict[str, Tensor] = {}  # float32 [2] each: the sum and its count

    def add(self, metrics: Metrics, micro: MicroBatch) -> None:
        """Add the values of a micro-batch, of the forms of `Losses.metrics`. Called by every rank,
        with the same names; does not wait for the device. Raises UserError for another shape."""
        for name, part in mean_parts(metrics, micro).items():
            self.parts[name] = self.parts[name] + part if name in self.parts else part

    def read(self, mesh: DeviceMesh) -> dict[str, float]:
        """The means over the data-parallel ranks. Called by every rank; the host waits."""
        sums = dp_sum_(torch.stack(list(self.parts.values())), mesh).tolist()
        return means((name, *pair) for name, pair in zip(self.parts, sums, strict=True))


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


def means(sums: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Of (name, sum, count); without a number where nothing was counted."""
    return {name: total / count for name, total, count in sums if count}
