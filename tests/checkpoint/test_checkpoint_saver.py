"""The saves of a run: one that fails, one in the background, one folder for one run."""

import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lingua.base.errors import UserError
from lingua.checkpoint.folder import find, read_checkpoint
from lingua.checkpoint.retention import CheckpointArgs, SaveEvery, prune
from lingua.checkpoint.saver import Saver
from lingua.checkpoint.source import open_checkpoint
from lingua.parallel.mesh import on_rank_0
from tests.checkpoints import CONFIG, STATE, equal, join, refusal, tensors_on
from tests.disk import full_disk
from tests.locks import hold_lock, lose


def names(root: Path) -> list[str]:
    """What is in the folder, as rank 0 sees it before any rank goes on."""
    return on_rank_0(lambda: sorted(p.name for p in root.iterdir()))


def failing_here(root: Path, settings: dict[str, Any], rank: int) -> dict[str, Any]:
    """Saves of step 1, of step 2 with no space on one rank, and of 3; what is left after each."""
    mesh = join()
    seen: dict[str, Any] = {}
    with Saver(root, CheckpointArgs(**settings)) as saver:
        saver.save(1, tensors_on(mesh, fill=1), STATE, CONFIG, final=True)
        seen["first"] = names(root)
        with full_disk() if dist.get_rank() == rank else nullcontext():
            seen["told"] = refusal(lambda: saver.save(2, tensors_on(mesh, fill=2), STATE, CONFIG))
            if saver._writing is not None:
                saver._writing.result()
            seen["gave up"] = saver.gave_up
            seen["second"] = names(root)
            final = refusal(lambda: saver.save(2, tensors_on(mesh), STATE, CONFIG, final=True))
            seen["final"] = final
        third = lambda: saver.save(3, tensors_on(mesh, fill=3), STATE, CONFIG, final=True)  # noqa: E731
        seen["third"] = refusal(third)
    seen["left"] = names(root)
    return seen


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_save_publishes_nothing_and_the_next_one_tries_again(
    ranks, tmp_path, background, rank
):
    root, one = tmp_path / "root", "0000000001"
    settings = {"async_save": background, "dump": SaveEvery(keep=1)}
    for seen in ranks.run(2, failing_here, root, settings, rank):
        assert one in seen["first"] and seen["second"] == seen["first"]
        assert seen["told"] == "not refused" and not seen["gave up"]
        assert "NotSaved: step 2 could not be saved" in seen["final"]
        assert "File too large" in seen["final"]
        assert f"the newest checkpoint is {root / one}" in seen["final"]
        assert seen["third"] == "not refused"
        assert seen["left"] == ["0000000003"]  # the first stayed until this was published


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_a_failed_save_stops_the_run_where_it_is_told_to(ranks, tmp_path, background):
    settings = {"async_save": background, "on_error": "stop"}
    for seen in ranks.run(2, failing_here, tmp_path / "root", settings, 1):
        # In the background it is known at the next boundary of a step.
        assert ("File too large" in seen["told"]) != background
        assert seen["gave up"]
        assert "File too large" in seen["final"]
        assert seen["left"][0] == "0000000001"


def moving_here(root: Path) -> dict[str, Any]:
    """Steps saved in the background while their tensors change at once."""
    mesh = join()
    tensors = tensors_on(mesh)
    tensors["model.large"] = torch.zeros(1 << 22)  # takes a while to write
    addresses = set()
    published_late = 0
    with Saver(root, CheckpointArgs(async_save=True)) as saver:
        for step in range(1, 4):
            change(tensors, tensors_on(mesh, fill=step))
            tensors["model.large"].fill_(step)
            saver.save(step, tensors, STATE, CONFIG)
            published_late += not (root / f"{step:010d}").exists()
            addresses.add(saver._copies["model.large"].data_ptr())
            change(tensors, tensors_on(mesh, fill=-1))  # the optimizer moves on
            tensors["model.large"].fill_(-1)
            for _ in range(50):  # training's own collectives meanwhile
                dist.all_reduce(torch.ones(8))
        saver.save(3, tensors, STATE, CONFIG, final=True)  # only waits
    right = []
    for step in range(1, 4):
        read = tensors_on(mesh, fill=-99) | {"model.large": torch.zeros(1 << 22)}
        open_checkpoint(read_checkpoint(root / f"{step:010d}")[0]).load(read)
        large = read.pop("model.large")
        right.append(equal(read, fill=step) and bool((large == step).all()))
    return {"late": published_late, "buffers": len(addresses), "right": right}


