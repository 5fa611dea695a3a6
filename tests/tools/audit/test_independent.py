"""`lingua audit by=FILE`: steps are computed by another implementation, in a process that cannot
import lingua, which so finds faults of lingua itself."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.apps.runs import SMALL, Outcome, Runs
from tests.checkpoints import resign
from tests.programs import OF_OTHERS, python, state_of
from tests.tools.audit.audits import (
    METRICS,
    ONE,
    SETTINGS,
    SHARDS,
    VALIDATION,
    Forger,
    audit,
    audit_here,
    found_wrong,
    verdict,
)

REPOSITORY = Path(__file__).parents[3]
ONEFILE = REPOSITORY / "apps/onefile/train.py"
BY = f"by={ONEFILE}"
INDEPENDENT = f"; by {ONEFILE} (sha256 "


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Outcome:
    return runs.train(ONE, SETTINGS)


# ---- the other implementation


def test_a_segment_is_computed_by_another_implementation(
    runs: Runs, whole: Outcome, tmp_path: Path
) -> None:
    words = BY, "steps=4..6", f"out={tmp_path}/verdict.json"
    code, said = audit(runs, whole.dump_dir, *words)
    assert code == 0 and "steps 4 to 6: equal to the bit" in said, said
    assert INDEPENDENT in verdict(said)
    entry = json.loads((tmp_path / "verdict.json").read_text())
    assert entry["kind"] == f"steps computed again by {ONEFILE}"
    hashed = subprocess.run(["sha256sum", ONEFILE], capture_output=True, text=True, check=True)
    assert entry["by"] == {"file": str(ONEFILE), "sha256": hashed.stdout.split()[0]}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("deterministic", "code", "named"),
    [("mesh", 0, "equal to the bit"), ("false", 0, "equal up to rounding: at most "),
     ("true", 2, "cannot be compared: steps 1 to 4: bits are promised, and topology: [1, 2, 1] ")],
)  # fmt: skip
def test_a_run_of_several_ranks_is_computed_in_one_process(
    runs: Runs, deterministic: str, code: int, named: str
) -> None:
    settings = SETTINGS | {"deterministic": deterministic, "data.batch_size": 2}
    settings |= {"checkpoint.dump.every": 4}
    run = runs.train(SHARDS, settings).dump_dir
    left, said = audit(runs, run, BY, "steps=1..4")
    assert left == code and verdict(said).startswith(named) and INDEPENDENT in said, said


# ---- faults of lingua, which an audit by the same code repeats


class Fault(NamedTuple):
    file: str
    line: str
    faulty: str
    found: str  # the verdict of another implementation


FAULTS = {
    "none": Fault("lingua/run/start.py", "def restore(", "def restore(", "equal to the bit"),
    "a wrong divisor on the last micro-step": Fault(
        "apps/main/train.py",
        "part = (losses.sums / counts).sum()",
        "part = (losses.sums / (counts + last)).sum()",
        "differs from step 1 on, loss first: ",
    ),
    "a row read twice": Fault(
        "lingua/data/loader.py",
        "positions = itertools.count(position, self.global_batch_size)",
        "positions = itertools.count(max(0, position - 1), self.global_batch_size)",
        "differs from step 5 on, rows first: ",
    ),
    "a moment not restored": Fault(
        "lingua/run/start.py",
        ".load(tensors_of(model, optimizer, without=base))",
        ".load(t := tensors_of(model, optimizer)); [t[k].zero_() for k in t if 'avg_sq' in k]",
        "differs from step 6 on, loss first: ",
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_lingua_is_found_by_another_implementation_alone(
    runs: Runs, tmp_path: Path, name: str
) -> None:
    """In a run that was stopped after step 4 and resumed."""
    fault, copy, run = FAULTS[name], tmp_path / "copy", tmp_path / "run"
    for package in ("lingua", "apps"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / package, copy / package, ignore=ignored)
    place = copy / fault.file
    text = place.read_text()
    assert text.count(fault.line) == 1
    place.write_text(text.replace(fault.line, fault.faulty))

    def call(command: list[str], *words: str) -> str:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, *words], cwd=copy, env=environment, capture_output=True, text=True,
            timeout=100,
        )  # fmt: skip
        assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
        return done.stdout

    settings = SMALL | {"data.root_dir": runs.text, "dump_dir": run, "steps": 8}
    settings |= {"checkpoint.dump.every": 0, "data.batch_size": 4, "deterministic": "true"}
    for stop_at in ("4", "null"):
        words = [f"{key}={value}" for key, value in (settings | {"stop_at": stop_at}).items()]
        call(python(OF_OTHERS), "-m", "apps.main.train", *words)
    by_lingua, by_another = (
        verdict(call([sys.executable], "-m", "lingua", "audit", str(run), *words))
        for words in ([], [BY])
    )
    assert by_lingua == "equal to the bit"
    assert by_another.startswith(fault.found) and INDEPENDENT in by_another


# ---- files that are no implementation

# Writes what the run in RUN has written, once SPOIL has changed it.
COPYING = f"""
import json, pathlib, shutil, sys, yaml
config = yaml.safe_load(pathlib.Path(sys.argv[1]).read_text())
run, folder = pathlib.Path("RUN"), pathlib.Path(config["dump_dir"])
step = pathlib.Path("checkpoints", f"{{config['stop_at']:010d}}")
shutil.copytree(run / step, folder / step)
lines = [json.loads(text) for text in (run / "{METRICS}").read_text().splitlines()]
lines = [line for line in lines if "event" not in line]
SPOIL
(folder / "{METRICS}").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""


