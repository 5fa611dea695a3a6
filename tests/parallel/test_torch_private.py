"""Private interfaces of torch, which may change in any release, are named in two files."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
FILES = [ROOT / f"lingua/{folder}/torch_private.py" for folder in ("parallel", "tools")]
SOURCES = [path for folder in ("lingua", "apps") for path in sorted((ROOT / folder).rglob("*.py"))]
# Private names of other packages, and of Python, which calls these private itself.
OTHERS = {"_exit", "_replace", "_inheriting", "_mergeable_ranks", "_current_frames"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def own_names(tree: ast.AST) -> set[str]:
    """Names that a file defines: functions, classes, variables and attributes of `self`."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
    stored = (n for n in ast.walk(tree) if isinstance(getattr(n, "ctx", None), ast.Store))
    return defined | {getattr(n, "attr", getattr(n, "id", "")) for n in stored}


def private_names(source: str) -> Iterator[str]:
    """Each private name of elsewhere that a file uses: imported, as an attribute or by getattr."""
    tree = ast.parse(source)
    known = own_names(tree) | OTHERS
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            module = getattr(node, "module", None)
            names = [f"{module}.{a.name}" if module else a.name for a in node.names]
            yield from (name for name in names if re.match(r"torch\.(\w+\.)*_\w", name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in known:
            yield ast.unparse(node)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr"):
            name = ast.literal_eval(a) if isinstance(a := node.args[1], ast.Constant) else ""
            if is_private(name) and name not in known:
                yield name
        elif isinstance(node, ast.Constant) and re.match(r"torch\.(\w+\.)*_\w", str(node.value)):
            yield str(node.value)


def test_private_interfaces_of_torch_are_named_in_two_files():
    found = {path: list(private_names(path.read_text())) for path in SOURCES if path not in FILES}
    assert not {str(path.relative_to(ROOT)): names for path, names in found.items() if names}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_the_files_have_no_name_that_nothing_uses(file):
    others = "\n".join(path.read_text() for path in SOURCES if path != file)
    names = own_names(ast.parse(file.read_text())) - {"_should_skip_dynamo"}  # torch calls it
    assert not [name for name in sorted(names) if not re.search(rf"\b{name}\b", others)]
