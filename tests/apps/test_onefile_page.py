"""The changes that docs/onefile.md shows: each of them trains, and is another run."""

import importlib.util
import json
import signal
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from tests.test_docs import ROOT, Block, blocks

pytestmark = pytest.mark.quick
FILE = "apps/onefile/train.py"
CHANGES = [block for block in blocks(ROOT / "docs/onefile.md") if block.is_change]
WORDS = ["steps=30", "optim.warmup=5", "optim.lr=2e-3", "logging.freq=1", "validation.tokens=64"]
WORDS += ["data.seq_len=32", "data.batch_size=4", "model.dim=32", "model.n_layers=2", "device=cpu"]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Those of this process after a run in it, which has its own."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def changed(source: str, change: str) -> str:
    """The file with a change; `...` among the lines that go stands for all up to the next."""
    rest = change.splitlines()
    while rest:
        old = list(takewhile(lambda line: line[0] != "+", rest))
        new = list(takewhile(lambda line: line[0] == "+", rest[len(old) :]))
        rest = rest[len(old) + len(new) :]
        first, _, last = "".join(f"{line[1:]}\n" for line in old).partition("        ...\n")
        begin = source.index(first)
        end = source.index(last, begin + len(first)) + len(last)
        kept = "".join(f"{line[1:]}\n" for line in old if line[0] == " ")
        source = source[:begin] + kept + "".join(f"{line[1:]}\n" for line in new) + source[end:]
    return source


@cache
def losses(source: str) -> list[float]:
    """By step, of a small run of the file with this text."""
    with TemporaryDirectory() as folder:
        np.tile(np.arange(64, dtype="<u2"), 200).tofile(f"{folder}/train.bin")
        path = Path(folder, "train.py")
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("changed", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        words = [f"bin={folder}/train.bin", f"dump_dir={folder}", *WORDS]
        module.train(module.read_config(words), lambda: None)
        lines = Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [line["loss"] for line in map(json.loads, lines) if "event" not in line]


@pytest.mark.parametrize("change", CHANGES, ids=lambda block: block.where)
def test_each_change_of_the_page_trains_and_is_another_run(change: Block) -> None:
    source = (ROOT / FILE).read_text(encoding="utf-8")
    before, after = losses(source), losses(changed(source, change.text))
    assert len(after) == 30 and after[-1] < 0.8 * after[0]
    assert after[-1] != before[-1]


def test_five_ideas_are_shown() -> None:
    assert len(CHANGES) == 5 and all(change.info == FILE for change in CHANGES)
