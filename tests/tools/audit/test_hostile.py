"""Folders whose hashes are right and whose values are of wrong types: an audit states what does not
fit, or why nothing can be compared."""

import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from lingua.run.receipt import hash_of
from tests.apps.runs import Runs
from tests.checkpoints import resign, write_manifest
from tests.programs import python
from tests.ranks import free_port
from tests.tools.audit import failing
from tests.tools.audit.audits import (
    CONFIG,
    METRICS,
    ONE,
    RECEIPT,
    SETTINGS,
    UNFORESEEN,
    VALIDATION,
    Forger,
    audit_here,
    contents,
    copy_of,
    found_wrong,
)


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else 1


VALUES = [None, True, -1, 2**52, 2**64, 10**30, 1.5, float("nan"), float("inf"), "", "x", "\0"]
VALUES += ["x" * 300, [], [1], ["x"], {}, {"a": 1}, nested(240), nested(400)]
SAVED = "checkpoints/0000000006/"


class Place(NamedTuple):
    """A value in a file of JSON or YAML, or in a line of one; `in_config`: in its text of YAML."""

    file: str
    line: int | None
    path: tuple[Any, ...]
    in_config: bool = False


def paths_in(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = dict(enumerate(tree)) if isinstance(tree, list) else tree
    for key, value in items.items() if isinstance(items, dict) else ():
        yield from paths_in(value, (*path, key))


def read(folder: Path, place: Place) -> Any:
    text = (folder / place.file).read_text()
    if place.line is not None:
        text = text.splitlines()[place.line]
    tree = yaml.safe_load(text) if place.file.endswith(CONFIG) else json.loads(text)
    return yaml.safe_load(tree["config"]) if place.in_config else tree


def all_places(run: Path) -> list[Place]:
    """Every value of each kind of file, of a line about a step, a start and an end."""
    whole = [RECEIPT, CONFIG, f"{SAVED}train_state.json", f"{SAVED}manifest.json"]
    roots = [Place(file, None, ()) for file in whole]
    roots += [Place(METRICS, line, ()) for line in (0, 1, -1)] + [Place(VALIDATION, 1, ())]
    roots.append(Place(METRICS, 0, (), in_config=True))
    return [root._replace(path=path) for root in roots for path in paths_in(read(run, root))]


def spoil(folder: Path, place: Place, value: Any) -> None:
    """Put a value there, and make the hashes anew where there can be one."""
    tree = copy.deepcopy(read(folder, place))
    at = tree
    for key in place.path[:-1]:
        at = at[key]
    if place.path:
        at[place.path[-1]] = value
    else:
        tree = value
    if place.file == RECEIPT and place.path:
        with suppress(TypeError):  # no run could write it
            tree["run_hash"] = hash_of(tree["run"]) if place.path[0] != "run_hash" else value
            if place.path[0] != "hash":
                tree["hash"] = hash_of({k: v for k, v in tree.items() if k != "hash"})
    text = json.dumps(tree)
    if place.in_config or place.file == CONFIG:
        text = text.replace("NaN", ".nan").replace("Infinity", ".inf")
    if place.in_config:
        text = json.dumps(read(folder, place._replace(in_config=False)) | {"config": text})
    lines = (folder / place.file).read_text().splitlines()
    if place.line is not None:
        lines[place.line] = text
    (folder / place.file).write_text("\n".join(lines) + "\n" if place.line is not None else text)
    if place.file.endswith("manifest.json"):
        if isinstance(tree, dict) and place.path != ("xxh3_64",):
            write_manifest(folder / SAVED, tree)
    elif place.file != RECEIPT:
        resign(folder / SAVED)
        with suppress(Exception):  # of lines that no run could write
            Forger(folder).sign()


def audit_each(
    run: Path, folder: Path, cases: list[tuple[Place, Any]], words: list[str]
) -> list[tuple[int, str]]:
    """(exit code, output) of an audit of a copy of the run that is spoiled, for each case."""
    results = []
    for place, value in cases:
        copy_of(run, folder)
        spoil(folder, place, value)
        before = contents(folder)
        code, said = audit_here([str(folder), *words])
        what = f"{place} = {str(value)[:50]}: {code}: {said}"
        assert UNFORESEEN not in said and "Traceback" not in said and code in (0, 1, 2), what
        assert code != 1 or "\nverdict: differs " in f"\n{said}", what
        assert code != 2 or said.splitlines()[-1], what
        assert contents(folder) == before, what
        shutil.rmtree(folder)
        results.append((code, said))
    return results


@pytest.fixture(scope="module")
def run(runs: Runs) -> Path:
    return runs.train(ONE, SETTINGS | {"logging.freq": 2, "validation.every": 4}).dump_dir


STATE = f"{SAVED}train_state.json"
NAMED = [
    (
        Place(RECEIPT, None, ("run",)),
        {"a": 1},
        "receipt.json: run.config = null: must be a mapping",
    ),
    (Place(RECEIPT, None, ("run", "chains", METRICS)), True, "= true: must be a mapping"),
    (
        Place(RECEIPT, None, ("events", "lines")),
        None,
        "events.lines = null: must be a whole number",
    ),
    (Place(RECEIPT, None, ("starts",)), None, "receipt.json: starts = null: must be a list"),
    (Place(RECEIPT, None, ("format",)), 10**30, "receipt.json: cannot be read as JSON"),
    (Place(RECEIPT, None, ("checkpoints",)), nested(400), "receipt.json: cannot be read as JSON"),
    (Place(STATE, None, ("data",)), [1], "train_state.json"),
    (Place(STATE, None, ("data", "x")), [10**30], "train_state.json: cannot be read as JSON"),
    (Place(VALIDATION, 1, ("source",)), ["x"], f"{VALIDATION}:2: is no line of a run: source = "),
    (Place(METRICS, 0, ("topology",)), 1, f"{METRICS}:1: is no line of a run: topology = 1: must"),
    (Place(METRICS, 0, ("steps",), in_config=True), "x", "config of the start after step 0: steps"),
    (Place(CONFIG, None, ("checkpoint", "path")), 1.5, "config.yaml: checkpoint.path = 1.5: must"),
]


def test_a_value_of_another_type_does_not_fit(runs: Runs, run: Path, tmp_path: Path) -> None:
    cases = [(place, value) for place, value, _ in NAMED]
    said = runs.ranks.run(1, audit_each, run, tmp_path / "run", cases, ["run=false"])[0]
    for (place, value, named), (code, text) in zip(NAMED, said, strict=True):
        assert code == 1 and named in text, f"{place} = {str(value)[:50]}: {text}"


def test_values_that_are_compared_alone_may_have_any_type(
    runs: Runs, run: Path, tmp_path: Path
) -> None:
    cases = [(Place(METRICS, 1, ("loss",)), "x"), (Place(METRICS, 0, ("topology",)), [1])]
    words = ["steps=1..3"]
    said = runs.ranks.run(1, audit_each, run, tmp_path / "run", cases, words)[0]
    assert said[0][0] == 1 and "differs from step 2 on, loss first: x recorded, " in said[0][1]
    assert said[1][0] == 0 and "topology: [1] recorded, [1, 1, 1] here" in said[1][1]


def test_ranks_end_together(runs: Runs, run: Path, tmp_path: Path) -> None:
    folder = copy_of(run, tmp_path / "run")
    spoil(folder, Place(METRICS, 0, ("topology",)), [[1]])
    found_wrong(runs, folder, n=2, named=f"{METRICS}:1: is no line of a run: topology.0 = [1]")


IMPATIENT = """
from lingua.tools.audit import again
again.PATIENCE_S = 10.0  # of 30, twice, in which a rank waits for one that has failed
from lingua.__main__ import run
run()
"""


@pytest.mark.soak
@pytest.mark.parametrize("faulty", ["1", "0 1"])
def test_an_error_that_no_check_foresees_ends_all_ranks(run: Path, faulty: str) -> None:
    """Also where the others wait for the rank that has it."""
    words = ["-c", IMPATIENT, "audit", str(run), f"app={failing.app.path}", "steps=1..3"]
    port = ["--master-port", str(free_port())]
    command = [*python(), "-m", "torch.distributed.run", "--nproc-per-node", "2", *port]
    command += ["--no-python", *python()]
    environment = os.environ | {"FAULTY_RANKS": faulty, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [*command, *words], env=environment, capture_output=True, text=True, timeout=200
    )
    said = done.stdout + done.stderr
    named = f"ValueError: no gradients ({failing.__file__}:16, {UNFORESEEN})"
    assert done.returncode == 1 and named in said, said
    assert said.count("Traceback") == 1, said  # torchrun's own
    assert faulty != "0 1" or f"cannot be compared: steps 1 to 3: {named}" in said, said


# ---- what is written

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("mkdir", "rename", "remove", "rmdir", "symlink", "link", "truncate", "chmod", "utime")
written: list[str] = []  # paths, while an audit is watched


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook, which Python calls for what it has the system do."""
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
        written.append(str(arguments[0]))
    elif event.removeprefix("os.") in CHANGES:
        paths = [a for a in arguments if isinstance(a, str | os.PathLike)]
        if not paths:  # by a descriptor, whose file was opened for writing
            return
        path = paths[-1]  # the one that changes
        is_below = isinstance(arguments[-1], int) and arguments[-1] >= 0 and event != "os.truncate"
        parent = os.readlink(f"/proc/self/fd/{arguments[-1]}") if is_below else ""
        written.append(os.path.join(parent, path))


def audit_watched(argv: list[str], temporary: Path) -> tuple[int, str, list[str]]:
    """(exit code, output, the paths outside of `temporary` that the audit has written)."""
    tempfile.tempdir = str(temporary)
    sys.addaudithook(watch)
    written.clear()
    try:
        code, said = audit_here(argv)
        return code, said, [path for path in written if not path.startswith(str(temporary))]
    finally:
        tempfile.tempdir = None


def test_an_audit_writes_into_its_temporary_folder_alone(runs: Runs, tmp_path: Path) -> None:
    """Whatever folders the config names, here with shards that must be built."""
    text = shutil.copytree(runs.text, tmp_path / "text")
    saves, others, temporary = (tmp_path / name for name in ("saves", "others", "temporary"))
    others.mkdir(), temporary.mkdir()
    settings = {"data.root_dir": text, "checkpoint.path": saves, "validation.sources": "[]"}
    folder = runs.train(ONE, SETTINGS | settings).dump_dir

    def hostile(config: str) -> str:
        tree = yaml.safe_load(config)
        tree["dump_dir"] = str(others / "run")
        tree["logging"]["wandb"] = {"mode": "offline", "dir": str(others)}
        tree["profiling"]["run"] = True
        tree["samples"]["every"] = 1
        tree["checkpoint"]["dump"] = {"every": 1, "keep": 1}
        tree["data"]["cache_dir"] = str(others / "cache")
        return yaml.safe_dump(tree)

    Forger(folder).configs(hostile)
    for checkpoint in saves.iterdir():
        if (checkpoint / "manifest.json").exists():
            (checkpoint / CONFIG).write_text(hostile((checkpoint / CONFIG).read_text()))
            resign(checkpoint)
    Forger(folder).sign()
    shutil.rmtree(text / ".tokens")

    def state() -> dict[Path, Any]:
        files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        return {path: file for path, file in files.items() if temporary not in path.parents}

    os.utime(temporary, ns=(1, 1))
    before = state() | contents(folder)
    words = [str(folder), "steps=4..6"]
    code, said, outside = runs.ranks.run(1, audit_watched, words, temporary)[0]
    assert "steps 4 to 6: equal to the bit" in said, said
    os.utime(temporary, ns=(1, 1))
    assert state() | contents(folder) == before and set(outside) <= {os.devnull}, outside
    assert not list(temporary.iterdir()) and code == 0


@pytest.mark.soak
@pytest.mark.parametrize("words", ["run=false", "steps=1..8"])
def test_any_value_of_any_type(runs: Runs, run: Path, tmp_path: Path, words: str) -> None:
    chance = random.Random(4)
    cases = [(place, value) for place in all_places(run) for value in VALUES]
    cases = chance.sample(cases, 200 if words == "run=false" else 30)  # half an hour for all
    for first in range(0, len(cases), 25):
        part = cases[first : first + 25]
        runs.ranks.run(1, audit_each, run, tmp_path / "run", part, [words])
