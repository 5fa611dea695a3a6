"""Learning rates of parts of a model (`optim.lr_scale`)."""

import math
from typing import Any

from lingua.parallel.init import Named
from lingua.parallel.patterns import check_named
from lingua.parallel.plan import within


def scaled(groups: list[dict[str, Any]], lr_scale: dict[str, float]) -> list[dict[str, Any]]:
    """The groups of named parameters, each split by the factor of `lr_scale` that they have."""
    names = [name for group in groups for name, _ in group["params"]]
    check_named("optim.lr_scale", lr_scale, names, "trained parameter")
    split = []
    for group in groups:
        parts: dict[float, list[Named]] = {}
        for name, p in group["params"]:
            scale = math.prod(s for pattern, s in lr_scale.items() if within(name, [pattern]))
            parts.setdefault(scale, []).append((name, p))
        split += [{**group, "params": part, "lr_scale": s} for s, part in parts.items()]
    return split
