"""Keys of another codebase's configs, imported for a config that has keys unknown here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lingua.config.report import Report
from lingua.config.schema import Keys
from lingua.config.values import LocatedValue, Values, plain, show


@dataclass(frozen=True)
class Foreign:
    """Keys of another codebase's configs that are no keys here. A key of ours that is given, in any
    layer, comes first."""

    # key or group -> why it has no effect here: accepted with one line
    ignored: Mapping[str, str] = field(default_factory=dict)
    # key -> key of ours that must have the same value
    same_as: Mapping[str, str] = field(default_factory=dict)
    # key -> key of ours that it is another name of
    alias_of: Mapping[str, str] = field(default_factory=dict)
    # key -> {allowed value: {our key: value}}
    translated: Mapping[str, Mapping[Any, Mapping[str, Any]]] = field(default_factory=dict)


def translate(merged: Values, foreign: Foreign, keys: Keys, report: Report) -> None:
    """Replace the foreign keys of a configuration by what they mean here, in place."""
    for path, value in list(merged.items()):
        ignored = next((k for k in foreign.ignored if f"{path}.".startswith(f"{k}.")), None)
        others = (foreign.same_as, foreign.alias_of, foreign.translated)
        if path in keys or not (ignored or any(path in table for table in others)):
            continue
        del merged[path]
        if ignored is not None:
            line = f"{ignored} has no effect here: {foreign.ignored[ignored]} ({value.where})"
            report.notices.setdefault(ignored, line)
        elif path in foreign.same_as:
            ours = foreign.same_as[path]
            expected = merged.get(ours, keys[ours].default) if ours in keys else value
            if plain(value) != plain(expected):
                need = f"must equal {ours} = {show(expected)}, or be left out"
                report.add(path, value, need, usable=True)
        elif path in foreign.alias_of:
            ours = foreign.alias_of[path]
            if plain(merged.get(ours)) is None:  # as if it were left out
                merged[ours] = value
            elif value.value is not None and plain(value) != plain(merged[ours]):
                need = f"is another name of {ours} = {show(merged[ours])}; must be left out"
                report.add(path, value, need, usable=True)
        else:
            allowed = {show(v): meaning for v, meaning in foreign.translated[path].items()}
            if show(value) not in allowed:
                report.add(path, value, f"must be {' or '.join(allowed)}")
            for ours, v in allowed.get(show(value), {}).items():
                merged.setdefault(ours, LocatedValue.of(v, value.where))
