"""Runs of apps/onefile/train.py, or of a copy with a fault, in a rank of the tests."""

import functools
import io
import itertools
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from lingua.model import head
from tests.apps.runs import SMALL, Outcome, Runs, digests

FILE = Path("apps/onefile/train.py")
ONE = (1, 1, 1)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
# What a line has that both programs must compute.
COLUMNS = ("step", "tokens", "loss", "grad_norm", "lr", "batch_hash", "skipped_steps")
Changes = tuple[
    tuple[str, str], ...
]  # texts of the file, and what a faulty copy has in their place


def compiled(changes: Changes = ()) -> Any:
    text = FILE.read_text()
    for before, after in changes:
        assert text.count(before) == 1, f"{before!r} is {text.count(before)} times in {FILE}"
        text = text.replace(before, after)
    return compile(text, str(FILE), "exec")


@functools.cache
def module() -> Any:
    """The names of the file."""
    names: dict[str, Any] = {"__name__": "onefile"}
    exec(compiled(), names)
    return type("File", (), names)


def run_file(words: list[str], changes: Changes = ()) -> dict[str, Any]:
    """The program in this process, which is afterwards as it was: its code, and what it printed."""
    handlers = {n: signal.getsignal(n) for n in SIGNALS}
    argv, threads, printed, code = sys.argv, torch.get_num_threads(), io.StringIO(), 0
    sys.argv = [str(FILE), *words]
    torch.use_deterministic_algorithms(False)  # an earlier run of this rank may have set it
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            exec(compiled(changes), {"__name__": "__main__"})
    except SystemExit as left:
        code = left.code
    finally:
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    text = printed.getvalue()
    return {"error": text.splitlines()[-1] if code else None, "code": code, "printed": text}


def in_chunks(n_bytes: int, work: Callable[..., Any], *args: Any) -> Any:
    """What `work` returns where apps/main computes this many bytes of logits at a time."""
    usual, head.CHUNK_BYTES = head.CHUNK_BYTES, n_bytes
    try:
        return work(*args)
    finally:
        head.CHUNK_BYTES = usual


@dataclass
class OneFile:
    """Starts runs of the file, over the config SMALL."""

    runs: Runs
    folder: Path
    numbers: Any = field(default_factory=itertools.count)

    def words(self, settings: dict[str, Any], dump_dir: Path | None = None) -> list[str]:
        dump_dir = dump_dir or self.folder / str(next(self.numbers))
        values = SMALL | {"data.root_dir": self.runs.text, "dump_dir": dump_dir} | settings
        return [f"{key}={value}" for key, value in values.items()]

    def train(
        self,
        settings: dict[str, Any] | None = None,
        dump_dir: Path | None = None,
        changes: Changes = (),
        refused: bool = False,
    ) -> Outcome:
        return self.start(self.words(settings or {}, dump_dir), changes, refused)

    def start(self, words: list[str], changes: Changes = (), refused: bool = False) -> Outcome:
        [result] = self.runs.ranks.run(1, run_file, words, changes)
        dump_dir = next(w.partition("=")[2] for w in reversed(words) if w.startswith("dump_dir="))
        assert result["code"] == (2 if refused else 0), result["printed"]
        return Outcome(Path(dump_dir), [result])


@pytest.fixture(scope="session")
def onefile(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> OneFile:
    return OneFile(runs, tmp_path_factory.mktemp("onefile"))


def results(run: Outcome) -> dict[str, Any]:
    """All that must be equal to the bit."""
    lines = [{key: line[key] for key in COLUMNS} for line in run.lines]
    step = lines[-1]["step"]
    return {"lines": lines, "tensors": digests(run.tensors(step)), **saved(run.state(step))}


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint has beside its tensors, without times."""
    progress = {k: state["progress"][k] for k in ("step", "position", "skipped_steps")}
    return {"progress": progress, "data": state["data"]}


def different(run: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What two results do not have in common."""
    columns = [
        key
        for key in COLUMNS
        if [line[key] for line in run["lines"]] != [line[key] for line in other["lines"]]
    ]
    return columns + [key for key in run if key != "lines" and run[key] != other[key]]
