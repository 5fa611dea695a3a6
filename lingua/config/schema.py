"""The keys of a configuration class: types, defaults, groups, and what a change means on resume."""

import dataclasses
import types
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lingua.config.values import MISSING, LocatedValue, Values, plain

T = TypeVar("T")

# What a changed key means for a resumed run.
Free = Annotated[T, "free"]  # may change
Announced = Annotated[T, "announced"]  # may change, is printed
Guarded = Annotated[T, "guarded"]  # refused unless allowed by name
RESUME_CLASSES = ("free", "announced", "guarded")


@dataclass(frozen=True)
class Key:
    """A key of the schema: a leaf, or (`group`) a nested dataclass."""

    type: Any  # without Annotated
    default: LocatedValue  # of MISSING where a value must be given
    resume: str | None
    group: type | None
    optional: bool  # may be null


Keys = dict[str, Key]  # by path


def schema(owner: Any, prefix: str = "") -> Keys:
    """Every key of a dataclass in the order of the fields, a group before its own keys. `owner` is
    the class, or an instance whose values are the defaults."""
    cls = owner if isinstance(owner, type) else type(owner)
    hints = get_type_hints(cls, include_extras=True)
    keys: Keys = {}
    for f in fields(cls):
        hint, resume = hints[f.name], None
        if get_origin(hint) is Annotated:
            resume = next((m for m in hint.__metadata__ if m in RESUME_CLASSES), None)
            hint = hint.__origin__
        default = _default(f) if owner is cls else getattr(owner, f.name)
        members = members_of(hint)
        group = next((m for m in members if is_dataclass(m)), None)
        if group is not None and is_dataclass(default):
            group = type(default)  # which may be a subclass
        located = LocatedValue.of(plain(default), "" if default == MISSING else "the default")
        keys[prefix + f.name] = Key(hint, located, resume, group, type(None) in members)
        if group is not None:
            keys |= schema(default if is_dataclass(default) else group, f"{prefix}{f.name}.")
    return keys


def _default(f: dataclasses.Field) -> Any:
    if f.default_factory is not dataclasses.MISSING:
        return f.default_factory()
    return MISSING if f.default is dataclasses.MISSING else f.default


def leaves(entries: Values, keys: Keys, prefix: str = "") -> Values:
    """Nested mappings as {path: value of a leaf}. The value of an unknown key stays whole."""
    flat: Values = {}
    for name, given in entries.items():
        path = prefix + name
        key = keys.get(path)
        if key is None or key.group is None:
            flat[path] = given
        elif isinstance(given.value, dict) and given.value:
            flat |= leaves(given.value, keys, f"{path}.")
        elif key.optional or given.value not in (None, {}):
            flat[path] = given  # otherwise it is a group whose every line is commented out
    return flat


def members_of(hint: Any) -> tuple[Any, ...]:
    """The types of a union, (hint,) for any other type."""
    return get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)


def type_name(hint: Any) -> str:
    """`int or null`, `full or none`, `mapping of float`: a type in the words of a YAML file."""
    origin, inner = get_origin(hint), get_args(hint)
    if len(members_of(hint)) > 1:
        return " or ".join(type_name(member) for member in inner)
    if origin is Literal:
        return " or ".join(str(choice) for choice in inner)
    if origin in (list, tuple):
        return f"list of {type_name(inner[0])}"
    if origin is dict:
        return f"mapping of {type_name(inner[1])}"
    return {type(None): "null", Any: "any"}.get(hint) or getattr(hint, "__name__", str(hint))
