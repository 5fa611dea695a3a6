"""setup/run.sh, run for real in copies of the repository's skeleton whose requirements.txt asks
for nothing, so that no network is needed; and the agreement of the two dependency lists."""

import os
import shutil
import signal
import subprocess
import time
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
SAYS_INSTALLING = "installing requirements.txt"


def make_repo(folder: Path) -> Path:
    """A skeleton whose path has what shells trip over."""
    repo = folder / "a repo's $HOME copy"
    (repo / "setup").mkdir(parents=True)
    shutil.copy(ROOT / "setup" / "run.sh", repo / "setup")
    (repo / "requirements.txt").write_text("# nothing\n")
    return repo


def start(repo: Path, *command: str, cwd: Path | None = None, **env: str) -> subprocess.Popen:
    clean = {key: value for key, value in os.environ.items() if key != "PYTHON"}
    return subprocess.Popen(
        [repo / "setup" / "run.sh", *command],
        cwd=cwd or repo,
        env=clean | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(repo: Path, *command: str, cwd: Path | None = None, **env: str):
    process = start(repo, *command, cwd=cwd, **env)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def repo(tmp_path_factory) -> Path:
    """A repository whose .venv is ready."""
    repo = make_repo(tmp_path_factory.mktemp("setup"))
    code, _, err = run(repo, "true")
    assert code == 0, err
    assert err.count(SAYS_INSTALLING) == 1
    return repo


def test_a_command_gets_its_arguments_unharmed_from_any_folder(repo, tmp_path):
    words = ["a b", "it's", '"', "$HOME", "`id`", "*", "", "-x", "back\\slash", "two\nlines"]
    script = "import os, sys; print(sys.prefix, os.getcwd(), sys.argv[1:], sep='|'); sys.exit(7)"
    code, out, err = run(repo, "python", "-c", script, *words, cwd=tmp_path)
    assert (code, out, err) == (7, f"{repo / '.venv'}|{repo}|{words}\n", "")


def test_changed_requirements_are_installed_once_and_show_their_progress(repo):
    wheel = repo / "a_package-1.0-py3-none-any.whl"
    with ZipFile(wheel, "w") as file:
        info = "a_package-1.0.dist-info"
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: a-package\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    (repo / "requirements.txt").write_text(f"./{wheel.name}\n")
    code, out, err = run(repo, "true")
    assert (code, out) == (0, "")
    shown = err.splitlines()
    assert SAYS_INSTALLING in shown[0] and wheel.name in shown[1]
    assert shown[2] == "  Installing collected packages: a-package" and len(shown) == 3
    assert run(repo, "true") == (0, "", "")


@pytest.mark.soak
def test_an_install_killed_half_way_is_made_again_and_by_only_one_of_two(tmp_path):
    repo = make_repo(tmp_path)
    process = start(repo, "true")
    while not (repo / ".venv" / "bin" / "python").exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (repo / ".venv" / "made-from").exists()

    both = [start(repo, "python", "-m", "pip", "--version") for _ in range(2)]
    ends = [(*process.communicate(timeout=120), process.returncode) for process in both]
    assert all(code == 0 and str(repo) in out for out, _, code in ends), ends
    assert "".join(err for _, err, _ in ends).count(SAYS_INSTALLING) == 1


def test_a_python_that_is_too_old_or_absent_is_a_clear_error(repo, tmp_path):
    for version in ("3.9", "2.7", "3.10"):
        old = tmp_path / "python"  # which only prints a version
        old.write_text(f"#!/bin/sh\necho {version}\n")
        old.chmod(0o755)
        code, out, err = run(repo, "echo", "ran", PYTHON=str(old))
        assert (code, out) == (2, "")
        assert f"Python 3.11 or newer is needed, and {old} is {version}" in err
    code, out, err = run(repo, "echo", "ran", PYTHON="/no/such/python")
    assert (code, out) == (2, "") and "/no/such/python does not run" in err


def test_the_package_metadata_allows_what_requirements_pin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [line for extra in project["optional-dependencies"].values() for line in extra]
    allowed = [Requirement(line) for line in project["dependencies"] + optional]
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pinned = {
        pin.name: next(iter(pin.specifier)).version
        for pin in (Requirement(line) for line in lines if line and not line.startswith("#"))
    }
    assert {requirement.name for requirement in allowed} == set(pinned)
    for requirement in allowed:
        assert requirement.specifier.contains(pinned[requirement.name]), requirement
