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
FLOOR = ["base", "config", "app", "tokenizer", "parallel", "data", "model", "optim"]
FLOOR += ["checkpoint", "monitor", "run"]
DOORS = ["lingua", "lingua.__main__", "lingua.stool"]  # from which both parts are reached
# What the floor imports of a tool, where it is asked for, by module; training on prepared shards
# does without.
TOOLS_OF_THE_FLOOR = {
    ("lingua.data.sources", "lingua.tools.prepare.build"): "text that is not tokenized yet",
    ("lingua.data.sources", "lingua.tools.chat_template"): "conversations: how they are written",
    ("lingua.checkpoint.origin", "lingua.tools.exchange.hugging_face"): "weights of transformers",
    ("lingua.checkpoint.origin", "lingua.tools.exchange.foreign"): "weights of other programs",
    ("lingua.run.start", "lingua.tools.inference.benchmarks"): "benchmarks that are due",
    ("lingua.run.describe", "lingua.tools.plan.fact"): "a plan, compared at the end of the run",
    ("lingua.parallel.launch", "lingua.tools.elastic.seats"): "ranks that need not all be used",
    ("lingua.run.start", "lingua.tools.elastic.recheck"): "ranks that compare their gradients",
    ("lingua.run.start", "lingua.tools.elastic.survivors"): "what is saved when a rank has died",
    ("lingua.monitor.reporter", "lingua.tools.trackers"): "trackers of logging.to",
    ("lingua.run.start", "lingua.tools.trackers"): "whether their packages are installed",
    ("lingua.base.urls", "lingua.tools.storage.fetch"): "what URLs name",
    ("lingua.run.start", "lingua.tools.storage.mirror"): "checkpoints in an object store",
}


def imported(tree: ast.AST, deferred: bool = False) -> Iterator[str]:
    """Modules that importing a source imports, with `deferred` those that its functions import too;
    those of TYPE_CHECKING left out."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() if not deferred:
                pass
            case ast.If(test=test) if "TYPE_CHECKING" in ast.dump(test):
                pass
            case _:
                yield from imported(node, deferred)


def sources_by_module() -> dict[str, str]:
    """The sources of this repository that are not empty."""
    sources = {}
    for file in FILES:
        path = file.relative_to(ROOT).with_suffix("").parts
        name = ".".join(path[path[0] == "setup" :]).removesuffix(".__init__")  # setup has scripts
        sources[name] = file.read_text()
    return {name: source for name, source in sources.items() if source}


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """What each module imports of the others, in functions too. It imports the packages of what it
    imports with it; not counted are `lingua` and those of apps, the fronts of what they contain."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        graph[module] = set()
        for name in imported(ast.parse(source), deferred=True):
            parts = name.split(".")
            paths = [".".join(parts[: n + 1]) for n in range(len(parts))]
            *packages, last = [path for path in paths if path in sources] or [""]
            counted = [p for p in packages if p.startswith("lingua.")]
            graph[module] |= {*counted, last} & sources.keys() - {module}
    return graph


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules each of which imports all others of its set, through others or not."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, todo = set[str](), [start]
        while todo:
            for name in graph[todo.pop()] - seen:
                seen.add(name)
                todo.append(name)
        reached[start] = seen
    found: list[set[str]] = []
    for name, others in reached.items():
        circle = {other for other in others if name in reached[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def layer(module: str) -> int:
    """0 for the first package of the floor; tools and apps are above it."""
    if not module.startswith("lingua.") or module in DOORS:
        return len(FLOOR) + 1
    place = module.split(".")[1]
    return len(FLOOR) if place == "tools" else FLOOR.index(place)


def test_imports_go_one_way():
    """Deferred ones too. The floor, what a run is trusted by, does without the shelf."""
    graph = import_graph(sources_by_module())
    for module, others in graph.items():
        for other in others:
            if (module, other) in TOOLS_OF_THE_FLOOR:
                continue
            assert layer(other) <= layer(module), f"{module} imports {other}"
            if module.startswith("lingua"):
                assert not other.startswith("apps"), f"{module} imports {other}"


def test_no_modules_import_each_other():
    graph = import_graph(sources_by_module())
    for module, tool in TOOLS_OF_THE_FLOOR:
        graph[module].remove(tool)
    assert [*circles(graph)] == []


def test_a_circle_of_deferred_imports_is_found():
    sources = {
        "lingua.a": "from lingua.b import f",
        "lingua.b": "def f():\n    from lingua.c import g",
        "lingua.c": "if TYPE_CHECKING:\n    import lingua.d\nfrom lingua import b",
        "lingua.d": "import lingua.c",
        "lingua": "def train():\n    import lingua.a",
    }
    assert circles(import_graph(sources)) == [{"lingua.b", "lingua.c"}]
    package = {"lingua.p": "def f():\n    import lingua.p.q", "lingua.p.q": "import lingua.p.r"}
    assert circles(import_graph(package | {"lingua.p.r": "pass"})) == [{"lingua.p", "lingua.p.q"}]


def test_the_floor_imports_a_tool_only_where_it_is_asked_for():
    """In few places, each of which names what needs it."""
    found: list[tuple[str, str]] = []
    for module, source in sources_by_module().items():
        if layer(module) >= len(FLOOR):
            continue
        tree, guarded = ast.parse(source), list[str]()
        for node in ast.walk(tree):
            if isinstance(node, ast.With) and "tool_needed_by" in ast.dump(node.items[0]):
                guarded += imported(node)
        tools = [n for n in imported(tree, deferred=True) if n.startswith("lingua.tools")]
        assert sorted(tools) == sorted(guarded), module
        modules = sources_by_module().keys()  # a name is of one of them, or is one
        found += [(module, t if t in modules else t.rpartition(".")[0]) for t in tools]
    assert set(found) == TOOLS_OF_THE_FLOOR.keys() and len(TOOLS_OF_THE_FLOOR) <= 13


def test_ranks_agree_in_one_file():
    """On objects and through the store. The store is also where ranks meet and are looked for."""
    calls = r"\b(\w+_object|\w+_object_list|default_store)\b\("
    found = {
        str(file.relative_to(ROOT))
        for file in FILES
        if file.is_relative_to(ROOT / "lingua") and re.search(calls, file.read_text())
    }
    # Rank 0 of an evaluation hands out what the harness asks, which may be large.
    assert found == {"lingua/parallel/mesh.py", "lingua/tools/inference/harness.py"}


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
    allowed = sys.stdlib_module_names | required() | {"lingua", "apps", "setup"}
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
        # bench reads runs as a stranger would, and onefile shares no code
        if not any(file.is_relative_to(ROOT / "apps" / name) for name in ("bench", "onefile"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    }
    others = {  # of other kinds of folders
        ("lingua/data/shards.py", "manifest.json"),
        ("lingua/data/token_formats.py", ".metadata"),
    }
    assert written - others <= {("lingua/base/dump_dir.py", name) for name in names}
