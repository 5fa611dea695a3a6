"""Configuration: dataclasses <- YAML (laid over its `base:`) <- `a.b=c` of the command line.

    args, notices = load(TrainArgs, ["config=run.yaml", "optim.lr=3e-4"])

Every leaf field names its resume class (`lr: Announced[float] = 1e-3  # peak learning rate`); the
comment beside it is what `--help` prints. A dataclass may check its values in `validate()`, which
yields (key in it, what is required). All mistakes found are raised together, as one UserError.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from omegaconf import MISSING, OmegaConf

from lingua.config.build import build, error_line, place, together
from lingua.config.schema import Announced, Free, Guarded, Key, is_mapping, schema, spread
from lingua.config.yaml import COMMAND_LINE, LocatedValue, parse_argument, read_files, show
from lingua.errors import UserError

__all__ = [
    "Announced",
    "Foreign",
    "Free",
    "Guarded",
    "flatten",
    "load",
    "resume_classes",
    "to_yaml",
]

C = TypeVar("C")


@dataclass(frozen=True)
class Foreign:
    """Keys of another codebase's configs that are no keys here. A key of ours comes first."""

    # key or group -> why it has no effect here: accepted with one line
    ignored: Mapping[str, str] = field(default_factory=dict)
    # key -> the values that ask for nothing we lack: accepted silently, others refused
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # key -> key of ours that must have the same value
    same_as: Mapping[str, str] = field(default_factory=dict)
    # key -> function(value, values given so far by lower layers) -> {our key: value}. What the same
    # layer says about our key itself wins. A ValueError is reported as what is required of the key.
    translated: Mapping[str, Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]] = field(
        default_factory=dict
    )


def load(
    cls: type[C],
    argv: list[str] | None = None,
    foreign: Foreign | None = None,
    partial: bool = False,
) -> tuple[C, list[str]]:
    """The configuration, and one line for every given key that was accepted without effect.

    `argv` (default: sys.argv[1:]) holds `config=FILE` at most once, and `a.b=c`. The last word on a
    key wins; a whole list or mapping replaces the one below, default included, while
    `data.sources.a=1` sets one entry. With `partial`, `cls` is a part of an app's configuration:
    what the file says of the app's other groups is left out. `--help` prints all keys and exits.
    Raises UserError.
    """
    argv = sys.argv[1:] if argv is None else argv
    if any(arg in ("-h", "--help") for arg in argv):
        from lingua.config.help import help_text

        print(help_text(cls))
        raise SystemExit(0)
    foreign = foreign or Foreign()
    keys = schema(cls)
    errors: list[str] = []
    config, overrides = _read_command_line(argv, keys, errors)
    try:
        layers = read_files(config) if config is not None else []
    except UserError as e:
        raise UserError(together([str(e), *errors])) from None
    merged: dict[str, LocatedValue] = {}
    defaults = OmegaConf.structured(cls)
    notices: list[str] = []
    for layer in [dict(spread(given.value, "", keys)) for given in layers] + [overrides]:
        _translate(layer, merged, foreign, keys, errors)
        for key, given in layer.items():
            _set(merged, key, given, keys, defaults)
    if partial:
        merged = {k: v for k, v in merged.items() if _top(k) in keys or v.where == COMMAND_LINE}
    _drop_foreign(merged, foreign, keys, defaults, errors, notices)
    args = build(cls, merged, keys, errors)
    if errors:
        raise UserError(together(errors))
    return args, notices


def to_yaml(args: Any) -> str:
    """The whole configuration; loading it again gives an equal one."""
    return OmegaConf.to_yaml(OmegaConf.structured(args))


def flatten(args: Any) -> dict[str, Any]:
    """{"optim.lr": 0.001, ...}: the value of every leaf. Mappings and lists are one leaf each; a
    group that is None is a leaf of its own."""
    flat: dict[str, Any] = {}
    for f in fields(args):
        value = getattr(args, f.name)
        if is_dataclass(value):
            flat.update({f"{f.name}.{key}": v for key, v in flatten(value).items()})
        else:
            flat[f.name] = _plain(value)
    return flat


def resume_classes(cls: type) -> dict[str, str | None]:
    """{"optim.lr": "announced", ...} for every key that flatten can give, None where the field
    names no class (a mistake of ours: a test of the app looks for it)."""
    return {
        path: key.resume for path, key in schema(cls).items() if key.group is None or key.optional
    }


# ---- the layers


