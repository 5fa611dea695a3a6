"""What the source must not contain, found by reading it."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from lingua.base import dump_dir

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
FILES = [f for folder in ("lingua", "apps", "setup") for f in (ROOT / folder).rglob("*.py")]


# Packages of the floor, each of which imports only those before it.
ORDER = ["base", "config", "app", "tokenizer", "parallel", "data", "model", "optim"]
ORDER += ["checkpoint", "monitor"]


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules that importing a source imports, those of TYPE_CHECKING left out."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                pass
            case ast.If(test=test) if "TYPE_CHECKING" in ast.dump(test):
                pass
            case _:
                yield from imported(node)


def test_imports_go_one_way():
    """The floor, what a run is trusted by, does without the shelf, lingua/tools."""
    for file in (ROOT / "lingua").rglob("*.py"):
        place = file.relative_to(ROOT).with_suffix("").parts[1]
        assert not re.search(r"^\s*(from|import) apps\b", file.read_text(), re.M), file
        if place in ("tools", "stool", "__main__"):  # the last two are doors of the shelf
            continue
        for name in imported(ast.parse(file.read_text())):
            package, target, *_ = [*name.split("."), ""]
            assert target != "tools", f"{file} imports {name}"
            if package == "lingua" and place in ORDER and target in ORDER:
                assert ORDER.index(target) <= ORDER.index(place), f"{file} imports {name}"


def required() -> set[str]:
    """The packages that pyproject.toml requires, by the names that they are imported by."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=]", line)[0].lower() for line in project["dependencies"]}
    assert {"torch", "pyyaml"} <= names
    return {
        package
        for package, distributions in packages_distributions().items()
        if names & {name.lower() for name in distributions}
    }


def test_importing_a_module_imports_only_what_is_required():
    """Not a package that only some machines have, as CUDA's, or that only some commands need."""
    ours = {"lingua", "apps", "setup", "hub"}  # the last is setup/hub.py, beside the scripts
    allowed = sys.stdlib_module_names | required() | ours
    for file in FILES:
        found = {name.partition(".")[0] for name in imported(ast.parse(file.read_text()))}
        assert found <= allowed, f"{file} imports {found - allowed} outside of a function"


def test_an_import_at_the_top_of_any_block_is_found():
    source = """
try:
    import triton
except ImportError:
    pass
class A:
    from flash_attn.layers import rotary
def f():
    import wandb
"""
    assert set(imported(ast.parse(source))) == {"triton", "flash_attn.layers.rotary"}


def through_a_shell(tree: ast.AST) -> Iterator[str]:
    """The calls that give a text to a shell, or could."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if re.fullmatch(r"(os\.(system|popen)|subprocess\.get(status)?output)", called):
                yield called
            elif any(keyword.arg == "shell" for keyword in node.keywords):
                yield f"{called}(shell=)"
        elif isinstance(node, ast.List | ast.Tuple) and node.elts:
            first = ast.unparse(node.elts[0]).strip("'")
            if first.rpartition("/")[2] in ("bash", "sh"):
                yield f"[{first}]"


def test_commands_are_lists_of_words_that_no_shell_reads():
    found = {
        (str(file.relative_to(ROOT)), call)
        for file in FILES
        for call in through_a_shell(ast.parse(file.read_text()))
    }
    # It reads the lines of `setup`, which are the user's; what is run comes as its arguments.
    assert found == {("lingua/tools/slurm/launch.py", "[bash]")}


def test_the_names_of_files_in_a_dump_dir_are_written_in_one_place():
    values = [value for name, value in vars(dump_dir).items() if name.isupper()]
    names = {value for value in values if isinstance(value, str) and "." in value}
    assert {"config.yaml", "metrics.jsonl", "run.lock", "code.diff"} <= names
    written = {
        (str(file.relative_to(ROOT)), node.value)
        for file in FILES
        if not file.is_relative_to(ROOT / "apps/bench")  # which reads runs as a stranger would
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    }
    others = {  # of other kinds of folders
        ("lingua/data/shards.py", "manifest.json"),
        ("lingua/data/token_formats.py", ".metadata"),
    }
    assert written - others <= {("lingua/base/dump_dir.py", name) for name in names}
