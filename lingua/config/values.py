"""The values that a user gives in YAML files and as `key=value`. Each remembers where and how it
was written, so that every later mistake can name its line."""

import errno
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lingua.base.errors import UserError, nearest

MISSING = "???"  # stands for a value that must be given; the same text as omegaconf.MISSING
COMMAND_LINE = "command line"
MAX_LEVELS = 50  # nested lists and mappings; an alias inside of itself would have any number
_QUOTE = re.compile(r"""(?s)(["']).*\1|, not .*""")
TOO_DEEP = f"has more than {MAX_LEVELS} levels, aliases included"
NO_TEXT = "must be text of UTF-8 without NUL"


class LocatedValue(NamedTuple):
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
    return shorten(json.dumps(plain(value), ensure_ascii=False, default=str))


def shorten(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def is_text(text: str) -> bool:
    """Whether files, and names of files, can have it."""
    return not re.search("[\\0\\ud800-\\udfff]", text)


# ---- arguments and files


def parse_argument(text: str) -> LocatedValue:
    """The value of `key=TEXT`. What is not valid YAML is text; only a string field takes it."""
    try:
        given = _parse(text, COMMAND_LINE)
    except (yaml.YAMLError, UserError):
        return LocatedValue(text, COMMAND_LINE, text)
    quoted = text[:1] in ("'", '"') and isinstance(given.value, str)
    return given if quoted else given._replace(text=text)


def read_files(argv: Sequence[str]) -> list[Values]:
    """The config files that a command line names, the deepest `base:` first. A file that it names
    without `config=`, a mistake that `load` reports, is read too: what it sets is then not reported
    as missing. Raises UserError."""
    argv = [word for word in argv if is_text(word)]
    named = [word for word in argv if word.startswith("config=")]
    bare = [word for word in argv if word.endswith((".yaml", ".yml")) and "=" not in word]
    if bare and not named:
        meant = f'argument "{bare[0]}" (did you mean "config={bare[0]}"?)'
        return read_layers(Path(bare[0]), meant)
    path = str(parse_argument(named[-1].removeprefix("config=")).text) if named else ""
    return read_layers(Path(path), f"config={path}") if named else []


def read_layers(path: Path, named_by: str, above: tuple[Path, ...] = ()) -> list[Values]:
    """A config file and the files below it, the deepest `base:` first. `named_by` begins the
    message about a file that cannot be read; `above` are the files that led to this one."""
    layer = read_file(path, named_by, own=not above)
    base = layer.pop("base", None)
    if base is None:
        return [layer]
    if not isinstance(base.value, str) or base.value in ("", MISSING):
        need = "must be the path of a YAML file, from the folder of the file that names it"
        raise UserError(f"{base.where}: base = {show(base)}: {need}")
    below, above = path.parent / base.value, (*above, path)
    if below.resolve() in [file.resolve() for file in above]:
        circle = " -> ".join(str(file) for file in (*above, below))
        raise UserError(f"{base.where}: base = {base.value}: the files form a circle: {circle}")
    named_by = f"{base.where}: base = {show(base)} (relative to this file: {below})"
    if os.path.isfile(base.value) and not below.exists():
        meant = os.path.relpath(base.value, path.parent)
        raise UserError(f'{named_by}: does not exist (did you mean "{meant}"?)')
    return [*read_layers(below, named_by, above), layer]


def read_file(path: Path, named_by: str, content: bytes | None = None, own: bool = False) -> Values:
    """The mapping that a file holds, whose `content` may be known, read as data: `${...}` stays
    text, `base` is a key. For `own` see parse_mapping."""
    try:
        if content is None and not stat.S_ISREG(path.stat().st_mode):  # it may never end
            raise UserError(f"{named_by}: must be a file")
        text = (path.read_bytes() if content is None else content).decode()
    except UnicodeDecodeError as e:
        raise UserError(f"{named_by}: is not UTF-8 text (byte {e.start})") from None
    except OSError as e:
        beside = path.parent.glob("*.y*ml") if e.errno == errno.ENOENT else []
        hint = nearest(path.name, [p.name for p in beside])
        raise UserError(f"{named_by}: cannot be read: {e.strerror or e}{hint}") from None
    return parse_mapping(text, str(path), own)


def parse_mapping(text: str, name: str, own: bool = False) -> Values:
    """The mapping that the text of a file holds. `name` stands for the file in messages, which do
    not quote it unless it is the user's `own`: a config of others may name a private file."""
    try:
        layer = _parse(text, name)
        if not isinstance(layer.value, dict | None):
            raise UserError(f"{name}: must hold lines `key: value`, not {show(layer)}")
        for key, value in (layer.value or {}).items():
            if not (own or re.fullmatch(r"\w[\w-]*(\..*)?", key)):
                raise UserError(f"{value.where}: is no key of a config")
        return layer.value or {}
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None) or getattr(e, "context_mark", None)
        reason = getattr(e, "problem", None) or str(e).splitlines()[0]
        line = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        error = f"{line}: is not valid YAML: {reason}"
    except UserError as e:
        error = str(e).removeprefix(name)
    raise UserError(name + (error if own else _QUOTE.sub("...", error)))


