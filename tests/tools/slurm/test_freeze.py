"""The frozen code of a run. Copying a checkout is tested by jobs, in test_stool.py."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lingua.base.version import code_version
from lingua.tools.slurm.freeze import SECRET, freeze_code
from tests.mistakes import refused

pytestmark = pytest.mark.quick


def test_a_launch_from_frozen_code_copies_that_code(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "code" / "apps" / "__pycache__").mkdir(parents=True)
    (first / "code" / "apps" / "train.py").write_text("1\n")
    (first / "code" / "apps" / "__pycache__" / "train.pyc").write_text("")
    (first / "code.commit").write_text("abc\n")
    (first / "code.diff").write_text("-2\n+1\n")
    file = first / "code" / "apps" / "train.py"
    copy = freeze_code(file, second, ["apps.train"], [str(file)], [], print)
    assert copy == second / "code"
    files = {str(p.relative_to(second)) for p in second.rglob("*") if p.is_file()}
    assert files == {"code/apps/train.py", "code.commit", "code.diff"}
    assert (second / "code.commit").read_text() == "abc\n"


def test_a_checkout_without_a_commit_is_refused_and_nothing_is_written(tmp_path):
    checkout, dump_dir = tmp_path / "checkout", tmp_path / "runs" / "new"
    checkout.mkdir()
    (checkout / "train.py").write_text("1\n")
    subprocess.run(["git", "init", "--quiet", checkout], check=True)
    file = checkout / "train.py"
    refused(lambda: freeze_code(file, dump_dir, ["train"], [], [], print), "at least one commit")
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

    def change(name: str) -> str:
        with (other / name).open("a") as file:
            file.write("# another\n")
        return hash_of(other)

    # `here` has files that Python has compiled.
    tools = "lingua/tools/runs/table.py", "lingua/tools/new.py"
    assert {change(name) for name in (*tools, "app/config.yaml", "unused.py")} == {first}
    for name in ("lingua/data/new.py", "lingua/app.py", "app/kernel.cu", "single.py", "beside.py"):
        before, first = first, change(name)
        assert first != before


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("1\n")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Tracked files, and untracked ones of every kind beside them."""
    folder = tmp_path / "checkout"
    tracked = {"app/train.py": 0o644, "run.sh": 0o755, "private/notes.py": 0o600, ".env": 0o600}
    write(folder, *tracked)
    for name, mode in tracked.items():
        (folder / name).chmod(mode)
    (folder / "private").chmod(0o700)
    (folder / ".gitignore").write_text("ignored\n")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    return folder


SECRETS = """
    app/.env.local .aws/config .netrc .npmrc a.pem b.KEY id_rsa x/token x/hf_token hf-token.json
    aws_credentials credentials.json service-account.json gcp_service_account.json kube.config
    kubeconfig prod.env app/secrets.py app/credentials.py apps/api_key.py passwords.txt tokens.json
"""


