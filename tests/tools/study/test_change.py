"""What a try changes: all of it is seen, and what measures a run is refused by name."""

import subprocess
from pathlib import Path

import pytest

from lingua.tools.study import change
from tests.mistakes import refused

pytestmark = pytest.mark.quick
ROOT = Path(__file__).parents[3]
BASE = {
    "apps/main/train.py": "x = 1\ny = 2\nz = 3\n",
    "apps/main/old.py": "old\n",
    "apps/onefile/train.py": (ROOT / "apps/onefile/train.py").read_text(),
    "lingua/model/head.py": "loss\n",
    "docs/page.md": "text\n",
}


@pytest.fixture
def study(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)  # a study inside of a checkout
    (tmp_path / "runs/study" / change.CODES).mkdir(parents=True)
    return tmp_path / "runs/study"


def code(study: Path, files: dict[str, str | None]) -> str:
    """The hash of the base's files with these in their place."""
    new = study / change.CODES / "new"
    for name, text in (BASE | files).items():
        if text is not None:
            (new / "code" / name).parent.mkdir(parents=True, exist_ok=True)
            (new / "code" / name).write_text(text)
    (new / "code.diff").touch()
    return change._keep(new)


@pytest.mark.parametrize(
    "setting", ["core.bare=false", "diff.noprefix=true", "diff.external=false"]
)
def test_a_difference_applied_to_the_base_is_the_code_of_the_try(study, monkeypatch, setting):
    """Whatever the user's git is set to."""
    key, value = setting.split("=")
    for name, text in (("COUNT", "1"), ("KEY_0", key), ("VALUE_0", value)):
        monkeypatch.setenv(f"GIT_CONFIG_{name}", text)
    base = code(study, {})
    changes = {"apps/main/train.py": "x = 1\ny = 5\nz = 3\n", "apps/main/old.py": None}
    new = code(study, {**changes, "apps/new/model.py": "new\n"})
    patch = study / "try.diff"
    patch.write_bytes(change.difference(study, base, new))
    assert change.patched(study, base, [patch]) == new
    assert sorted(path.name for path in (study / change.CODES).iterdir()) == sorted([base, new])
    expected = ["apps/main/old.py", "apps/main/train.py", "apps/new/model.py"]
    assert change.changed_files(study, base, new) == expected
    other = study / "other.diff"
    other.write_bytes(patch.read_bytes().replace(b"-y = 2", b"-y = 7"))
    refused(lambda: change.patched(study, base, [other]), other, "does not apply")
    assert len(list((study / change.CODES).iterdir())) == 2


def test_pages_and_tests_are_no_change(study):
    base = code(study, {})
    pages = {"docs/page.md": "other\n", "README.md": "new\n", "tests/test_x.py": "new\n"}
    assert code(study, pages) == base and change.changed_files(study, base, base) == []
    assert code(study, {"setup/run.sh": "new\n"}) != base


MEASURES = [
    "lingua/model/head.py",
    "lingua/tokenizer/build.py",
    "lingua/data/token_source.py",
    "lingua/monitor/held_out.py",
    "lingua/tools/study/rule.py",
    "lingua/tools/prepare/build.py",
]


@pytest.mark.parametrize("name", MEASURES)
def test_what_measures_a_run_is_refused(study, name):
    base = code(study, {})
    assert (ROOT / name).exists()
    new = code(study, {name: "0.5 * loss\n", "apps/main/train.py": "other\n"})
    message = refused(lambda: change.changed_files(study, base, new), name)
    assert "apps/main/train.py" not in message


@pytest.mark.parametrize(
    "before, after, may",
    [
        ("F.silu(self.w1(x))", "F.relu(self.w1(x)).square()", True),
        ("height = 0.5 * (1 +", "height = 0.4 * (1 +", True),
        ("total = math.fsum", "total = 0.5 * math.fsum", False),
        ('reduction="none")', 'reduction="none") / 2', False),
        ("if block[0] < 2**32 // 50", "if block[0] < 2**32 // 9", False),
        ("    return at  # end of measured", "    return at", False),
        ("@torch.no_grad()  # measured", "@torch.no_grad()", False),
    ],
)
def test_the_lines_of_a_file_that_measure_are_refused(study, before, after, may):
    file = "apps/onefile/train.py"
    assert BASE[file].count(before) == 1
    base, new = code(study, {}), code(study, {file: BASE[file].replace(before, after)})
    if may:
        assert change.changed_files(study, base, new) == [file]
    else:
        refused(lambda: change.changed_files(study, base, new), file, "measured")


def test_keys_of_the_text_and_of_the_study_are_refused():
    before = {"optim.lr": 1.0, "data.sources": {"a": 1.0, "b": 1.0}, "validation.bytes": 5}
    before |= {"data.tokenizer.name": "bytes", "data.seq_len": 8, "model.dim": 8}
    good = {"optim.lr": 2.0, "data.sources": {"a": 3.0, "b": 1.0}, "data.seq_len": 9, "new.key": 1}
    assert change.changed_keys(before, before | good) == {
        key: [before.get(key), value] for key, value in good.items()
    }
    for key, value in {
        "validation.bytes": 6,
        "data.tokenizer.name": "hf",
        "data.sources": {"a": 1.0},
        "data.root_dir": "other",
        "stop_at": 5,
        "data.add_eos": False,
    }.items():
        refused(lambda k=key, v=value: change.changed_keys(before, {**before, k: v}), key)


def test_files_of_all_kinds_are_seen(study):
    base = code(study, {})
    for name in (".env.py", "apps/main/configs/small.yaml", "setup/x.cu"):
        assert change.changed_files(study, base, code(study, {name: "x"})) == [name]
