"""Configuration: dataclasses <- YAML (laid over its `base:`) <- `a.b=c` of the command line.

    args, notices = load(TrainArgs, ["config=run.yaml", "optim.lr=3e-4"])

Every leaf field names its resume class (`lr: Announced[float] = 1e-3  # peak learning rate`); the
comment beside it is what `--help` prints. A dataclass may check its values in `validate()`, which
yields (key in it, what is required). All mistakes found are raised together, as one UserError.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

from lingua.base.errors import nearest
from lingua.config.report import Report
from lingua.config.schema import Keys, choice_word, leaves, schema, split_optional, type_name
from lingua.config.values import (
    COMMAND_LINE,
    MISSING,
    NO_TEXT,
    LocatedValue,
    Values,
    is_text,
    parse_argument,
    plain,
    read_files,
    shorten,
)

if TYPE_CHECKING:
    from lingua.config.foreign import Foreign

C = TypeVar("C")


def load(
    cls: type[C],
    argv: list[str] | None = None,
    foreign: "Callable[[], Foreign] | None" = None,
    partial: bool = False,
    below: Values | None = None,
    defaults: C | None = None,
    program_doc: str | None = None,
    files: list[Values] | None = None,
) -> tuple[C, list[str]]:
    """The configuration, and one line for every given key that was accepted without effect.

    `argv` (default: sys.argv[1:]) holds `config=FILE` at most once, and `a.b=c`. The last value of
    a key wins; a whole list or mapping replaces the one below, default included, while
    `data.sources.a=1` sets one entry, `data.source_files.a.text_key=b` one key of it. With
    `partial`, `cls` is a part of an app's configuration: the app's other groups in the file are
    ignored. `--help` prints all keys and exits, `--help optim` those of one group. Raises
    UserError.

    foreign: gives the keys of another codebase's configs; called for a config with unknown keys.
    below: values, by path, that come before the defaults.
    defaults: in place of those of the class.
    program_doc: docstring of the program, for `--help` and for the example of an empty command.
    files: the config files that `argv` names, where the caller has read them.
    """
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        from lingua.config.help import print_help_if_asked

        print_help_if_asked(cls, argv, program_doc)
    keys = schema(cls if defaults is None else defaults)
    report = Report(program_doc="" if argv else program_doc or "")
    *files, arguments = _layers(argv, files, keys, report)
    layers = [leaves(below or {}, keys), *files]
    if partial:
        layers = [{k: v for k, v in layer.items() if k.split(".")[0] in keys} for layer in layers]
    given = _merge([*layers, arguments], foreign, keys, report)
    _resolve(cls, given, keys, report)
    args = build(cls, given, keys, report)
    report.check()
    return args, list(report.notices.values())


def meta_lingua() -> "Foreign":
    """The keys of Meta Lingua's configs."""
    from lingua.config.meta_lingua import META_LINGUA

    return META_LINGUA


def draft(
    cls: type[C],
    argv: list[str],
    foreign: "Callable[[], Foreign]",
    files: list[Values] | None = None,
) -> tuple[C, set[str]]:
    """Load with defaults in place of wrong values. Returns the configuration and the keys that are
    given. Raises UserError for a file that cannot be read."""
    keys, unused = schema(cls), Report()
    given = _merge(_layers(argv, files, keys, unused), foreign, keys, unused)
    names = set(given)
    _resolve(cls, given, keys, unused)
    return build(cls, given, keys, unused), names


def from_values(defaults: C, values: Mapping[str, Any], where: str) -> C:
    """`defaults` with plain `values` in place of some of its own. Raises UserError, which names the
    place `where` they were given."""
    keys, report = schema(defaults), Report()
    given = leaves({k: LocatedValue.of(v, where) for k, v in values.items()}, keys)
    args = build(type(defaults), given, keys, report)
    report.check()
    return args


def to_yaml(args: Any) -> str:
    """The whole configuration; loading it again gives an equal one."""
    import yaml
    from omegaconf._utils import get_omega_conf_dumper

    # As OmegaConf.to_yaml, which refuses text such as "${".
    return yaml.dump(
        plain(args),
        Dumper=get_omega_conf_dumper(),
        default_flow_style=False,
        allow_unicode=True,
        sort_keys=False,
    )