def copying(spoil: str) -> str:
    return COPYING.replace("SPOIL", spoil)


HANGING = """
import os, pathlib, signal, subprocess
child = subprocess.Popen(["sleep", "600"])
pathlib.Path("PIDS").write_text(f"{os.getpid()} {child.pid}")
os.kill(os.getppid(), signal.SIGTERM)
child.wait()
"""
DYING = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
REFUSING = "import sys\nprint('loading')\nprint('error: optim.name = muon')\nsys.exit(2)"
SAVED = "/checkpoints/0000000003 is not a whole checkpoint: "
FILES = {  # programs, and what the verdict names
    "imports lingua": (
        "import lingua.data.loader",
        "ended with exit code 1: ModuleNotFoundError: No module named 'lingua.data'; ",
    ),
    "imports an app": (
        f"import sys\nsys.path.insert(0, {str(REPOSITORY)!r})\nfrom apps import main",
        "ended with exit code 1: ModuleNotFoundError: import of apps halted",
    ),
    "refuses": (REFUSING, "optim.name = muon; "),
    "dies": (DYING, "ended with SIGKILL: it printed nothing"),
    "writes nothing": ("", f"{SAVED}manifest.json is missing"),
    "no JSON": (
        copying(f"(folder / '{VALIDATION}').write_text('[1]\\n')"),
        f"{VALIDATION}:1: is no line of a run: it is no JSON object",
    ),
    "a step of text": (
        copying("lines[0]['step'] = 'x'"),
        f"{METRICS}:1: is no line of a run: step",
    ),
    "no line": (copying("del lines[1]"), f"{METRICS} has no line of step 2"),
    "no norm": (
        copying("del lines[1]['grad_norm']"),
        f"{METRICS}: the line of step 2 has no grad_norm",
    ),
    "a damaged manifest": (
        copying("(folder / step / 'manifest.json').write_text('{}')"),
        f"{SAVED}manifest.json cannot be read",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_fails_cannot_be_compared(
    runs: Runs, whole: Outcome, tmp_path: Path, name: str
) -> None:
    program, named = FILES[name]
    file = tmp_path / "file.py"
    file.write_text(program.replace("RUN", str(whole.dump_dir)))
    said = found_wrong(runs, whole.dump_dir, f"by={file}", "steps=1..3", code=2, named=named)
    assert verdict(said).startswith(f"cannot be compared: steps 1 to 3: {file}: "), said


def test_what_a_file_has_saved_is_compared_and_not_the_hash_that_it_gives(
    runs: Runs, whole: Outcome, tmp_path: Path
) -> None:
    file, made = tmp_path / "file.py", whole.copy(tmp_path / "run").dump_dir
    file.write_text(copying("").replace("RUN", str(made)))
    words = f"by={file}", "steps=1..3"
    assert audit(runs, whole.dump_dir, *words)[0] == 0
    for name in (".metadata", "__0_0.distcp"):
        shutil.copy(made / f"checkpoints/0000000006/{name}", made / "checkpoints/0000000003")
    resign(made / "checkpoints/0000000003")
    found_wrong(runs, whole.dump_dir, *words, named="differs from step 3 on, weights first: ")
    for change, named in (
        (lambda state: state.pop("schedule"), "train_state.json of step 3 has no schedule"),
        (lambda state: state.update(progress=[1]), "progress = [1]: must be a group"),
    ):
        Forger(made).state(3, change)
        resign(made / "checkpoints/0000000003")
        found_wrong(runs, whole.dump_dir, *words, code=2, named=named)


def interrupted(argv: list[str]) -> bool:
    """Whether a signal ends an audit as it ends the training program."""
    try:
        audit_here(argv)
    except KeyboardInterrupt:
        return True
    return False


def test_a_file_that_hangs_ends_with_the_audit(runs: Runs, whole: Outcome, tmp_path: Path) -> None:
    """And so does what it has started."""
    file, pids = tmp_path / "file.py", tmp_path / "pids"
    file.write_text(HANGING.replace("PIDS", str(pids)))
    words = [str(whole.dump_dir), f"by={file}", "steps=1..3"]
    assert all(runs.ranks.run(1, interrupted, words))
    assert all(state_of(pid) == "Z" for pid in map(int, pids.read_text().split()))


def test_it_computes_in_one_process(runs: Runs, whole: Outcome) -> None:
    code, said = audit(runs, whole.dump_dir, BY, n=2)
    assert (code, said) == (2, f"by = {ONEFILE}: computes in one process, and here are 2")