def _parse(text: str, name: str) -> LocatedValue:
    """One YAML document; `name` is the path of its file, or COMMAND_LINE."""
    try:
        node = _compose(text)
    except RecursionError:
        raise UserError(f"{name}: {TOO_DEEP}") from None
    return LocatedValue(None, name, "") if node is None else _located(node, name)


def _compose(text: str) -> Any:
    """A document's node. By libyaml, ten times as fast as PyYAML itself, which is asked about what
    is wrong, and about levels so many that libyaml would end the process."""
    if sum(map(text.count, "[{-?")) < 1000:
        with suppress(yaml.YAMLError, AttributeError):  # PyYAML may have been built without it
            return yaml.compose(text, Loader=yaml.CBaseLoader)
    return yaml.compose(text, Loader=yaml.BaseLoader)


def _located(node: yaml.Node, name: str, level: int = 0, key_at: str = "") -> LocatedValue:
    """A value of a document. key_at: the line of its key, where it is that of one."""
    line = name if name == COMMAND_LINE else f"{name}:{node.start_mark.line + 1}"
    where = key_at or line
    if level > MAX_LEVELS:
        raise UserError(f"{line}: {TOO_DEEP}")
    # To YAML, the bare !!!CHANGE_THIS!!! that Meta Lingua leaves for the user is a tag.
    if "CHANGE_THIS" in node.tag or node.value == "!!!CHANGE_THIS!!!":
        return LocatedValue(MISSING, where, MISSING)
    if node.tag.removeprefix("tag:yaml.org,2002:") not in ("str", "seq", "map"):
        raise UserError(f'{line}: the YAML tag "{node.tag}" is not supported')
    if isinstance(node, yaml.ScalarNode):  # its style is its quotes
        if not is_text(node.value):
            raise UserError(f"{line}: {shorten(node.value)!a}: {NO_TEXT}")
        return LocatedValue(node.value if node.style else scalar(node.value), where, node.value)
    if isinstance(node, yaml.SequenceNode):
        return LocatedValue([_located(n, name, level + 1) for n in node.value], where)
    entries: Values = {}
    for key_node, child in node.value:
        at, key = _located(key_node, name, level + 1).where, key_node.value
        if not isinstance(key_node, yaml.ScalarNode):
            raise UserError(f"{at}: a key must be a word")
        if key in entries:
            raise UserError(f'{at}: key "{key}" is given twice; first at {entries[key].where}')
        entries[key] = _located(child, name, level + 1, at)
    return LocatedValue(entries, where)


_WORDS: dict[str, bool | None] = {"true": True, "yes": True, "on": True}
_WORDS |= {"false": False, "no": False, "off": False, "null": None, "~": None, "": None}
_INT = re.compile(r"[-+]?(0x[0-9a-f]+|[0-9]+(_[0-9]+)*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(e[-+]?[0-9]+)?|[-+]?\.(inf|nan)")


@lru_cache(maxsize=10_000)  # configs of runs have most values in common
def scalar(text: str) -> Any:
    """A scalar without quotes. Other than in YAML 1.1, `3e-4` is a number, `010` is ten, and `1:30`
    and dates are text."""
    lower = text.lower()
    if lower in _WORDS:
        return _WORDS[lower]
    if len(lower) > 40:  # no number is as long, and matching takes the square of the length
        return text
    if _INT.fullmatch(lower):
        number = int(lower, 16 if "x" in lower else 10)
        if -(2**63) <= number < 2**63:  # the integers of tensors and JSON; others become floats
            return number
    if _FLOAT.fullmatch(lower):
        return float(re.sub(r"_|\.(?=[in])", "", lower))  # Python has inf and nan without the point
    return text
