"""YAML files and `key=value` arguments, read into `LocatedValue`: values that remember where and
how they were written, so that every later mistake can name its line."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING

from lingua.errors import UserError, nearest

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class LocatedValue:
    """One value as the user wrote it. Lists and mappings hold LocatedValue again."""

    value: Any  # None, bool, int, float, str, list[LocatedValue] or dict[str, LocatedValue]
    where: str  # "configs/debug.yaml:12" or "command line"; empty for a default
    text: str | None = None  # how it was written, so that `name: 1e3` can stay a string

    @staticmethod
    def of(value: Any, where: str) -> "LocatedValue":
        """A plain value, nested or not, as if it had been written at `where`."""
        if isinstance(value, Mapping):
            return LocatedValue(
                {str(k): LocatedValue.of(v, where) for k, v in value.items()}, where
            )
        if isinstance(value, list | tuple):
            return LocatedValue([LocatedValue.of(v, where) for v in value], where)
        return LocatedValue(value, where)

    def plain(self) -> Any:
        if isinstance(self.value, dict):
            return {k: v.plain() for k, v in self.value.items()}
        return [v.plain() for v in self.value] if isinstance(self.value, list) else self.value


def show(value: Any) -> str:
    """A value as it stands in an error message: like YAML, on one line, not too long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def parse_argument(text: str) -> LocatedValue:
    """The value of `key=TEXT`. Text that is no YAML is text; only a string field will take it."""
    try:
        given = _Reader(text, None).read()
    except (yaml.YAMLError, UserError):
        return LocatedValue(text, COMMAND_LINE, text)
    quoted = text[:1] in ("'", '"') and isinstance(given.value, str)
    return given if quoted else LocatedValue(given.value, COMMAND_LINE, text)


def read_files(path: str) -> list[LocatedValue]:
    """The layers of a config file: a mapping each, its deepest `base:` first."""
    return _read_files(Path(path), [], "")


def _read_files(path: Path, chain: list[Path], named_by: str) -> list[LocatedValue]:
    asked = f"{named_by}: base = {show(str(path))}" if named_by else f"config={path}"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise UserError(f"{asked}: is not UTF-8 text (byte {e.start})") from None
    except OSError as e:
        beside = path.parent.glob("*.y*ml") if path.parent.is_dir() and not path.exists() else []
        hint = nearest(path.name, [p.name for p in beside])
        raise UserError(f"{asked}: cannot be read: {e.strerror or e}{hint}") from None
    layer = _parse_file(text, str(path))
    base = layer.value.pop("base", None)
    if base is None:
        return [layer]
    if not isinstance(base.value, str) or base.value in ("", MISSING):
        raise UserError(
            f"{base.where}: base = {show(base.plain())}: must be the path of a YAML file, "
            "from the folder of the file that names it"
        )
    chain = [*chain, path]
    below = path.parent / base.value
    if below.resolve() in [p.resolve() for p in chain]:
        circle = " -> ".join(str(p) for p in [*chain, below])
        raise UserError(f"{base.where}: base = {base.value}: the files lead in a circle: {circle}")
    return [*_read_files(below, chain, base.where), layer]


def _parse_file(text: str, path: str) -> LocatedValue:
    try:
        layer = _Reader(text, path).read()
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        line = f":{mark.line + 1}" if mark else ""
        reason = ", ".join(part for part in (e.context, e.problem) if part)
        raise UserError(f"{path}{line}: is not valid YAML: {reason}") from None
    except yaml.YAMLError as e:
        raise UserError(f"{path}: is not valid YAML: {str(e).splitlines()[0]}") from None
    if layer.value is None:
        return LocatedValue({}, path)
    if not isinstance(layer.value, dict):
        raise UserError(f"{path}: must hold lines `key: value`, not {show(layer.plain())}")
    return layer


_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_WORDS |= {"null": None, "~": None, "": None}
_INT = re.compile(r"[-+]?(0x[0-9a-fA-F]+|[0-9]+(_[0-9]+)*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def _scalar(text: str) -> Any:
    """A plain scalar. Other than in YAML 1.1, `3e-4` is a number, `010` is ten, and `1:30` and
    dates are text."""
    if text.lower() in _WORDS and text in (text.lower(), text.capitalize(), text.upper()):
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text, 16 if "x" in text else 10)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


class _Reader:
    """One YAML document turned into LocatedValue. `path` is None for a command-line argument."""

    def __init__(self, text: str, path: str | None) -> None:
        self.text, self.path = text, path
        self.flat: set[int] = set()  # ids of the mapping nodes whose `<<:` is resolved

    def read(self) -> LocatedValue:
        self.loader = yaml.SafeLoader(self.text)
        node = self.loader.get_single_node()
        if node is None:
            return LocatedValue(None, self.path or COMMAND_LINE, "")
        return self.given(node, ())

    def where(self, node: yaml.Node) -> str:
        return f"{self.path}:{node.start_mark.line + 1}" if self.path else COMMAND_LINE

    def given(self, node: yaml.Node, above: tuple[int, ...]) -> LocatedValue:
        where = self.where(node)
        if id(node) in above:
            raise UserError(f"{where}: an anchor contains itself")
        above = (*above, id(node))
        if isinstance(node, yaml.SequenceNode):
            return LocatedValue([self.given(child, above) for child in node.value], where)
        if isinstance(node, yaml.MappingNode):
            return LocatedValue(self.entries(node, above), where)
        # To YAML, the bare !!!CHANGE_THIS!!! that Meta Lingua leaves for the user is a tag.
        if "CHANGE_THIS" in node.tag or "!!!CHANGE_THIS!!!" in node.value:
            return LocatedValue(MISSING, where, MISSING)
        if not node.tag.startswith("tag:yaml.org,2002:") or "/" in node.tag:
            raise UserError(f"{where}: the YAML tag {node.tag} is not supported")
        plain = node.style is None
        return LocatedValue(_scalar(node.value) if plain else node.value, where, node.value)

    def entries(self, node: yaml.MappingNode, above: tuple[int, ...]) -> dict[str, LocatedValue]:
        if id(node) not in self.flat:
            self.flat.add(id(node))
            first: dict[str, int] = {}
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise UserError(f"{self.where(key)}: a key must be a word")
                if key.value in first:
                    raise UserError(
                        f'{self.where(key)}: key "{key.value}" is given twice; '
                        f"it already stands in line {first[key.value]}"
                    )
                first[key.value] = key.start_mark.line + 1
            self.loader.flatten_mapping(node)
        entries = {}
        for key, child in node.value:
            given = self.given(child, above)
            entries[key.value] = LocatedValue(given.value, self.where(key), given.text)
        return entries