def test_of_untracked_files_only_the_jobs_python_and_what_is_named_is_copied(checkout, tmp_path):
    lines = list[str]()
    code = {"app/new.py", "app/more/tokens.py", "apps/a/model.py", "lingua/x.py"}
    named = {"prompts/a.txt", "prompts/ignored", "x/hf_token", "special_tokens_map.json"}
    others = {"private/new.py", "tool.py", "app/data.json", "lingua.yaml", "big.bin"}
    secrets = set(SECRETS.split()) | {"prompts/.env"}
    write(checkout, *code, *named, *others, *secrets, "my.yaml", "app/ignored")
    (checkout / "app" / "ignored").rename(checkout / "ignored")
    copy = [str(checkout / name) for name in ("prompts", "x/hf_token", "special_tokens_map.json")]
    config = [str(checkout / "my.yaml"), str(tmp_path / "elsewhere.yaml")]

    def freeze(name: str, modules: list[str], copy: list[str]) -> Path:
        file = checkout / "app" / "train.py"
        return freeze_code(file, tmp_path / name, modules, copy, config, lines.append)

    frozen = freeze("run", ["app.train"], copy)
    tracked = {"app/train.py", "run.sh", "private/notes.py", ".env", ".gitignore"}
    copied = {str(p.relative_to(frozen)) for p in frozen.rglob("*") if p.is_file()}
    assert copied == tracked | code | named | {"my.yaml"}  # a tracked secret is part of the code
    for name in (*tracked, "private"):
        assert (frozen / name).stat().st_mode == (checkout / name).stat().st_mode, name
    too, left_out = lines
    assert all(name in too for name in code | named) and not any(name in too for name in others)
    assert left_out.endswith(f" and {len(others | secrets) - 1 - 20} more")

    # The names of secrets, one at a time.
    missed = [s for s in secrets if not any(SECRET.fullmatch(part) for part in Path(s).parts)]
    assert missed == [] and not any(SECRET.fullmatch(part) for n in code for part in Path(n).parts)

    # What the copy lacks is known before the job, and nothing is left of the launch.
    (checkout / "app" / "train.py").write_text("import tool\n")
    second = lambda: freeze("second", ["app.train"], [])  # noqa: E731
    message = refused(second, "No module named 'tool'", "copy=")
    assert "app.train cannot be imported" in message and not (tmp_path / "second").exists()
    assert (freeze("second", ["app.train"], [str(checkout / "tool.py")]) / "tool.py").exists()
    refused(lambda: freeze("third", ["app.train"], [str(tmp_path)]), f"copy: {tmp_path}", checkout)
    assert freeze("second", ["app.train", "tool"], []).name == "code"  # now of the package tool
    assert (tmp_path / "second" / "code.1" / "tool.py").exists()


@pytest.mark.parametrize(
    ("changed", "mode"),
    [
        ([], 0o644),
        (["app/train.py", "run.sh"], 0o644),
        (["app/train.py", ".env"], 0o600),  # a file of mode 600
        (["open/notes.py"], 0o644),
        (["private/notes.py"], 0o600),  # of mode 644, in a folder of mode 700
        (["private/gone.py"], 0o600),  # removed
    ],
)
def test_nobody_reads_in_the_changes_what_is_closed_in_the_checkout(
    checkout, tmp_path, changed, mode
):
    (checkout / "private" / "notes.py").chmod(0o644)
    write(checkout, "open/notes.py", "private/gone.py")
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["add", "-A"], ["commit", "-q", "-m", "more"]):
        subprocess.run([*git, *words], check=True)
    for name in changed:
        (checkout / name).write_text("# secret\n")
        if "gone" in name:
            (checkout / name).unlink()
    before = os.umask(0o022)
    try:
        first = freeze_code(checkout / "app/train.py", tmp_path / "a", ["app.train"], [], [], print)
        assert (tmp_path / "a" / "code.diff").stat().st_mode & 0o777 == mode
        os.umask(0o027)
        freeze_code(first / "app/train.py", tmp_path / "b", ["app.train"], [], [], print)
    finally:
        os.umask(before)
    assert (tmp_path / "b" / "code.diff").stat().st_mode & 0o777 == mode & ~0o027
    for name in (".env", "private", "run.sh", "."):  # the copy, and the copy of the copy
        modes = {(place / name).stat().st_mode for place in (checkout, first, tmp_path / "b/code")}
        assert len(modes) == 1, name


def test_the_version_of_a_copy_is_that_of_its_checkout(checkout, tmp_path):
    git = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    file = checkout / "app" / "train.py"
    for name, content, version in (("run", "1\n", commit), ("later", "2\n", f"{commit}-dirty")):
        file.write_text(content)
        copy = freeze_code(file, tmp_path / name, ["app.train"], [], [], print)
        assert code_version(file) == code_version(copy / "private" / "notes.py") == version
    assert code_version(tmp_path / "run" / "x.py") is None
