"""The frozen code of a run. Copying a checkout is tested by jobs, in test_stool.py."""

import subprocess
from pathlib import Path

import pytest

from lingua.errors import UserError
from lingua.slurm.freeze import freeze_code

pytestmark = pytest.mark.quick


def test_a_launch_from_frozen_code_copies_that_code(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "code" / "apps" / "__pycache__").mkdir(parents=True)
    (first / "code" / "apps" / "train.py").write_text("1\n")
    (first / "code" / "apps" / "__pycache__" / "train.pyc").write_text("")
    (first / "code.commit").write_text("abc\n")
    (first / "code.diff").write_text("-2\n+1\n")
    copy = freeze_code(first / "code" / "apps" / "train.py", second)
    assert copy == second / "code"
    files = {str(p.relative_to(second)) for p in second.rglob("*") if p.is_file()}
    assert files == {"code/apps/train.py", "code.commit", "code.diff"}
    assert (second / "code.commit").read_text() == "abc\n"


def test_a_checkout_without_a_commit_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    checkout, dump_dir = tmp_path / "checkout", tmp_path / "runs" / "new"
    checkout.mkdir()
    (checkout / "train.py").write_text("1\n")
    subprocess.run(["git", "init", "--quiet", checkout], check=True)
    with pytest.raises(UserError, match="at least one commit"):
        freeze_code(checkout / "train.py", dump_dir)
    assert not dump_dir.parent.exists()