def _read_command_line(
    argv: list[str], keys: Mapping[str, Key], errors: list[str]
) -> tuple[str | None, dict[str, LocatedValue]]:
    """(path of the config file, {key: value}). The path is None without `config=`."""
    configs: list[str] = []
    overrides: dict[str, LocatedValue] = {}
    for arg in argv:
        name, equals, text = arg.partition("=")
        if not equals or not name or name.startswith("-"):
            hint = ""
            if name.startswith("-") and equals:
                hint = f' (did you mean "{arg.lstrip("-")}"?)'
            elif arg.endswith((".yaml", ".yml")):
                hint = f' (did you mean "config={arg}"?)'
            errors.append(
                f'argument "{arg}": must have the form key=value or config=FILE{hint}; '
                "--help prints every key"
            )
        elif name == "config":
            configs.append(text)
        else:
            given = parse_argument(text)
            for key, value in spread({name: given}, "", keys):
                overrides.pop(key, None)  # so that a key given again also comes later in order
                overrides[key] = value
    if len(configs) > 1:
        errors.append(
            f"config is given {len(configs)} times ({', '.join(configs)}): must be given once; "
            "a file may name another that it is laid over as its `base:`"
        )
    return (configs[0] if configs else None), overrides


def _set(
    merged: dict[str, LocatedValue],
    path: str,
    given: LocatedValue,
    keys: Mapping[str, Key],
    defaults: Any,
) -> None:
    """Lay one value over what lower layers gave."""
    mapping = _mapping_of(path, keys)
    if mapping is not None:  # one entry of a mapping, over the file's mapping or the default one
        entry = path[len(mapping) + 1 :]
        below = merged.get(mapping) or LocatedValue.of(_default(defaults, mapping), "")
        entries = below.value if isinstance(below.value, dict) else {}
        path, given = mapping, LocatedValue({**entries, entry: given}, given.where)
    for other, value in list(merged.items()):
        # The later word wins between a group set to null and a key in it.
        if (given.value is None and other.startswith(path + ".")) or (
            value.value is None and path.startswith(other + ".") and other in keys
        ):
            del merged[other]
    merged.pop(path, None)
    merged[path] = given


def _mapping_of(path: str, keys: Mapping[str, Key]) -> str | None:
    """The mapping-typed leaf that `path` is an entry of: data.sources for data.sources.wiki."""
    if path in keys:
        return None
    parts = path.split(".")
    above = (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))
    return next((p for p in above if p in keys and is_mapping(keys[p].type)), None)


def _top(path: str) -> str:
    return path.partition(".")[0]


def _default(defaults: Any, path: str) -> Any:
    value = OmegaConf.select(defaults, path, throw_on_missing=False)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _translate(
    layer: dict[str, LocatedValue],
    below: Mapping[str, LocatedValue],
    foreign: Foreign,
    keys: Mapping[str, Key],
    errors: list[str],
) -> None:
    """Replace the foreign keys of one layer that have another name or form here."""
    lower = {key: given.plain() for key, given in below.items()}
    for path in [p for p in layer if p in foreign.translated and p not in keys]:
        given = layer.pop(path)
        if given.value == MISSING:
            continue
        try:
            ours = foreign.translated[path](given.plain(), lower)
        except ValueError as e:
            errors.append(error_line(path, given, str(e)))
            continue
        for key, value in ours.items():
            layer.setdefault(key, LocatedValue.of(value, given.where))


def _drop_foreign(
    merged: dict[str, LocatedValue],
    foreign: Foreign,
    keys: Mapping[str, Key],
    defaults: Any,
    errors: list[str],
    notices: list[str],
) -> None:
    """Take out the foreign keys that have no effect here, and refuse those that should have one."""
    told = set()
    for path in [p for p in merged if p not in keys]:
        given = merged[path]
        group = next((k for k in foreign.ignored if f"{path}.".startswith(f"{k}.")), None)
        if group is not None:
            if group not in told:
                notices.append(
                    f"{group} has no effect here: {foreign.ignored[group]}{place(given)}"
                )
            told.add(group)
        elif path in foreign.only:
            if given.plain() not in foreign.only[path]:
                allowed = " or ".join(show(v) for v in foreign.only[path])
                errors.append(error_line(path, given, f"is not supported, only {allowed}"))
        elif path in foreign.same_as:
            ours = foreign.same_as[path]
            value = merged[ours].plain() if ours in merged else _default(defaults, ours)
            if given.plain() != value:
                need = f"must equal {ours} = {show(value)}, or be left out"
                errors.append(error_line(path, given, need))
        else:
            continue
        del merged[path]


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return asdict(value)
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value
