"""The floor, what a run is trusted by, does without the shelf, lingua/tools: runs on prepared
shards. That imports go one way: test_source.py."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lingua.run.records import Record
from tests.programs import OF_OTHERS, python

ROOT = Path(__file__).parents[1]
MAX_LINES = 11_032
# Lines of the files of this repository that a process has loaded, by module.
LOADED = """
def loaded():
    import sys, pathlib
    ours = {n: m.__file__ for n, m in sys.modules.items() if n.split(".")[0] in ("lingua", "apps")}
    ours["__main__"] = None
    return {n: len(pathlib.Path(f).read_text().splitlines()) for n, f in ours.items() if f}
"""


def run_python(code: str, folder: Path = ROOT) -> str:
    """The standard output of a program in a new process, whose modules are those in `folder`."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, prepared."""
    folder = tmp_path_factory.mktemp("text")
    write_text(folder, "some text of a document")
    prepare = "import sys; from lingua.__main__ import main; sys.argv[1:] = {}; main()"
    run_python(prepare.format(["data", "prepare", *words(folder)]))
    return folder


def write_text(folder: Path, line: str) -> None:
    lines = [json.dumps({"text": f"{line} {i} " * 30}) + "\n" for i in range(60)]
    (folder / "words.jsonl").write_text("".join(lines))


def words(text: Path, *more: str) -> list[str]:
    """The command line of a run of small.yaml on the source in the folder `text`."""
    config = ROOT / "apps/main/configs/small.yaml"
    sizes = ["model.dim=32", "model.n_heads=2", "data.seq_len=64", "logging.freq=1"]
    return [f"config={config}", f"data.root_dir={text}", "data.sources={words: 1}", *sizes, *more]


def train(argv: list[str], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [*python(OF_OTHERS), "-m", "apps.main.train", *argv]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_run_on_prepared_shards_loads_few_lines_and_no_tool(text: Path, tmp_path: Path) -> None:
    argv = words(text, f"dump_dir={tmp_path}", "steps=3", "optim.warmup=1")
    code = f"{LOADED}\nimport json\nfrom apps.main.train import main\nmain({argv})\n"
    *_, last = run_python(f"{code}print(json.dumps(loaded()))").splitlines()
    lines = json.loads(last)
    assert (tmp_path / "receipt.json").exists()
    assert "lingua.parallel.parallelize" in lines
    assert not [name for name in lines if name.startswith("lingua.tools")]
    assert sum(lines.values()) <= MAX_LINES


def test_without_the_shelf_a_run_trains_stops_and_resumes(text: Path, tmp_path: Path) -> None:
    floor = tmp_path / "floor"
    for name in ("lingua", "apps"):
        shutil.copytree(ROOT / name, floor / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(floor / "lingua" / "tools")
    dump_dir = tmp_path / "run"
    for end in (2, 4):
        done = train(words(text, f"dump_dir={dump_dir}", f"stop_at={end}"), floor)
        assert done.returncode == 0, done.stderr
        assert ("plan.json needs lingua.tools" in done.stdout) == (end == 4)
        (dump_dir / "plan.json").touch()  # is compared with the run at its end
        (text / "words.jsonl").touch()  # its stat differs, its content does not
    whole = tmp_path / "whole"  # with the shelf
    assert train(words(text, f"dump_dir={whole}", "stop_at=4")).returncode == 0
    hashes = [Record(run).metrics.text("batch_hash") for run in (dump_dir, whole)]
    assert hashes[0] == hashes[1] and len(set(hashes[0])) == 4

    write_text(text, "other text of a document")
    done = train(words(text, f"dump_dir={dump_dir}"), floor)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    for part in ("data.sources.words", "words.jsonl", "changed", "needs lingua.tools"):
        assert part in done.stderr

    write_text(text, "some text of a document")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text('{"model_type": "llama"}')
    torch.save({"model": {}}, tmp_path / "weights.pth")
    init_from = "checkpoint.init_from"
    done = train(words(text, f"dump_dir={tmp_path}/next", f"{init_from}={whole}", "steps=1"), floor)
    assert done.returncode == 0 and f"{whole}/checkpoints/0000000004" in done.stdout, done.stderr
    for key, value in (
        ("eval.tasks", "[hellaswag]"),
        (init_from, tmp_path / "hf"),
        (init_from, tmp_path / "weights.pth"),
    ):
        done = train(words(text, f"dump_dir={tmp_path}/new", f"{key}={value}"), floor)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert key in done.stderr and "needs lingua.tools, which is not" in done.stderr
