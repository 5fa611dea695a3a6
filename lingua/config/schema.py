"""The keys of a configuration class: types, groups, and what a change means for a resumed run."""

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar

from lingua.config.yaml import LocatedValue

T = TypeVar("T")

# What a changed key means for a resumed run (design.md, rule 10).
Free = Annotated[T, "free"]  # may change without a word
Announced = Annotated[T, "announced"]  # may change, is printed
Guarded = Annotated[T, "guarded"]  # refused unless allowed by name
RESUME_CLASSES = ("free", "announced", "guarded")


@dataclass(frozen=True)
class Key:
    """A key of the schema: a leaf, or (`group`) a nested dataclass."""

    type: Any  # without Annotated
    resume: str | None
    group: type | None = None
    optional: bool = False


def schema(cls: type, prefix: str = "") -> dict[str, Key]:
    """Every key in the order of the fields, a group before what it holds."""
    hints = typing.get_type_hints(cls, include_extras=True)
    keys: dict[str, Key] = {}
    for f in fields(cls):
        hint = hints[f.name]
        resume = None
        if typing.get_origin(hint) is Annotated:
            resume = next((m for m in hint.__metadata__ if m in RESUME_CLASSES), None)
            hint = hint.__origin__
        members = [m for m in members_of(hint) if m is not type(None)]
        group = members[0] if len(members) == 1 and is_dataclass(members[0]) else None
        optional = type(None) in members_of(hint)
        keys[prefix + f.name] = Key(hint, resume, group, optional)
        if group is not None:
            keys.update(schema(group, f"{prefix}{f.name}."))
    return keys


def spread(
    entries: Mapping[str, LocatedValue], prefix: str, keys: Mapping[str, Key]
) -> Iterator[tuple[str, LocatedValue]]:
    """(key, value) of every leaf given in nested mappings; what is no key of ours stays whole."""
    for name, given in entries.items():
        path = prefix + name
        key = keys.get(path)
        if key is None or key.group is None:
            yield path, given
        elif isinstance(given.value, dict) and given.value:
            yield from spread(given.value, path + ".", keys)
        elif not key.optional and given.value in (None, {}):
            continue  # a group whose every line is commented out
        else:
            yield path, given


def type_name(hint: Any) -> str:
    """`int or null`, `full or none`, `mapping of float`: a type in the words of a YAML file."""
    if typing.get_origin(hint) is Annotated:
        return type_name(hint.__origin__)
    if len(members_of(hint)) > 1:
        return " or ".join(type_name(m) for m in members_of(hint))
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(str(choice) for choice in inner)
    if origin in (list, tuple):
        return f"list of {type_name(inner[0])}" if inner else "list"
    if origin is dict:
        return f"mapping of {type_name(inner[1])}"
    return {type(None): "null", Any: "any"}.get(hint) or getattr(hint, "__name__", str(hint))


def is_mapping(hint: Any) -> bool:
    return any(typing.get_origin(m) is dict for m in members_of(hint))


def members_of(hint: Any) -> tuple[Any, ...]:
    """The types of a union, (hint,) for any other type."""
    if typing.get_origin(hint) is Annotated:
        hint = hint.__origin__
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return typing.get_args(hint)
    return (hint,)