def flatten(args: Any) -> dict[str, Any]:
    """{"optim.lr": 0.001, ...}: the value of every leaf. Mappings and lists are one leaf each; a
    group that is None is a leaf of its own."""
    flat: dict[str, Any] = {}
    for f in fields(args):
        value = getattr(args, f.name)
        if is_dataclass(value):
            flat |= {f"{f.name}.{key}": v for key, v in flatten(value).items()}
        else:
            flat[f.name] = plain(value)
    return flat


def resume_classes(cls: type) -> dict[str, str | None]:
    """{"optim.lr": "announced", ...} for every key of flatten; None where a field names none."""
    return {k: key.resume for k, key in schema(cls).items() if key.group is None or key.optional}


# ---- the layers


def _layers(
    argv: list[str], files: list[Values] | None, keys: Keys, report: Report
) -> list[Values]:
    """The values of each layer: config files, the deepest first, then the command line."""
    arguments = _read_arguments(argv, keys, report)
    arguments.pop("config", None)
    files = read_files(argv) if files is None else files
    return [*(leaves(file, keys) for file in files), arguments]


def _read_arguments(argv: list[str], keys: Keys, report: Report) -> Values:
    """{key: value}, `config` among them, each where it was given last."""
    arguments: Values = {}
    for arg in argv:
        if not is_text(arg):
            report.mistakes.append(f"argument {shorten(arg)!a}: {NO_TEXT}")
            continue
        name, equals, text = arg.partition("=")
        shown = shorten(arg)
        if not equals or not name or name.startswith("-"):
            hint = f' (did you mean "config={shown}"?)' if arg.endswith((".yaml", ".yml")) else ""
            need = f"must have the form key=value or config=FILE{hint}; --help prints every key"
            report.mistakes.append(f'argument "{shown}": {need}')
            continue
        if name == "config" and "config" in arguments:
            need = "is given twice; a file may name another that it is laid over as its `base:`"
            report.mistakes.append(f'argument "{shown}": config {need}')
        for path, given in leaves({name: parse_argument(text)}, keys).items():
            arguments.pop(path, None)
            arguments[path] = given
    return arguments


def _merge(
    layers: list[Values], foreign: "Callable[[], Foreign] | None", keys: Keys, report: Report
) -> Values:
    """The values that the layers give, each laid over those before it, without foreign keys."""
    merged: Values = {}
    for layer in layers:
        for path, value in layer.items():
            _set(merged, path, value, keys)
    if foreign is not None and not merged.keys() <= keys.keys():
        from lingua.config.foreign import translate

        translate(merged, foreign(), keys, report)
    return merged


def _set(merged: Values, path: str, given: LocatedValue, keys: Keys) -> None:
    """Lay one value over what lower layers gave."""
    above = [] if path in keys else [k for k in keys if path.startswith(f"{k}.")]
    mapping = next((k for k in above if get_origin(keys[k].type) is dict), None)
    if mapping is not None:  # one entry of a mapping, over the file's mapping or the default one
        below = merged.get(mapping, keys[mapping].default).value
        entries = below if isinstance(below, dict) else {}
        entry = path.removeprefix(f"{mapping}.")
        name, _, inner = entry.rpartition(".")
        if name and is_dataclass(get_args(keys[mapping].type)[1]) and type(given.value) is not dict:
            siblings = entries[name].value if name in entries else {}  # one key of one entry
            siblings = siblings if isinstance(siblings, dict) else {}
            entry, given = name, LocatedValue({**siblings, inner: given}, given.where)
        path, given = mapping, LocatedValue({**entries, entry: given}, given.where)
    if given.value is None and path in keys and keys[path].group is not None:
        for other in [other for other in merged if other.startswith(f"{path}.")]:
            del merged[other]
    group = path.rpartition(".")[0]
    while group:  # a lower layer may have set it to null
        if group in merged and merged[group].value is None:
            del merged[group]
        group = group.rpartition(".")[0]
    merged[path] = given


