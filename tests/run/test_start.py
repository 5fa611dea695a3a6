"""A start reads each file once: what the process of a run opens before its first step."""

import base64
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

# Counts the files that are opened until config.yaml is written, the end of a start.
MAIN = """
import json, os, sys
from collections import Counter
opened, started = Counter(), []

def count(event, arguments):
    if event == "open" and not started and isinstance(arguments[0], str | os.PathLike):
        opened[str(arguments[0])] += 1
        started.extend([True] * str(arguments[0]).startswith(f"{dump_dir}/config.yaml.tmp"))

dump_dir, *argv = sys.argv[1:]
sys.addaudithook(count)
from apps.main.train import main
main([*argv, f"dump_dir={dump_dir}"])
assert started
print("OPENED " + json.dumps(opened))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of two layers, its text, and a run that has made two steps."""
    folder = tmp_path_factory.mktemp("start")
    lines = (json.dumps({"text": f"some text of document {i} " * 30}) for i in range(60))
    (folder / "words.jsonl").write_text("\n".join(lines))
    small = Path("apps/main/configs/small.yaml").absolute()
    (folder / "base.yaml").write_text(f"base: {small}\ndata: {{root_dir: {folder}, seq_len: 64}}\n")
    (folder / "run.yaml").write_text("base: base.yaml\ndata: {sources: {words: 1}}\n")
    start(folder, 2)
    return folder


def start(folder: Path, stop_at: int) -> Counter[str]:
    """How often the start of a process of the run, which trains to `stop_at`, opened each file."""
    words = [f"config={folder / 'run.yaml'}", f"stop_at={stop_at}", "model.dim=32"]
    words += ["model.n_heads=2", "checkpoint.verify=full"]
    command = [sys.executable, "-c", MAIN, str(folder / "run"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *_, line = done.stdout.splitlines()
    return Counter(json.loads(line.removeprefix("OPENED ")))


def test_a_start_on_prepared_text_opens_each_file_once(folder: Path) -> None:
    opened = start(folder, 3)

    def times(pattern: str) -> set[int]:
        return {opened[str(path)] for path in folder.rglob(pattern)}

    assert times("run.yaml") == times("base.yaml") == {1}
    assert times(".tokens/*/manifest.json") == {1}
    saved = "run/checkpoints/0000000002"
    for name in ("manifest.json", "train_state.json", "config.yaml"):
        assert times(f"{saved}/{name}") == {1}, name
    assert times(f"{saved}/*.distcp") == times(f"{saved}/.metadata") == {2}  # verified, loaded
    assert max(times(".tokens/*/*.tokens")) == 1
    assert times("words.jsonl") == {0}


def test_a_touched_source_is_read(folder: Path) -> None:
    os.utime(folder / "words.jsonl")
    assert start(folder, 4)[str(folder / "words.jsonl")] == 1


def test_a_rank_whose_tokenizer_is_another_than_that_of_rank_0_ends_the_run(
    folder: Path, tmp_path: Path
) -> None:
    """As where nodes share no folder, or the object at a URL was changed between two downloads."""
    tokens = [*(bytes([i]) for i in range(256)), b"th"]
    lines = [base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens)]
    for rank, n in enumerate((257, 256)):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "some.tiktoken").write_bytes(b"".join(lines[:n]))
    script = f"cd {tmp_path}/$RANK && PYTHONPATH={Path().absolute()} exec {sys.executable} -m "
    script += f"apps.main.train config={folder / 'run.yaml'} dump_dir={tmp_path / 'run'} "
    script += "'data.tokenizer={name: tiktoken, path: some.tiktoken}'"
    command = ["torchrun", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
    command += ["localhost:0", "--no-python", "bash", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    need = "data.tokenizer.path = some.tiktoken: has another content than on rank 0"
    assert done.returncode and need in done.stderr, done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
