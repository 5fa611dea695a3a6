"""Saves of real runs that fail, or are written in the background: the run is the same one."""

import ctypes
import itertools
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from apps.main.config import TrainArgs
from apps.main.transformer import build
from lingua.app import Built
from tests.apps.runs import Outcome, Runs, differs, digests, train_here
from tests.programs import wait_for

LIBC = ctypes.CDLL(None)
LIMIT = 30_000  # bytes: enough for the lines of a run, not for its tensors
OFTEN = {"checkpoint.dump.every": 2, "stop_at": 7}
STOP = {"checkpoint.on_error": "stop"}
BACKGROUND = {"checkpoint.async_save": True}


@dataclass
class Fault:
    """A builder of a model on one of whose ranks files cannot grow, or cannot be made, from a step
    on to another. The saves before it, and the one that fails, may be under way: it waits."""

    kind: str  # `full` disk, or `read-only` folder
    rank: int
    begin: int
    end: int

    def __call__(self, args: TrainArgs) -> Built:
        built, forwards, dump_dir = build(args), itertools.count(1), Path(args.dump_dir)

        def forward_pre(module: Any, inputs: Any) -> None:
            if not module.training:
                return
            step = next(forwards)
            if int(os.environ["RANK"]) == self.rank and step == self.begin:
                wait_for((dump_dir / "checkpoints" / "0000000002").exists)
                if self.kind == "full":
                    limit(LIMIT)
                else:
                    protect(dump_dir / "checkpoints")
            elif int(os.environ["RANK"]) == self.rank and step == self.end:
                wait_for(lambda: "could not be saved" in (dump_dir / "train.log").read_text())
                mend(dump_dir / "checkpoints")

        built.module.register_forward_pre_hook(forward_pre)
        return built


def limit(n_bytes: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))


def protect(folder: Path) -> None:
    """This thread can make no files in a folder."""
    folder.chmod(0o555)
    set_privileged(False)


def mend(folder: Path) -> None:
    limit(resource.RLIM_INFINITY)
    set_privileged(True)
    folder.chmod(0o755)


def set_privileged(privileged: bool) -> None:
    """Whether the mode of a file concerns root too: by the capabilities CAP_DAC_OVERRIDE and
    CAP_DAC_READ_SEARCH."""
    if os.geteuid() == 0:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
        sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; low half first
        assert LIBC.capget(header, sets) == 0
        bits = 1 << 1 | 1 << 2
        sets[0] = sets[0] | bits if privileged else sets[0] & ~bits
        assert LIBC.capset(header, sets) == 0


def train_with_here(overrides: dict[str, Any], fault: Fault) -> dict[str, Any]:
    try:
        return train_here(overrides, fault)
    finally:
        mend(Path(overrides["dump_dir"]) / "checkpoints")


def train_with(fault: Fault, runs: Runs, settings: dict[str, Any]) -> Outcome:
    dump_dir = runs.folder / str(next(runs.numbers))
    config = runs.config((1, 2, 1), settings | {"dump_dir": dump_dir})
    return Outcome(dump_dir, runs.ranks.run(2, train_with_here, config, fault))


@pytest.fixture(scope="module")
def through(runs: Runs) -> Outcome:
    return runs.train((1, 2, 1), OFTEN)


def steps_saved(run: Outcome) -> list[int]:
    return sorted(int(path.name) for path in run.checkpoint(0).parent.iterdir())


@pytest.mark.parametrize(
    ("kind", "rank", "settings"),
    [("full", 0, {}), ("full", 1, BACKGROUND), ("read-only", 0, {})],
)  # fmt: skip
def test_a_run_goes_on_over_a_save_that_fails(runs, through, kind, rank, settings):
    run = train_with(Fault(kind, rank, begin=4, end=6), runs, OFTEN | settings)
    assert run.error is None
    assert steps_saved(run) == [2, 6, 7]
    [told] = [line for line in run.log.splitlines() if "error: " in line]
    assert "step 4 could not be saved" in told and "training goes on" in told
    assert {"full": "File too large", "read-only": "Permission denied"}[kind] in told
    assert differs(run, through) == []
    assert digests(run.tensors(6)) == digests(through.tensors(6))


@pytest.mark.parametrize(
    ("settings", "step"),
    [(BACKGROUND, 7), (STOP, 4), (BACKGROUND | STOP, 4)],
    ids=["the last, in the background", "stop", "stop, in the background"],
)
def test_a_run_ends_with_an_error_where_its_last_save_fails(runs, through, settings, step):
    settings = OFTEN | settings | {"checkpoint.dump.keep": 1}
    run = train_with(Fault("full", 1, begin=4, end=99), runs, settings)
    assert f"step {step} could not be saved into {run.checkpoint(0).parent}: " in run.error
    assert "File too large" in run.error
    assert steps_saved(run) == [2]  # which stays until another is published
    assert step == 4 or f"the newest checkpoint is {run.checkpoint(2)}" in run.error
    assert max(run.column("step")) in ((7,) if step == 7 else (4, 5, 6))
    again = runs.train((1, 2, 1), OFTEN, dump_dir=run.dump_dir)
    assert differs(again, through) == [] and steps_saved(again) == [2, 4, 6, 7]