def _resolve(cls: type, given: Values, keys: Keys, report: Report) -> None:
    """Replace every reference among the given values by what it stands for."""
    references = {p: v for p, v in given.items() if p in keys and "${" in str(plain(v))}
    for path in references:
        del given[path]
    if references:
        from lingua.config.references import resolve_all  # imported for a config that has some

        tree = plain(build(cls, given, keys, Report()))
        resolve_all(references, tree, given, keys, report)


# ---- from the values of leaves to dataclasses


def build(cls: Any, given: Values, keys: Keys, report: Report, prefix: str = "") -> Any:
    """The dataclass `cls`, validated. The paths of `given`, and of `keys`, begin with `prefix`."""
    if not given.keys() <= keys.keys():
        from lingua.config.help import unknown_keys

        for path, hint in unknown_keys(given, keys):
            report.add(path, LocatedValue(MISSING, given[path].where), f"unknown key{hint}")

    def member(path: str) -> Any:
        key, value = keys[path], given.get(path, keys[path].default)
        inside = any(other.startswith(f"{path}.") for other in given)
        whole = path in given and value.value != {}  # null, or a mistake
        if key.group is not None and not whole and (inside or value.value is not None):
            return group(key.group, f"{path}.")
        converted = _convert(path, value, key.type, key.optional, report)
        # Another key may refer to this one; a mistake here is no mistake there.
        return plain(key.default) if path in report.wrong else converted

    def group(cls: type, prefix: str) -> Any:
        made = cls(**{f.name: member(prefix + f.name) for f in fields(cls)})
        # The default in the place of a wrong value could only cause a second, false mistake.
        sound = not any(path.startswith(prefix) for path in report.wrong)
        chosen = not report.saved or prefix.startswith("model.")
        if chosen and sound and hasattr(made, "validate"):
            for name, need in made.validate():
                value = report.located.get(prefix + name, LocatedValue(MISSING, ""))
                report.add(prefix + name, value, need, usable=True)
        return made

    return group(cls, prefix)


# ---- one value

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_EXAMPLES = {list: ' such as [a, "*.b"]', dict: " such as {a: 1, b: 2}"}


def _convert(path: str, given: LocatedValue, kind: Any, optional: bool, report: Report) -> Any:
    """The value as its field's type wants it, or None and a mistake in the report."""
    report.located[path] = given
    value, origin, inner = given.value, get_origin(kind), get_args(kind)
    if value == MISSING:
        return report.add(path, given, "must be given")
    if value is None and optional:
        return None
    need = _WORDS.get(kind) or f"a {type_name(kind)}{_EXAMPLES.get(origin, '')}"
    if is_dataclass(kind):
        if isinstance(value, dict):
            keys = schema(kind, f"{path}.")
            return build(kind, leaves(value, keys, f"{path}."), keys, report, f"{path}.")
        need = f"a group of keys ({', '.join(f.name for f in fields(kind))})"
    elif origin is Literal:
        choices = {choice_word(choice): choice for choice in inner}
        written = choice_word(value) if type(value) is bool else given.text
        if written in choices:
            return choices[written]
        need = type_name(kind) + nearest(str(written), choices)
    elif origin is list and isinstance(value, list):
        element = split_optional(inner[0])
        return [_convert(f"{path}[{i}]", v, *element, report) for i, v in enumerate(value)]
    elif origin is dict and isinstance(value, dict):
        entry = split_optional(inner[1])
        return {k: _convert(f"{path}.{k}", v, *entry, report) for k, v in value.items()}
    elif type(value) is int and abs(value) >= 2**63:
        need += " of at most 64 bits"  # the integers of tensors and JSON
    elif kind is str and given.text is not None and is_text(given.text):
        if value is not None or (given.text == "" and given.where == COMMAND_LINE):
            return given.text
    elif kind is float and type(value) is int:
        return float(value)
    elif kind is int and type(value) is float and abs(value) < 2**53 and value.is_integer():
        return int(value)  # 1e6 steps is how people write a million; beyond 2**53 it is not exact
    elif kind is Any or (type(value) is kind and value == value):  # nan would pass every check
        return plain(given)
    return report.add(path, given, f"must be {need}{', or null' if optional else ''}")
