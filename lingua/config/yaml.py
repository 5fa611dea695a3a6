"""YAML files and `key=value` arguments, read into values that remember where they were written."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from lingua.config.values import COMMAND_LINE, MISSING, LocatedValue, Values, show
from lingua.errors import UserError, nearest


def parse_argument(text: str) -> LocatedValue:
    """The value of `key=TEXT`. What is not valid YAML is text; only a string field takes it."""
    try:
        given = _parse(text, COMMAND_LINE)
    except (yaml.YAMLError, UserError):
        return LocatedValue(text, COMMAND_LINE, text)
    quoted = text[:1] in ("'", '"') and isinstance(given.value, str)
    return given if quoted else replace(given, text=text)


def read_layers(path: Path, named_by: str, above: tuple[Path, ...] = ()) -> list[Values]:
    """A config file and the files below it, the deepest `base:` first. `named_by` begins the
    message about a file that cannot be read; `above` are the files that led to this one."""
    layer = read_file(path, named_by)
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
    return [*read_layers(below, f"{base.where}: base = {show(str(below))}", above), layer]


def read_file(path: Path, named_by: str) -> Values:
    """The mapping that a file holds."""
    try:
        layer = _parse(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as e:
        raise UserError(f"{named_by}: is not UTF-8 text (byte {e.start})") from None
    except OSError as e:
        beside = path.parent.glob("*.y*ml") if path.parent.is_dir() and not path.exists() else []
        hint = nearest(path.name, [p.name for p in beside])
        raise UserError(f"{named_by}: cannot be read: {e.strerror or e}{hint}") from None
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None) or getattr(e, "context_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        reason = getattr(e, "problem", None) or str(e).splitlines()[0]
        raise UserError(f"{path}{line}: is not valid YAML: {reason}") from None
    if not isinstance(layer.value, dict | None):
        raise UserError(f"{path}: must hold lines `key: value`, not {show(layer)}")
    return layer.value or {}


def _parse(text: str, name: str) -> LocatedValue:
    """One YAML document; `name` is the path of its file, or COMMAND_LINE."""
    loader = _Loader(text)
    loader.name = name  # which its marks have
    return loader.get_single_data() or LocatedValue(None, name, "")


class _Loader(yaml.BaseLoader):
    """Makes a LocatedValue of every node."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> LocatedValue:
        mark = node.start_mark
        where = mark.name if mark.name == COMMAND_LINE else f"{mark.name}:{mark.line + 1}"
        # To YAML, the bare !!!CHANGE_THIS!!! that Meta Lingua leaves for the user is a tag.
        if "CHANGE_THIS" in node.tag or node.value == "!!!CHANGE_THIS!!!":
            return LocatedValue(MISSING, where, MISSING)
        if node.tag.removeprefix("tag:yaml.org,2002:") not in ("str", "seq", "map"):
            raise UserError(f"{where}: the YAML tag {node.tag} is not supported")
        value = super().construct_object(node, deep=True)
        if isinstance(node, yaml.ScalarNode):  # whose style is its quotes
            return LocatedValue(value if node.style else _scalar(value), where, value)
        return LocatedValue(value, where)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Values:
        """Its own entries, each at the line of its key, over those that `<<:` merges."""
        own: Values = {}
        merged: Values = {}
        for key, child in node.value:
            where, name = self.construct_object(key).where, key.value
            given = self.construct_object(child)
            if not isinstance(key, yaml.ScalarNode):
                raise UserError(f"{where}: a key must be a word")
            if name in own:
                raise UserError(f'{where}: key "{name}" is given twice; first at {own[name].where}')
            if name != "<<":
                own[name] = replace(given, where=where)
                continue
            for source in given.value if isinstance(given.value, list) else [given]:
                if not isinstance(source.value, dict):
                    raise UserError(f"{where}: <<: must name a mapping or a list of mappings")
                merged = source.value | merged
        return merged | own


_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_WORDS |= {"null": None, "~": None, "": None}
_INT = re.compile(r"[-+]?(0x[0-9a-f]+|[0-9]+(_[0-9]+)*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(e[-+]?[0-9]+)?|[-+]?\.(inf|nan)")


def _scalar(text: str) -> Any:
    """A scalar without quotes. Other than in YAML 1.1, `3e-4` is a number, `010` is ten, and `1:30`
    and dates are text."""
    lower = text.lower()
    if lower in _WORDS:
        return _WORDS[lower]
    if _INT.fullmatch(lower):
        return int(lower, 16 if "x" in lower else 10)
    if _FLOAT.fullmatch(lower):
        return float(re.sub(r"_|\.(?=[in])", "", lower))  # Python has inf and nan without the point
    return text
