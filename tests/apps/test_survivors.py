"""A rank of several dies by SIGKILL, and no save was due. Where a replica survives, the next start
goes on from the newest step that is complete in it, and all tensors are to the bit those of a run
left alone; where none does, or a part cannot be used, it goes on from the last checkpoint."""

import json
import math
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.apps.meshes import Sizes, mesh
from tests.apps.runs import SMALL, Outcome, Runs
from tests.programs import python
from tests.ranks import free_port

PROGRAM = """
import os, pathlib, sys, threading, time
from apps.main.train import Objective, main
from lingua.base.errors import UserError
from lingua.optim import optimizer
from lingua.parallel.program import run_program
folder, victims, half, delay_s, *argv = sys.argv[1:]
file, flag = pathlib.Path(folder, "metrics.jsonl"), pathlib.Path(folder, "half")
rank, loss = os.environ["RANK"], Objective.loss
def lines():
    return file.read_text().count('"loss"') if file.exists() else 0
def die_in_step_6(self, micro):  # the line of step 5 is written meanwhile
    if micro.step == 6:
        while lines() < 5:
            time.sleep(0.005)
        time.sleep(0.5)
        if delay_s == "mistake":
            raise UserError("a mistake, as this test plants", local=True)
        os.kill(os.getpid(), 9)
    return loss(self, micro)
def die():
    while not (flag.exists() if half else lines() > 2):
        time.sleep(0.005)
    time.sleep(float(delay_s))
    os.kill(os.getpid(), 9)
whole, n = optimizer.update_adamw, 0
def update_half(parameters, grads, states, *settings):
    global n
    n += 1
    if n < 10:
        return whole(parameters, grads, states, *settings)
    whole(parameters[:3], grads[:3], states[:3], *settings)
    flag.touch()
    time.sleep(8)
    raise RuntimeError("Connection closed by peer, as this test plants")
if rank in victims.split(","):
    if delay_s in ("None", "mistake"):
        Objective.loss = die_in_step_6
    else:
        threading.Thread(target=die, daemon=True).start()
if rank == half:
    optimizer.update_adamw = update_half
run_program(lambda: main(argv))
"""
SETTINGS: dict[str, Any] = SMALL | {"steps": 100_000, "stop_at": "null", "data.batch_size": 2}
SETTINGS |= {"deterministic": "mesh", "checkpoint.dump.every": 0, "validation.every": 0}


@dataclass
class Killed:
    """A run some of whose ranks died."""

    dump_dir: Path
    told: list[str]  # what each rank printed to stderr
    last: int  # step that rank 0 has logged

    @property
    def saved(self) -> int:
        """The step of which survivors say that they have saved it."""
        [step] = set(re.findall(r"saved its part of step (\d+)", "".join(self.told)))
        return int(step)


def killed(
    runs: Runs,
    folder: Path,
    sizes: Sizes,
    victims: list[int],
    delay_s: float | None = None,
    half: str = "",
    settings: dict[str, Any] | None = None,
    mistake: bool = False,
) -> Killed:
    """Start a run, kill some ranks in the forward of step 6, or at any moment, `delay_s` after some
    lines, and wait until the others have ended by an error. Or the ranks have a `mistake` there."""
    n, values = math.prod(sizes), SETTINGS | mesh(sizes) | (settings or {})
    values |= {"data.root_dir": runs.text, "dump_dir": folder}
    how = "mistake" if mistake else delay_s
    words = [str(word) for word in (folder, ",".join(map(str, victims)), half, how)]
    words += [f"{k}={v}" for k, v in values.items()]
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env |= {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n), "OMP_NUM_THREADS": "1"}
    files, processes = [folder.with_suffix(f".{r}") for r in range(n)], []
    try:
        for r, file in enumerate(files):
            with file.open("w") as err:
                place = env | {"RANK": str(r), "LOCAL_RANK": str(r)}
                command = [*python(), "-c", PROGRAM, *words]
                processes.append(subprocess.Popen(command, env=place, stdout=-3, stderr=err))
        for r, process in enumerate(processes):
            code = process.wait(120)
            assert code == ((2 if mistake else -9) if r in victims else 1), files[r].read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    told = [file.read_text() for file in files]
    return Killed(folder, told, Outcome(folder, []).column("step")[-1])


