"""The front door: `python -m lingua` lists the commands and runs them; help is light."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lingua import SPIN_COUNT
from lingua.__main__ import COMMANDS, PROGRAMS
from tests.programs import python

REPO = Path(__file__).parents[1]
SAMPLE = REPO / "tests/samples/0.1.0"
# Ends as the command does, after a line of the heavy packages that it has imported.
WATCH = """
import runpy, sys
sys.argv = ["lingua", *sys.argv[1:]]
try:
    runpy.run_module("lingua", run_name="__main__", alter_sys=True)
finally:
    heavy = {"torch", "numpy", "sentencepiece", "tiktoken", "tokenizers"}
    print("imported:", *sorted(heavy & set(sys.modules)), file=sys.stderr)
"""


def watch(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WATCH, *words]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True)


def lingua(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*python(), "-m", "lingua", *words], capture_output=True, text=True)


def test_an_interrupt_while_a_program_imports_shows_no_traceback():
    command = [sys.executable, "-X", "importtime", "-m", "apps.main.train"]
    with subprocess.Popen(command, cwd=REPO, stderr=subprocess.PIPE, text=True) as program:
        while not program.stderr.readline().endswith(" apps\n"):
            assert program.poll() is None
        program.send_signal(signal.SIGINT)
        lines = program.stderr.readlines()
    assert program.returncode == -signal.SIGINT
    assert all(line.startswith("import time:") for line in lines), lines


FULL = "error: standard output cannot be written: No space left on device\n"


RUN = """
import logging
from lingua.monitor.logger import init_logger
from lingua.parallel.program import run_program
def run():
    init_logger(None, 0)
    for i in range(2000):
        logging.getLogger("lingua").info(i * "x")
run_program(run)
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [(["-m", "lingua", "--help"], 1), (["-m", "lingua", "train", "--help"], 1), (["-c", RUN], 0)],
    ids=["short", "long", "run"],
)
def test_a_full_stdout_is_one_line_and_a_closed_one_is_none(words, code):
    """A run, to which stdout is a log, goes on, and logs to stderr where stdout is closed."""
    command = [sys.executable, *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=REPO, stdout=full, stderr=-1, text=True)
        assert (done.returncode, done.stderr) == (code, FULL)
        assert subprocess.run(command, cwd=REPO, stdout=full, stderr=full).returncode == code
    closed = ["bash", "-c", '"$@" >&-', "bash", *command]
    done = subprocess.run(closed, cwd=REPO, stderr=-1, text=True)
    assert done.returncode == 0 and ("x" * 1999 in done.stderr if code == 0 else done.stderr == "")


def train(folder: Path, stop_at: int, **files: Any) -> subprocess.CompletedProcess[str]:
    shutil.copytree(SAMPLE / "text", folder / "text", dirs_exist_ok=True)
    words = [f"config={SAMPLE}/config.yaml", f"data.root_dir={folder}/text", f"stop_at={stop_at}"]
    command = [*python(), "-m", "lingua", "train", f"dump_dir={folder}/run", *words]
    return subprocess.run(command, cwd=REPO, text=True, **files)


@pytest.mark.soak
def test_a_run_whose_console_cannot_be_written_goes_on(tmp_path):
    with open("/dev/full", "w") as full:
        done = train(tmp_path, 2, stdout=full, stderr=-1)
        assert (done.returncode, done.stderr) == (0, FULL)
        assert train(tmp_path, 4, stdout=full, stderr=full).returncode == 0
    reader, writer = os.pipe()
    os.close(reader)
    done = train(tmp_path, 6, stdout=writer, stderr=-1)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
    log = (tmp_path / "run" / "train.log").read_text()
    assert [int(step) for step in re.findall(r" step (\d+) loss ", log)] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "run/checkpoints/0000000006/manifest.json").exists()


LIGHT = ["runs", "report", "compare", "audit", "check", "tokenizer", "checkpoint"]
LIGHT += ["data prepare", "data show", "data verify"]


def test_help_imports_neither_torch_nor_numpy():
    for command in ("", *LIGHT):
        done = watch(*command.split(), "--help")
        assert (done.returncode, done.stderr) == (0, "imported:\n"), command
        assert f"python -m lingua {command}" in done.stdout
    imports = watch("tokenizer", "show", "hi", "name=bytes")
    assert imports.stderr == "imported: numpy\n"  # the test would notice


def test_every_command_has_a_line_a_module_and_help():
    listed = lingua().stdout
    assert listed == lingua("--help").stdout
    for name, (_, line) in COMMANDS.items():
        assert f"  {name:12}  {line}\n" in listed
    for name in sorted(set(COMMANDS) - set(LIGHT)):
        done = lingua(*name.split(), "--help")
        usage = f"apps.main.{name}" if name in PROGRAMS else f"lingua {name}"
        assert done.returncode == 0 and f"python -m {usage} " in done.stdout, name


@pytest.mark.parametrize("command", ["plan", "stool", "data show", "eval", "train"])
def test_a_line_comes_before_the_seconds_in_which_torch_is_imported(tmp_path, command):
    (tmp_path / "torch.py").write_text("raise SystemExit('here')")
    words = [*command.split(), f"config={REPO}/apps/main/configs/small.yaml", "step=1"]
    words += ["app=apps.mamba"] * (command == "train")
    done = subprocess.run(
        [sys.executable, "-m", "lingua", *words],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{REPO}", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("", f"lingua {command}: importing torch\nhere\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("rusn runs", 'rusn: unknown command (did you mean "runs"?); see --help'),
        ("data verfy", 'data verfy: unknown command (did you mean "data verify"?); see --help'),
        ("checkpoint mrk", 'mrk: must be one of show, diff, mark, unmark (did you mean "mark"?)'),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2_without_torch(words, message):
    done = watch(*words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {message}\nimported:\n"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, SPIN_COUNT),
        ({"GOMP_SPINCOUNT": "77"}, "77"),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, "0"),
    ],
    ids=["ours", "given", "policy"],
)
def test_openmp_reads_how_long_its_threads_spin_unless_the_user_has_said_it(variables, expected):
    unset = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-m", "apps.main.train", "--help"],
        env=unset | {"OMP_DISPLAY_ENV": "VERBOSE"} | variables,
        capture_output=True,
        text=True,
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch has another OpenMP library")
    assert f"GOMP_SPINCOUNT = '{expected}'" in done.stderr


@pytest.mark.parametrize(
    "env", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}], ids=["ascii", "C"]
)
def test_a_terminal_that_is_not_utf_8_has_escapes_and_arguments_are_read(env):
    command = [sys.executable, "-m", "lingua", "tokenizer", "show", "na\u00efve", "name=bytes"]
    done = subprocess.run(command, cwd=REPO, env=os.environ | env, capture_output=True)
    plain = subprocess.run(command, cwd=REPO, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode("ascii") == plain.stdout.replace("\ufffd", r"\ufffd")
    assert "the text is 6 tokens of 6 bytes" in plain.stdout and "\ufffd" in plain.stdout
