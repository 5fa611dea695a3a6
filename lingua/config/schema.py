"""The keys of a configuration class: types, defaults, groups, and what a change means on resume."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lingua.config.values import MISSING, LocatedValue, Values, plain

T = TypeVar("T")

# What a changed key means for a resumed run.
Free = Annotated[T, "free"]  # may change
Announced = Annotated[T, "announced"]  # may change, is printed
Guarded = Annotated[T, "guarded"]  # refused unless allowed by name
RESUME_CLASSES = ("free", "announced", "guarded")
# Of a free key, or of all keys of a group: what numbers of training depend on it.
Operational = Annotated[T, "free", "operational"]  # none, not even by rounding
Additions = Annotated[T, "free", "additions"]  # it changes the order of additions alone
KINDS = ("operational", "additions")

MAX_STEPS = 9_999_999_999  # the folder of a checkpoint has ten digits
MAX_TOKENS = 1 << 24  # longest row, context or generated text
MAX_ROWS = 1 << 24  # largest batch


@dataclass(frozen=True)
class Key:
    """A key of the schema: a leaf, or (`group`) a nested dataclass."""

    type: Any  # without Annotated and null
    optional: bool  # may be null
    default: LocatedValue  # holds MISSING where a value must be given
    resume: str | None
    kind: str | None  # of KINDS
    group: type | None


Keys = dict[str, Key]  # by path


def schema(owner: Any, prefix: str = "") -> Keys:
    """Every key of a dataclass in the order of the fields, a group before its own keys. `owner` is
    the class, or an instance whose values are the defaults."""
    cls = owner if isinstance(owner, type) else type(owner)
    hints = get_type_hints(cls, include_extras=True)
    keys: Keys = {}
    for f in fields(cls):
        hint, marks = hints[f.name], [""]
        if get_origin(hint) is Annotated:
            hint, marks = hint.__origin__, [*hint.__metadata__]
        resume = next((mark for mark in marks if mark in RESUME_CLASSES), None)
        kind = next((mark for mark in marks if mark in KINDS), None)
        leaf, optional = split_optional(hint)
        default = _default(f) if owner is cls else getattr(owner, f.name)
        located = LocatedValue.of(plain(default), "" if default == MISSING else "the default")
        group: Any = leaf if is_dataclass(leaf) else None
        if is_dataclass(default):
            group = type(default)  # perhaps a subclass
        keys[prefix + f.name] = Key(leaf, optional, located, resume, kind, group)
        if group is not None:
            keys |= schema(default if is_dataclass(default) else group, f"{prefix}{f.name}.")
    return keys


def _default(f: dataclasses.Field[Any]) -> Any:
    if f.default_factory is not dataclasses.MISSING:
        return f.default_factory()
    return MISSING if f.default is dataclasses.MISSING else f.default


def bounds(
    args: Any, minimum: float, *keys: str, maximum: float = math.inf
) -> Iterator[tuple[str, str]]:
    """For `validate`: yields (key, what is required of it) for each number that is out of range;
    null never is."""
    yield from require(args, f"at least {minimum:,}", lambda value: value >= minimum, *keys)
    yield from require(args, f"at most {maximum:,}", lambda value: not value > maximum, *keys)


def require(
    args: Any, need: str, holds: Callable[[Any], bool], *keys: str
) -> Iterator[tuple[str, str]]:
    """For `validate`: yields (key, "must be {need}") for those of `keys` whose value is not null
    and does not satisfy `holds`."""
    for key in keys:
        value = getattr(args, key)
        if value is not None and not holds(value):
            yield key, f"must be {need}"


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


def split_optional(hint: Any) -> tuple[Any, bool]:
    """A field's type without `| None`, and whether it had that. Other unions are not supported."""
    members = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    kinds = [member for member in members if member is not NoneType]
    assert len(kinds) == 1, f"{hint}: a field has one type, or that and None"
    return kinds[0], NoneType in members


def choice_word(choice: Any) -> str:
    """One of the values of a Literal as YAML has it."""
    return str(choice).lower() if isinstance(choice, bool) else str(choice)


def type_name(kind: Any) -> str:
    """`int`, `full or none`, `mapping of float`: a type in the words of a YAML file."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(map(choice_word, inner))
    if origin is list:
        return f"list of {type_name(inner[0])}"
    if origin is dict:
        names = "".join(f"{what} to " for what in getattr(inner[0], "__metadata__", ()))
        return f"mapping of {names}{type_name(inner[1])}"
    return "any" if kind is Any else kind.__name__
