"""The frozen code of a run. Copying a checkout is tested by jobs, in test_stool.py."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lingua.base.version import code_version
from lingua.tools.slurm.freeze import freeze_code
from tests.mistakes import refused

pytestmark = pytest.mark.quick


def test_a_launch_from_frozen_code_copies_that_code(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "code" / "apps" / "__pycache__").mkdir(parents=True)
    (first / "code" / "apps" / "train.py").write_text("1\n")
    (first / "code" / "apps" / "__pycache__" / "train.pyc").write_text("")
    (first / "code.commit").write_text("abc\n")
    (first / "code.diff").write_text("-2\n+1\n")
    copy = freeze_code(first / "code" / "apps" / "train.py", second, print)
    assert copy == second / "code"
    files = {str(p.relative_to(second)) for p in second.rglob("*") if p.is_file()}
    assert files == {"code/apps/train.py", "code.commit", "code.diff"}
    assert (second / "code.commit").read_text() == "abc\n"


def test_a_checkout_without_a_commit_is_refused_and_nothing_is_written(tmp_path):
    checkout, dump_dir = tmp_path / "checkout", tmp_path / "runs" / "new"
    checkout.mkdir()
    (checkout / "train.py").write_text("1\n")
    subprocess.run(["git", "init", "--quiet", checkout], check=True)
    refused(lambda: freeze_code(checkout / "train.py", dump_dir, print), "at least one commit")
    assert not dump_dir.parent.exists()


HASH = "import app, single, lingua.base.version as v; print(v.code_hash('lingua', 'app', 'single'))"


def test_the_hash_of_the_code_is_of_what_trains_in_every_checkout(tmp_path):
    here, other = tmp_path / "here", tmp_path / "other" / "deeper"
    shutil.copytree(Path(__file__).parents[3] / "lingua", here / "lingua")
    files = {"app/__init__.py": "", "app/kernel.cu": "", "single.py": "import beside\n"}
    for name, text in (files | {"beside.py": "", "unused.py": ""}).items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(text)
    shutil.copytree(here, other)

    def hash_of(place: Path) -> str:
        command, env = [sys.executable, "-c", HASH], os.environ | {"PYTHONPATH": str(place)}
        return subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True,
                              text=True).stdout  # fmt: skip

    first = hash_of(here)
    for name in (
        "lingua/tools/runs/records.py",
        "lingua/tools/new.py",
        "app/config.yaml",
        "unused.py",
    ):
        with (other / name).open("a") as file:
            file.write("# another\n")
    assert hash_of(other) == first  # here with files that Python has compiled
    for name in ("lingua/data/new.py", "lingua/app.py", "app/kernel.cu", "single.py", "beside.py"):
        with (other / name).open("a") as file:
            file.write("# another\n")
        before, first = first, hash_of(other)
        assert first != before


def test_untracked_secrets_and_large_files_are_named_and_not_copied(tmp_path):
    checkout, lines = tmp_path / "checkout", list[str]()
    files = {"train.py": 0o644, "run.sh": 0o755, "private/notes.py": 0o600, ".env": 0o600}
    for name, mode in files.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("1\n")
        (checkout / name).chmod(mode)
    (checkout / "private").chmod(0o700)
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    secrets = (".env.local", ".aws/config", ".netrc", "a.pem", "b.KEY", "id_rsa", "x/token")
    for name in (*secrets, "credentials.json", "private/new.py", "tokens.py", "tokenizer.json"):
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text("secret")
    (checkout / "data.bin").write_bytes(bytes(3 << 20))
    copy = freeze_code(checkout / "train.py", tmp_path / "run", lines.append)

    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    commit = head.stdout.strip()
    for file in (checkout / "train.py", copy / "private" / "notes.py"):
        assert code_version(file) == commit
    (checkout / "train.py").write_text("2\n")
    assert code_version(checkout / "train.py") == f"{commit}-dirty"
    freeze_code(checkout / "train.py", tmp_path / "later", lines.append)
    assert code_version(tmp_path / "later" / "code" / "train.py") == f"{commit}-dirty"
    assert code_version(tmp_path / "run" / "x.py") is None
    del lines[2:]

    copied = {str(p.relative_to(copy)) for p in copy.rglob("*") if p.is_file()}
    untracked = {"private/new.py", "tokens.py", "tokenizer.json"}
    assert copied == files.keys() | untracked  # a tracked secret is part of the code
    for name, mode in (files | {"private": 0o700}).items():
        assert (copy / name).stat().st_mode & 0o777 == mode, name
    too, left_out = lines
    assert all(name in too for name in untracked)
    assert all(f"{name} (may be a secret)" in left_out for name in secrets)
    assert "credentials.json (" in left_out and "data.bin (3.00 MiB)" in left_out
