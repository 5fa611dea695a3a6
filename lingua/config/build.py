"""User values put into a structured config and checked: types, choices, required keys, ranges."""

import difflib
import math
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lingua.config.schema import Key, members_of, schema, spread, type_name
from lingua.config.yaml import COMMAND_LINE, LocatedValue, show
from lingua.errors import nearest

C = TypeVar("C")

# ---- from given values to dataclasses


def build(
    cls: type[C], merged: Mapping[str, LocatedValue], keys: Mapping[str, Key], errors: list[str]
) -> C | None:
    """The finished configuration; void when there are `errors`, to which it adds what it finds."""
    bad: set[str] = set()
    config = _fill(cls, merged, keys, "", errors, bad)
    _resolve(config, merged, keys, errors, bad)
    return _validate(config, "", merged, keys, errors, bad)


def _fill(
    cls: type,
    given_values: Mapping[str, LocatedValue],
    keys: Mapping[str, Key],
    prefix: str,
    errors: list[str],
    bad: set[str],
) -> DictConfig:
    """A structured config of `cls` holding the given values; `bad` gets the keys with an error."""
    config = OmegaConf.structured(cls)
    for path, given in given_values.items():
        count = len(errors)
        if path not in keys:
            hint = _nearest_key(path, keys, prefix)
            errors.append(f"{prefix}{path}: unknown key{hint}{place(given)}")
        elif given.value != MISSING or keys[path].group is not None:
            value = _convert(given, keys[path].type, prefix + path, errors)
            if len(errors) == count:
                _assign(config, path, value, keys)
        else:
            _assign(config, path, MISSING, keys)
        if len(errors) > count:
            bad.add(path)
    for path in keys:
        if path not in bad and _is_missing(config, path):
            at = place(given_values[path]) if path in given_values else ""
            errors.append(f"{prefix}{path}: must be given{at}")
            bad.add(path)
    return config


def _assign(config: DictConfig, path: str, value: Any, keys: Mapping[str, Key]) -> None:
    """Put a converted value in its place, making the optional groups above it."""
    *groups, name = path.split(".")
    above = ""
    for group in groups:
        above += group
        if config[group] is None:
            config[group] = OmegaConf.structured(keys[above].group)
        config = config[group]
        above += "."
    config[name] = value


def _is_missing(config: DictConfig, path: str) -> bool:
    *groups, name = path.split(".")
    for group in groups:
        config = config[group]
        if config is None:
            return False
    return OmegaConf.is_missing(config, name)


def _resolve(
    config: DictConfig,
    merged: Mapping[str, LocatedValue],
    keys: Mapping[str, Key],
    errors: list[str],
    bad: set[str],
) -> None:
    """Put the values of `${other.key}` in their place, checked like any other value."""
    for path, given in merged.items():
        if path in bad or "${" not in str(given.plain()):
            continue
        count = len(errors)
        try:
            value = OmegaConf.select(config, path, throw_on_missing=True)
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as e:
            errors.append(error_line(path, given, str(e).splitlines()[0]))
        else:
            value = _convert(LocatedValue.of(value, given.where), keys[path].type, path, errors)
            if len(errors) == count:
                _assign(config, path, value, keys)
        if len(errors) > count:
            bad.add(path)


def _validate(
    config: DictConfig,
    prefix: str,
    merged: Mapping[str, LocatedValue],
    keys: Mapping[str, Key],
    errors: list[str],
    bad: set[str],
) -> Any:
    """The object of a group, after its `validate()`. A group with an error in it is not judged as a
    whole: the default in the place of a mistyped value could only cause a second, false error."""
    if not any(path.startswith(prefix) for path in bad):
        group = OmegaConf.to_object(config)
        errors += _validate_group(group, prefix, merged)
        return group
    for path, key in keys.items():
        parent, _, name = path.rpartition(".")
        if key.group is not None and f"{parent}." == (prefix or ".") and config[name] is not None:
            _validate(config[name], path + ".", merged, keys, errors, bad)
    return None


def _validate_group(group: Any, prefix: str, merged: Mapping[str, LocatedValue]) -> Iterator[str]:
    """What the `validate()` of a group and of the groups in it find, as lines for the user."""
    for path, need in group.validate() if hasattr(group, "validate") else ():
        given = _find_given(prefix + path, merged)
        value = _find_value(group, path)
        if given is None:
            given = LocatedValue.of(value, "the default") if _is_plain(value) else None
        yield error_line(prefix + path, given, need) if given else f"{prefix}{path}: {need}"
    for f in fields(group):
        value = getattr(group, f.name)
        if is_dataclass(value):
            yield from _validate_group(value, f"{prefix}{f.name}.", merged)
        elif isinstance(value, list | tuple):
            for i, element in enumerate(value):
                if is_dataclass(element):
                    yield from _validate_group(element, f"{prefix}{f.name}[{i}].", merged)


def _find_given(path: str, merged: Mapping[str, LocatedValue]) -> LocatedValue | None:
    """What was given for a key, or for an entry of a mapping or list."""
    if path in merged:
        return merged[path]
    for above, given in merged.items():
        if isinstance(given.value, dict) and path.startswith(above + "."):
            return given.value.get(path[len(above) + 1 :])
        if isinstance(given.value, list) and (m := re.match(re.escape(above) + r"\[(\d+)\]", path)):
            element = given.value[int(m[1])]
            inner = path[m.end() + 1 :]
            return _find_given(inner, element.value) if isinstance(element.value, dict) else element
    return None


