"""Runs whose processes are killed with SIGKILL: nothing is caught, flushed or said. They go on from
the last checkpoint that was published, on another topology, and end as the run that never stopped.

When is drawn at random from a seed: during the start, in training, or in a save. What is on disk
after each kill is verified here by zlib, without the product's help.
"""

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.apps.meshes import Sizes, mesh
from tests.apps.runs import Runs, differs
from tests.apps.test_resume import start
from tests.programs import state_of, wait_for

PATIENCE_S = 120
# Every step is saved, so that a moment of training is likely to be one of a save too. The rate is
# low enough that orders of sums stay within the tolerance over all steps.
SETTINGS: dict[str, Any] = {
    "steps": 1000,
    "stop_at": "null",
    "optim.lr": 1e-3,
    "checkpoint.dump.every": 1,
    "checkpoint.dump.keep": 3,
}
ONE: Sizes = (1, 1, 1)
TEN: list[Sizes] = [ONE, (1, 1, 2), ONE, (2, 1, 1), ONE, (1, 2, 2), ONE, (1, 2, 1), ONE, ONE]


@dataclass
class Killed:
    """A run and those who kill it."""

    text: Path
    dump_dir: Path
    chance: random.Random
    in_a_save: int = 0  # kills that left a save unfinished
    in_the_start: int = 0  # kills before the first step of a start
    alone: int = 0  # kills of one rank out of several
    steps: list[int] = field(default_factory=list)  # of the newest checkpoint after each

    @property
    def checkpoints(self) -> Path:
        return self.dump_dir / "checkpoints"

    def log(self) -> str:
        path = self.dump_dir / "train.log"
        return path.read_text() if path.exists() else ""

    def start_and_kill(self, sizes: Sizes) -> None:
        n = math.prod(sizes)
        before, log = self.published(), self.log()
        leftovers = self.unfinished()
        background = self.chance.random() < 0.5
        job = self.start(sizes, {"checkpoint.async_save": background})
        moment = self.chance.choices(("start", "training", "save"), (1, 3, 3))[0]
        if moment == "start":
            time.sleep(self.chance.uniform(1, 5))
        else:
            step_line = re.compile(r" step +\d+ loss")
            self.wait(job, lambda: len(step_line.findall(self.log()[len(log) :])) > 2)
            time.sleep(self.chance.uniform(0, 0.5))
        if moment == "save":
            leftovers = self.unfinished()
            self.wait(job, lambda: self.unfinished() - leftovers)
            time.sleep(self.chance.uniform(0, 0.03))
        self.kill(job, n)

        said = self.log()[len(log) :]
        self.in_a_save += bool(self.unfinished() - leftovers)
        self.in_the_start += " step " not in said
        after = self.published()
        assert not before or max(after) >= max(before)
        self.steps.append(max(after, default=0))
        assert "damaged" not in said and "not a whole checkpoint" not in said
        for line in re.findall(r"resuming (.*) \(step", said):
            assert line == str(self.checkpoints / f"{max(before):010d}")

    def start(self, sizes: Sizes, settings: dict[str, Any]) -> subprocess.Popen[str]:
        where = {"data.root_dir": self.text, "dump_dir": self.dump_dir}
        config = SETTINGS | where | mesh(sizes) | settings
        self.dump_dir.mkdir(exist_ok=True)
        with (self.dump_dir / "said.txt").open("ab") as said:
            return start(
                math.prod(sizes), [sys.executable], config, stdout=said, start_new_session=True
            )

    def wait(self, job: subprocess.Popen[str], condition: Callable[[], Any]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            fine = job.poll() is None and time.monotonic() < end
            assert fine, (self.dump_dir / "said.txt").read_text()[-4000:]
            time.sleep(0.001)

    def kill(self, job: subprocess.Popen[str], n: int) -> None:
        """All processes at once, as a machine does that fails; or one rank, as one that runs out of
        memory, whose launcher then ends the others."""
        ranks = children(job.pid) if n > 1 else []
        if len(ranks) == n and self.chance.random() < 0.3:
            self.alone += 1
            os.kill(self.chance.choice(ranks), signal.SIGKILL)
            assert job.wait(PATIENCE_S) != 0
        else:
            for pid in (*ranks, job.pid):  # torchrun gives each rank a process group of its own
                os.killpg(pid, signal.SIGKILL)
            job.wait()
        wait_for(lambda: {state_of(pid) for pid in ranks} <= {*"ZX"}, seconds=PATIENCE_S)

    def unfinished(self) -> set[str]:
        """Folders of saves that are under way or never will be: no old checkpoint, half removed."""
        names = {path.name for path in self.checkpoints.iterdir()} if self.log() else set()
        newest = max((name for name in names if name.isdigit()), default="")
        return {name for name in names if ".tmp-" in name and name[:10] > newest}

    def published(self) -> list[int]:
        """The steps that have a folder of their own name; each must be whole."""
        steps = []
        for folder in self.checkpoints.glob("[0-9]" * 10):
            manifest = json.loads((folder / "manifest.json").read_text())
            assert manifest["step"] == int(folder.name)
            for name, entry in manifest["files"].items():
                content = (folder / name).read_bytes()
                assert len(content) == entry["size"]
                assert xxhash.xxh3_64_hexdigest(content) == entry["xxh3_64"]
            steps.append(int(folder.name))
        return steps


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    found = [int(c) for task in tasks.iterdir() for c in (task / "children").read_text().split()]
    return [c for c in found if b"RANK=" in Path(f"/proc/{c}/environ").read_bytes()]


def survives(runs: Runs, folder: Path, topologies: list[Sizes], seed: int) -> Killed:
    """Kill a run once on each topology, let it go on a few steps more, and compare."""
    killed = Killed(runs.text, folder / "killed", random.Random(seed))
    for sizes in topologies:
        killed.start_and_kill(sizes)
    settings = SETTINGS | {"stop_at": killed.steps[-1] + 3}
    run = runs.train(ONE, settings, dump_dir=killed.dump_dir)
    whole = runs.train(ONE, settings | {"checkpoint.dump.every": 0})
    last = settings["stop_at"]
    print(
        f"{len(topologies)} kills over {last} steps: {killed.in_a_save} in a save, "
        f"{killed.in_the_start} before the first step, {killed.alone} of one rank alone; "
        f"newest checkpoints {killed.steps}"
    )
    assert run.column("step") == list(range(1, last + 1))
    assert differs(run, whole) == []
    assert not list(killed.checkpoints.glob("*.tmp-*"))
    return killed


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0])
def test_a_run_killed_ten_times_goes_on_as_the_same_run(runs, tmp_path, seed):
    killed = survives(runs, tmp_path, TEN, seed)
    assert killed.in_a_save and killed.steps[-1] > 10