def change(tensors: dict[str, Tensor], to: dict[str, Tensor]) -> None:
    for name, value in to.items():
        t = tensors[name]
        (t.to_local() if isinstance(t, DTensor) else t).copy_(
            value.to_local() if isinstance(value, DTensor) else value
        )


def test_what_is_saved_in_the_background_is_the_state_of_its_step(ranks, tmp_path):
    for seen in ranks.run(2, moving_here, tmp_path / "root"):
        assert seen["right"] == [True] * 3
        assert seen["late"] == 3 and seen["buffers"] == 1
    assert [c.step for c in find(tmp_path / "root")] == [3, 2, 1]  # in order, one at a time
    assert sorted(p.name[-1] for p in (tmp_path / "root").iterdir()) == ["1", "2", "3"]


# ----------------------------------------------------------------------------- one run a folder


def open_here(root: Path) -> str:
    mesh = join()

    def work() -> None:
        with Saver(root, CheckpointArgs()) as saver:
            on_rank_0(lambda: saver.claim(root.parent))
            saver.save(1, tensors_on(mesh), STATE, CONFIG)

    return refusal(work, UserError)


def open_requeued_here(root: Path) -> str:
    with mock.patch.dict(os.environ, SLURM_RESTART_COUNT="1"):
        return open_here(root)


@pytest.mark.parametrize("folder", ["dump dir", "checkpoints"])
def test_a_second_run_on_the_same_folder_is_refused_and_one_of_a_requeued_job_waits(
    ranks, tmp_path, folder
):
    root = tmp_path / "checkpoints"
    root.mkdir()
    held = (tmp_path if folder == "dump dir" else root) / "run.lock"
    with hold_lock(held) as process:
        for told in ranks.run(2, open_here, root):
            assert f"{held} is held by process {process.pid} on " in told
            assert told.endswith(", which is running")
        begin = time.monotonic()
        threading.Timer(1, process.kill).start()
        assert ranks.run(2, open_requeued_here, root) == ["not refused"] * 2
        assert 1 < time.monotonic() - begin < 35
    assert os.listdir(tmp_path) == ["checkpoints"] and os.listdir(root) == ["0000000001"]


def lose_here(root: Path, after: str, settings: dict[str, Any]) -> tuple[str, str]:
    """The errors of a save after the lock was lost to another machine, and of a wait. `after`: that
    was before the save, while its files were written, or then and the other run removed them."""
    mesh = join()
    with Saver(root, CheckpointArgs(**settings)) as saver:
        on_rank_0(lambda: saver.claim(root.parent))
        saver.save(1, tensors_on(mesh, fill=1), STATE, CONFIG, final=True)
        if dist.get_rank() == 0:
            lock = root / "run.lock"
            if after == "nothing":
                lose(lock)
            else:
                threading.Thread(target=lose_in_a_save, args=(root, after == "removal")).start()
        dist.barrier()

        def save() -> None:
            saver.save(2, tensors_on(mesh, fill=2) | {"model.large": torch.zeros(1 << 22)}, STATE,
                       CONFIG, final=True)  # fmt: skip

        return refusal(save, UserError), refusal(saver.wait, UserError)


def lose_in_a_save(root: Path, removed: bool) -> None:
    while not any(root.glob("*.tmp-*/*.distcp")):
        time.sleep(0.0001)
    lose(root / "run.lock")
    if removed:
        prune(root, CheckpointArgs())


@pytest.mark.parametrize(
    ("after", "settings"),
    [("nothing", {}), ("files", {}), ("files", {"async_save": True}), ("removal", {})],
)
def test_a_run_that_lost_its_lock_publishes_and_prunes_nothing(ranks, tmp_path, after, settings):
    root = tmp_path / "checkpoints"
    settings = {"dump": SaveEvery(keep=1)} | settings
    for told in ranks.run(2, lose_here, root, after, settings):
        for error in told:
            assert f"{root / 'run.lock'} is held by process 5 on node-2 now" in error
            assert error.endswith("nothing more is written here")
    assert sorted(os.listdir(root)) == ["0000000001", "run.lock"]
    assert "node-2" in (root / "run.lock").read_text()