def goes_on(runs: Runs, run: Killed, settings: dict[str, Any] | None = None) -> Outcome:
    """The run after its next start, on one rank, which takes two steps after what was saved."""
    settings = SETTINGS | {"stop_at": run.saved + 2} | (settings or {})
    had_it = Outcome(run.dump_dir, []).checkpoint(run.saved).exists()  # a save of that step
    after = runs.train((1, 1, 1), settings, dump_dir=run.dump_dir)
    assert (f"published step {run.saved}, which survivors" in after.log) != had_it
    assert f"resuming {after.checkpoint(run.saved)} " in after.log
    assert not list(run.dump_dir.glob("checkpoints/*survivors*"))
    return after


def digest(runs: Runs, step: int, settings: dict[str, Any] | None = None) -> tuple[str, str]:
    """Of all tensors of a run left alone after `step` and the one before."""
    settings = SETTINGS | {"stop_at": step, "checkpoint.dump.every": 1} | (settings or {})
    alone = runs.train((1, 1, 1), settings)
    return alone.state(step)["tensors"], alone.state(step - 1)["tensors"]


@pytest.fixture(scope="module")
def survived(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    return killed(runs, tmp_path_factory.mktemp("survived") / "run", (2, 2, 1), [3])


def test_the_next_start_has_the_newest_step_of_the_replica_that_survives(runs, survived, tmp_path):
    run = Killed(shutil.copytree(survived.dump_dir, tmp_path / "run"), survived.told, survived.last)
    parts = [f"saved its part of step {run.saved}, as one of 2 survivors of replica 1 of 2"]
    assert [text.count(*parts) for text in run.told] == [1, 1, 0, 0], run.told
    assert "is saved by replica 1 of 2" in run.told[2]
    assert run.last == run.saved == 5
    after, (alone, before) = goes_on(runs, run), digest(runs, run.saved)
    assert after.state(run.saved)["tensors"] == alone != before
    assert after.column("step") == list(range(1, run.saved + 3))
    state = after.state(run.saved)
    assert state["progress"]["position"] == 7 * run.saved == 7 * state["schedule"]["step"]
    # torch's own reader reads it too
    assert after.tensors(run.saved)["model.norm.weight"].shape == (22,)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("__1_0.distcp", _flip),
        ("__1_0.distcp", Path.unlink),
        ("rank-1.json", _flip),
        ("rank-0.json", Path.unlink),
    ],
)
def test_a_copy_with_a_damaged_or_missing_part_is_not_published(
    runs, survived, tmp_path, name: str, work: Callable[[Path], None]
):
    folder = shutil.copytree(survived.dump_dir, tmp_path / "run")
    work(folder / "checkpoints" / "survivors-1" / name)
    after = runs.train((1, 1, 1), SETTINGS | {"stop_at": 2}, dump_dir=folder)
    assert after.log.count("what survivors of an earlier start have saved is not used: ") == 1
    assert "published" not in after.log and after.column("step") == [1, 2]
    assert [path.name for path in folder.glob("checkpoints/*")] == ["0000000002"]


@pytest.mark.parametrize("settings", [{"validation.every": 5}, {"samples.every": 5}, {}])
def test_a_copy_is_not_published_where_what_is_due_after_its_step_may_lack(
    runs, survived, tmp_path, settings
):
    folder, step = shutil.copytree(survived.dump_dir, tmp_path / "run"), survived.saved
    if not settings:  # its own line
        metrics = folder / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True)
        metrics.write_text("".join(line for line in lines if json.loads(line)["step"] < step))
    after = runs.train((1, 1, 1), SETTINGS | {"stop_at": 1} | settings, dump_dir=folder)
    assert f"what is due after step {step} may not have been written" in after.log
    assert "published step" not in after.log and after.column("step") == [1]


def test_after_a_mistake_on_one_rank_no_copy_is_saved(runs, tmp_path):
    """The next start would meet it again, and the last checkpoint is as good."""
    run = killed(runs, tmp_path / "run", (2, 1, 1), [1], mistake=True)
    assert run.told[1].count("error: a mistake, as this test plants") == 1
    assert "saved its part" not in "".join(run.told)
    assert not list(run.dump_dir.glob("checkpoints/*survivors*"))


