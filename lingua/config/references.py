"""References in a configuration: `${optim.lr}` stands for the value of a key, `${.lr}` for that of
one in the same group, `${oc.env:NAME}` and `${oc.env:NAME,default}` for a variable of the
environment. The form is omegaconf's, whose own parser takes minutes for some short texts."""

import os
import re
from typing import Any

from lingua.base.errors import UserError
from lingua.config.report import Report
from lingua.config.schema import Keys, leaves
from lingua.config.values import LocatedValue, Values, parse_argument, plain

_REFERENCE = re.compile(r"(?<!\\)\$\{([^${}]*)\}")
_SECRET = re.compile(r"(token|secrets?|passw(or)?d|passphrase|key|credentials?)(_|$)", re.I)


def resolve_all(
    references: Values, tree: dict[str, Any], given: Values, keys: Keys, report: Report
) -> None:
    """Add what the `references`, by path, stand for to the values that are given. `tree` is the
    configuration without them."""
    for path, value in references.items():
        *groups, name = path.split(".")
        group = tree
        for key in groups:
            if not isinstance(group.get(key), dict):  # an optional group is null
                group[key] = {}
            group = group[key]
        group[name] = plain(value)
    resolver = References(tree)
    for path, value in references.items():
        try:
            resolved = resolver.resolve(plain(value), path)
        except UserError as error:
            report.add(path, value, str(error))
            continue
        for leaf, v in leaves({path: LocatedValue.of(resolved, value.where)}, keys).items():
            given.setdefault(leaf, v)


class References:
    """Resolves the references of a nested configuration."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self._tree = tree
        self._resolved: dict[str, Any] = {}  # by path, so that a value is resolved once
        self._under_way: list[str] = []  # paths

    def resolve(self, value: Any, path: str) -> Any:
        """The value at `path` without references. Raises UserError: what is required of it."""
        if isinstance(value, dict):
            return {k: self.resolve(v, f"{path}.{k}") for k, v in value.items()}
        if isinstance(value, list):
            return [self.resolve(v, f"{path}.{i}") for i, v in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        if path in self._under_way:
            raise UserError("must not refer to itself")
        if path not in self._resolved:
            self._under_way.append(path)
            try:
                self._resolved[path] = self._substitute(value, path)
            finally:
                self._under_way.pop()
        return self._resolved[path]

    def _substitute(self, text: str, path: str) -> Any:
        whole = _REFERENCE.fullmatch(text)
        if whole is not None:
            value = self._find(whole[1], path)
        else:
            value = _REFERENCE.sub(lambda part: str(self._find(part[1], path)), text)
        if "${" in str(value):  # loading the written config would resolve it once more
            raise UserError("must not contain ${ besides the references ${KEY} and ${oc.env:NAME}")
        return value

    def _find(self, name: str, path: str) -> Any:
        """Returns the value that `${name}` stands for at `path`."""
        resolver, colon, variable = name.partition(":")
        if colon and resolver in ("oc.env", "oc.env.secret"):
            return _from_environment(variable, allowed=resolver == "oc.env.secret")
        words = re.sub(r"\[(\d+)\]", r".\1", name.lstrip(".")).split(".")
        if up := len(name) - len(name.lstrip(".")):
            words = path.split(".")[:-up] + words
        value: Any = self._tree
        try:
            for word in words:
                value = value[int(word) if isinstance(value, list) else word]
        except (LookupError, ValueError, TypeError):
            raise UserError(f'there is no key "{name}"') from None
        return self.resolve(value, ".".join(words))


def _from_environment(variable: str, allowed: bool) -> Any:
    name, comma, default = variable.partition(",")
    if _SECRET.search(name) and not allowed:
        raise UserError(
            f"{name} looks like a secret, which config.yaml and every checkpoint would contain; "
            f"${{oc.env.secret:{name}}} allows that"
        )
    if name not in os.environ and not comma:
        raise UserError(f"the environment variable {name} is not set")
    return os.environ.get(name, parse_argument(default.strip()).value)