def _find_value(group: Any, path: str) -> Any:
    """The value at a path below a group, NO_DEFAULT where there is none."""
    value = group
    while path:
        if isinstance(value, Mapping):
            return value.get(path, NO_DEFAULT)
        name, _, path = path.partition(".")
        value = getattr(value, name, NO_DEFAULT)
    return value


def _is_plain(value: Any) -> bool:
    return value is not NO_DEFAULT and not is_dataclass(value)


# ---- one value


def _convert(given: LocatedValue, hint: Any, path: str, errors: list[str]) -> Any:
    """The value as its field's type wants it; what does not fit adds a line to `errors`."""
    value, members = given.value, members_of(hint)
    if isinstance(value, str) and "${" in value:
        return value  # an interpolation: checked once it is resolved
    if value is None and (type(None) in members or hint is Any):
        return None
    members = [m for m in members if m is not type(None)]
    if len(members) > 1:
        for member in sorted(members, key=lambda m: m is str):  # any text would be a str
            tried: list[str] = []
            result = _convert(given, member, path, tried)
            if not tried:
                return result
        errors.append(error_line(path, given, f"must be {type_name(hint)}"))
        return None
    kind = members[0]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return _convert_group(given, kind, path, errors)
    if origin is Literal:
        return _convert_choice(given, inner, hint, path, errors)
    if origin in (list, tuple) and isinstance(value, list):
        kinds = inner if origin is tuple and inner[-1] is not ... else [inner[0]] * len(value)
        if len(kinds) != len(value):
            errors.append(error_line(path, given, f"must have {len(kinds)} elements"))
        items = [
            _convert(v, k, f"{path}[{i}]", errors)
            for i, (v, k) in enumerate(zip(value, kinds, strict=False))
        ]
        return tuple(items) if origin is tuple else items
    if origin is dict and isinstance(value, dict):
        return {k: _convert(v, inner[1], f"{path}.{k}", errors) for k, v in value.items()}
    try:
        return _convert_scalar(given, kind)
    except ValueError as e:
        need = str(e) if len(members_of(hint)) == 1 else f"{e}, or null"
        errors.append(error_line(path, given, need))
        return None


def _convert_scalar(given: LocatedValue, kind: Any) -> Any:
    """ValueError says what is required."""
    value = given.value
    if kind is bool:
        if isinstance(value, bool):
            return value
        raise ValueError("must be true or false")
    if kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        # 1e6 steps is how people write a million; beyond 2**53 a float is not exact
        if isinstance(value, float) and abs(value) < 2**53 and value.is_integer():
            return int(value)
        raise ValueError("must be a whole number")
    if kind is float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError("must be a number")
        if math.isnan(value):  # it would pass every check of a range
            raise ValueError("must be a number, not nan")
        return float(value)
    if kind is str:
        from_file = given.where != COMMAND_LINE
        if isinstance(value, list | dict) and given.text is None:
            raise ValueError("must be text")
        if value is None and (from_file or given.text):
            raise ValueError("must be text, not null")
        return given.text if given.text is not None else str(value)
    if kind in (list, dict) and isinstance(value, kind):
        return given.plain()
    if kind is Any:
        return given.plain()
    example = {list: " such as [a, b]", dict: " such as {a: 1, b: 2}"}
    raise ValueError(
        f"must be a {type_name(kind)}{example.get(typing.get_origin(kind) or kind, '')}"
    )


def _convert_choice(
    given: LocatedValue, choices: tuple[Any, ...], hint: Any, path: str, errors: list[str]
) -> Any:
    for choice in choices:
        if isinstance(choice, str):
            if choice == (given.text if given.text is not None else given.value):
                return choice
        elif type(choice) is type(given.value) and choice == given.value:
            return choice
    near = nearest(str(given.text or given.value), [str(c) for c in choices])
    errors.append(error_line(path, given, f"must be {type_name(hint)}{near}"))
    return None


def _convert_group(given: LocatedValue, cls: type, path: str, errors: list[str]) -> Any:
    """A dataclass given whole: an element of a list, or an optional group."""
    if not isinstance(given.value, dict):
        names = ", ".join(f.name for f in fields(cls))
        errors.append(error_line(path, given, f"is a group of keys ({names}), not a value"))
        return None
    keys = schema(cls)
    values = dict(spread(given.value, "", keys))
    return _fill(cls, values, keys, f"{path}.", errors, set())


# ---- messages


def place(given: LocatedValue) -> str:
    return f" ({given.where})" if given.where else ""


def error_line(path: str, given: LocatedValue, need: str) -> str:
    scalar = given.text and not isinstance(given.value, str | list | dict)
    value = given.text if scalar else show(given.plain())
    return f"{path} = {value}: {need}{place(given)}"


def _nearest_key(path: str, keys: Mapping[str, Key], prefix: str) -> str:
    """Looked for among the keys of the same group, then in other groups, then anywhere."""
    group, _, name = path.rpartition(".")
    siblings = {p.rpartition(".")[2]: p for p in keys if p.rpartition(".")[0] == group}
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    elsewhere = [p for p in keys if p.rpartition(".")[2] == name]
    anywhere = [] if siblings else difflib.get_close_matches(path, keys, n=1, cutoff=0.6)
    for found in ([siblings[c] for c in close], elsewhere, anywhere):
        if found:
            return f' (did you mean "{prefix}{found[0]}"?)'
    return f"; {prefix}{group} has the keys {', '.join(siblings)}" if group and siblings else ""


def together(errors: list[str]) -> str:
    if len(errors) == 1:
        return errors[0]
    return f"{len(errors)} mistakes in the configuration:" + "".join(f"\n  {e}" for e in errors)