def test_a_copy_that_is_no_newer_than_the_last_checkpoint_is_removed(runs, survived, tmp_path):
    folder, step = shutil.copytree(survived.dump_dir, tmp_path / "run"), survived.saved
    copy = shutil.copytree(folder / "checkpoints" / "survivors-1", tmp_path / "copy")
    after = goes_on(runs, Killed(folder, survived.told, survived.last))
    shutil.copytree(copy, folder / "checkpoints" / "survivors-1")
    after = runs.train((1, 1, 1), SETTINGS | {"stop_at": step + 3}, dump_dir=folder)
    assert after.log.count("published") == 1 and f"{after.checkpoint(step + 2)} " in after.log
    assert not list(folder.glob("checkpoints/*survivors*"))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("sizes", "victims", "settings"),
    [
        ((2, 2, 1), [0], {}),  # it has the store
        ((2, 2, 1), [2, 3], {"checkpoint.async_save": True, "checkpoint.dump.every": 3}),
        ((3, 1, 1), [0, 2], {"distributed.reshard": "step"}),
        ((3, 2, 1), [5], {}),  # two whole replicas: one is chosen for all ranks
    ],
)
def test_whatever_leaves_a_replica_leaves_the_run(runs, tmp_path, sizes, victims, settings):
    run = killed(runs, tmp_path / "run", sizes, victims, settings=settings)
    assert run.last == run.saved
    after = goes_on(runs, run)
    assert after.state(run.saved)["tensors"] == digest(runs, run.saved)[0]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ((2, 1, 2), {"optim.name": "muon", "optim.muon.dtype": "fp32"}),
        ((2, 2, 1), {"model.weight_tying": True}),
    ],
)
def test_on_the_same_mesh_it_is_equal_to_the_bit(runs, tmp_path, sizes, settings):
    settings = settings | {"deterministic": True}
    run = killed(runs, tmp_path / "run", sizes, [1], settings=settings)
    where = SETTINGS | settings | {"stop_at": run.saved + 2}
    after = runs.train(sizes, where, dump_dir=run.dump_dir)
    assert f"published step {run.saved}, which survivors" in after.log
    alone = runs.train(sizes, where | {"checkpoint.dump.every": run.saved})
    for step in (run.saved, run.saved + 2):
        assert after.state(step)["tensors"] == alone.state(step)["tensors"]


@pytest.mark.soak
def test_without_a_whole_copy_the_last_checkpoint_is_what_there_is(runs, tmp_path):
    settings = {"checkpoint.dump.every": 2}
    run = killed(runs, tmp_path / "run", (2, 2, 1), [1, 2], settings=settings)
    for text in (run.told[0], run.told[3]):
        assert text.count("no whole copy of the run survives; the next start resumes from") == 1
    after = runs.train((1, 1, 1), SETTINGS | {"stop_at": run.last + 3}, dump_dir=run.dump_dir)
    assert "published" not in after.log and "resuming" in after.log
    assert not list(run.dump_dir.glob("checkpoints/*survivors*"))


@pytest.mark.soak
@pytest.mark.parametrize("delay_s", [0.0, 7.5])
def test_an_update_that_is_half_applied_is_not_saved(runs, tmp_path, delay_s):
    """Rank 0 has changed some parameters when rank 3 dies, or just before it knows that."""
    settings = {"deterministic": True}
    run = killed(runs, tmp_path / "run", (2, 2, 1), [3], delay_s, half="0", settings=settings)
    assert "no whole copy of the run survives" in run.told[0] + run.told[1], run.told
    assert "saved its part" not in "".join(run.told)
    after = runs.train((1, 1, 1), SETTINGS | {"stop_at": 2}, dump_dir=run.dump_dir)
    assert "published" not in after.log and after.column("step") == [1, 2]


@pytest.mark.soak
def test_at_most_the_step_that_was_under_way_is_done_again(runs, tmp_path):
    """At random moments. A copy of a step whose line is not written is not used."""
    chance, again = random.Random(1), []
    for i in range(4):
        victim, delay_s = chance.randrange(4), chance.uniform(0, 1)
        settings = {"checkpoint.async_save": i % 2 == 0, "checkpoint.dump.every": 5}
        run = killed(runs, tmp_path / str(i), (2, 2, 1), [victim], delay_s, settings=settings)
        if run.last < run.saved:
            where = SETTINGS | {"stop_at": run.saved + 2}
            after = runs.train((1, 1, 1), where, dump_dir=run.dump_dir)
            assert f"what is due after step {run.saved} may not have been written" in after.log
            again.append(run.last % 5)
        else:
            after = goes_on(runs, run)
            again.append(run.last - run.saved)
        assert after.column("step") == list(range(1, run.saved + 3))
        assert after.state(run.saved + 2)["tensors"] == digest(runs, run.saved + 2)[0]
    print(f"steps done again: {again}")
    assert median(again) <= 1
