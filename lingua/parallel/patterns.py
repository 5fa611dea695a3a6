"""Patterns of parameters' names that config keys have."""

from collections.abc import Collection, Iterable
from itertools import accumulate

from lingua.base.errors import UserError, nearest
from lingua.parallel.plan import within


def check_named(key: str, patterns: Iterable[str], names: Collection[str], kind: str) -> None:
    """Raise UserError where a pattern of this config key is `within` none of the parameters of this
    kind, which have these names."""
    for pattern in patterns:
        if not any(within(name, [pattern]) for name in names):
            parts = {part for name in names for part in accumulate(name.split("."), "{}.{}".format)}
            none = f"names no {kind} of the model, and no module that has one"
            raise UserError(f"{key}: {pattern} {none}{nearest(pattern, parts)}")
