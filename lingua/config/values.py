"""The values that a user gives: each remembers where and how it was written, so that every later
mistake can name its line."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

MISSING = "???"  # stands for a value that must be given; the same text as omegaconf.MISSING
COMMAND_LINE = "command line"


@dataclass(frozen=True)
class LocatedValue:
    """One value as the user wrote it. Lists and mappings hold LocatedValue again."""

    value: Any  # None, bool, int, float, str, list[LocatedValue] or dict[str, LocatedValue]
    where: str  # "configs/debug.yaml:12", COMMAND_LINE, "the default"; empty: not to be shown
    text: str | None = None  # how it was written, so that `name: 1e3` can stay a string

    @staticmethod
    def of(value: Any, where: str) -> "LocatedValue":
        """A plain value, nested or not, as if it had been written at `where`."""
        if isinstance(value, dict):
            return LocatedValue({k: LocatedValue.of(v, where) for k, v in value.items()}, where)
        if isinstance(value, list):
            return LocatedValue([LocatedValue.of(v, where) for v in value], where)
        return LocatedValue(value, where, None if value is None else str(value))


Values = dict[str, LocatedValue]  # by path, such as "optim.lr"


def plain(value: Any) -> Any:
    """A copy of what YAML and JSON have: mappings for dataclasses, lists for tuples."""
    if isinstance(value, LocatedValue):
        return plain(value.value)
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def show(value: Any) -> str:
    """A value as it stands in an error message: like YAML, on one line, at most 80 characters."""
    text = json.dumps(plain(value), ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
