"""The saves of a run: one that fails, one in the background, one folder for one run; and which are
kept."""

import os
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lingua.base.errors import UserError
from lingua.checkpoint.args import CheckpointArgs, SaveEvery
from lingua.checkpoint.folder import find, read_checkpoint, unpublished
from lingua.checkpoint.host_copies import host_memory
from lingua.checkpoint.retention import mark_file, marks, prune
from lingua.checkpoint.save import save
from lingua.checkpoint.saver import Saver
from lingua.checkpoint.source import open_checkpoint
from lingua.parallel.mesh import on_rank_0
from lingua.parallel.tensors import local
from tests.checkpoints import CONFIG, STATE, equal, join, refusal, tensors_on
from tests.locks import hold_lock, lose


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


def test_memory_for_copies_is_no_larger_than_what_is_copied():
    tensors = [torch.randn(n, 1000 + n) for n in range(1, 9)] + [torch.ones(3, 5).bfloat16()]
    tensors += [torch.tensor(1.0), torch.tensor([True, False]), torch.empty(0, 4)]
    copies = [copy.copy_(t) for copy, t in zip(host_memory(tensors), tensors, strict=True)]
    assert all(torch.equal(copy, t) for copy, t in zip(copies, tensors, strict=True))
    assert [c.untyped_storage().nbytes() for c in copies] == [t.nbytes for t in tensors]
    begins = [c.data_ptr() for c in copies[:-1]]
    assert max(begins) - min(begins) < 1.05 * sum(t.nbytes for t in tensors)


def leaving_here(root: Path) -> bool:
    """A run that ends while a save is under way."""
    tensors = {**tensors_on(join()), "model.large": torch.zeros(1 << 24)}
    with Saver(root, CheckpointArgs(async_save=True)) as saver:
        on_rank_0(partial(saver.claim, root.parent))
        saver.save(1, tensors, STATE, CONFIG)
        return not (root / "0000000001").exists()


def test_a_run_that_ends_keeps_its_locks_until_the_save_in_the_background_is_whole(ranks, tmp_path):
    assert ranks.run(2, leaving_here, tmp_path / "root") == [True, True]
    assert [c.step for c in find(tmp_path / "root")] == [1]


def change(tensors: dict[str, Tensor], to: dict[str, Tensor]) -> None:
    for name, value in to.items():
        local(tensors[name]).copy_(local(value))


def test_what_is_saved_in_the_background_is_the_state_of_its_step(ranks, tmp_path):
    for seen in ranks.run(2, moving_here, tmp_path / "root"):
        assert seen["right"] == [True] * 3
        assert seen["late"] == 3 and seen["buffers"] == 1
    assert [c.step for c in find(tmp_path / "root")] == [3, 2, 1]  # in order, one at a time
    assert sorted(p.name[-1] for p in (tmp_path / "root").iterdir()) == ["1", "2", "3"]


def save_requeued_here(root: Path) -> None:
    """As a job of Slurm that was requeued."""
    mesh = join()
    with (
        mock.patch.dict(os.environ, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1"),
        Saver(root, CheckpointArgs()) as saver,
    ):
        on_rank_0(lambda: saver.claim(root.parent))
        saver.save(1, tensors_on(mesh), STATE, CONFIG)


def claim_here(root: Path) -> int:
    join()
    with Saver(root, CheckpointArgs()) as saver:
        saver.claim(root.parent)
        return saver.start.number


def test_what_an_earlier_start_has_not_published_is_of_the_one_that_claims_the_folder(
    ranks, tmp_path
):
    root = tmp_path / "checkpoints"
    theirs = unpublished(root / f"{7:010d}", 1)
    theirs.mkdir(parents=True)
    [number] = ranks.run(1, claim_here, root)
    [now] = [path.name for path in root.iterdir()]
    assert number > 1 and now.startswith(f"{7:010d}.tmp-{number}-") and not theirs.exists()


def test_a_run_of_a_requeued_job_waits_for_the_one_before(ranks, tmp_path):
    """Others are refused: tests/apps/test_dump_dir.py."""
    root = tmp_path / "checkpoints"
    root.mkdir()
    with hold_lock(root / "run.lock") as process:
        begin = time.monotonic()
        threading.Timer(1, process.kill).start()
        ranks.run(2, save_requeued_here, root)
        assert 1 < time.monotonic() - begin < 35
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "starts"] and os.listdir(root) == [
        "0000000001"
    ]


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
            assert "; nothing more is written here; the same command continues" in error
    assert sorted(os.listdir(root)) == ["0000000001", "run.lock"]
    assert "node-2" in (root / "run.lock").read_text()


def kept_here(root: Path, cases: list[tuple[dict[str, int], dict[str, int], list[int]]]) -> list:
    """Of each case (dump, eval, steps saved): the steps that are left, pruned after every save."""
    join()
    left = []
    for i, (dump, eval_, steps) in enumerate(cases):
        args = CheckpointArgs(SaveEvery(**dump), SaveEvery(**eval_))
        for step in steps:
            save(root / str(i), step, {"model.w": torch.ones(2)}, {}, "")
            prune(root / str(i), args)
        left.append(sorted(int(p.name) for p in (root / str(i)).iterdir()))
    return left


def test_retention_keeps_the_newest_dumps_and_the_newest_evaluations(ranks, tmp_path):
    none, steps = {"every": 0}, list(range(1, 9))
    cases = {
        "all": ({"every": 1}, none, steps, steps),
        "all, as 0 says too": ({"every": 1, "keep": 0}, none, steps, steps),
        "the last one": ({"every": 1, "keep": 1}, none, steps, [8]),
        "a save at a signal counts, whatever its step": (
            {"every": 4, "keep": 2}, none, [4, 8, 9], [8, 9],
        ),
        "every third is for evaluation": (
            {"every": 1, "keep": 1}, {"every": 3}, steps, [3, 6, 8],
        ),
        "the last of those": (
            {"every": 1, "keep": 1}, {"every": 3, "keep": 1}, steps, [6, 8],
        ),
        "evaluations alone": ({"every": 0, "keep": 1}, {"every": 2, "keep": 2}, steps, [6, 8]),
        "published last, not highest": ({"every": 1, "keep": 2}, none, [5, 9, 3], [3, 9]),
    }  # fmt: skip
    left = ranks.run(1, kept_here, tmp_path, [case[:3] for case in cases.values()])[0]
    assert dict(zip(cases, left, strict=True)) == {name: case[3] for name, case in cases.items()}


def test_retention_touches_nothing_that_is_not_its_own(saved, tmp_path):
    root = shutil.copytree(saved, tmp_path / "root")
    one, two = root / "0000000001", root / "0000000002"
    copies = ["0000000001_bak", "0000000001.old", "0000000002.tmp-XYZ", "best", "00000000021"]
    for name in (*copies, "0000000007.tmp-89abcdef", "0000000008.tmp-0123abcd"):
        shutil.copytree(one, root / name)
    (root / "0000000008.tmp-0123abcd" / "notes").write_text("mine")
    for name in ("0000000004", "x.best", "0000000002.best"):  # also in the place of a mark
        (root / name).mkdir()
    for name in ("notes.txt", "my.best", "0000000009.best.txt", "12.best", "0000000002/notes"):
        (root / name).write_text("mine")
    (root / "0000000005.best").touch()  # of a step that is gone
    mark_file(root / "0000000005", "paper").touch()
    outside = shutil.copytree(one, tmp_path / "outside")
    (root / "0000000000.tmp-00000000").symlink_to(outside)
    before = {p.name for p in root.iterdir()}
    assert prune(root, CheckpointArgs(dump=SaveEvery(keep=1))) == [one]
    after = {p.name for p in root.iterdir()}
    assert before - after == {"0000000001", "0000000007.tmp-89abcdef", "0000000005.best"}
    assert not after - before
    left = [path.name for path in (root / "0000000008.tmp-0123abcd").iterdir()]
    assert left == ["notes"] and (two / "notes").exists() and len(list(outside.iterdir())) == 6
    assert [c.step for c in find(root)] == [2] and marks(two) == []


def test_a_file_of_others_is_kept_and_a_damaged_step_not_counted(saved, tmp_path, caplog):
    root = shutil.copytree(saved, tmp_path / "root")
    notes = root / "0000000001" / "notes.txt"
    notes.write_text("mine")
    one = CheckpointArgs(dump=SaveEvery(keep=1))
    assert prune(root, one) == [] and notes.exists()
    assert f"{notes.parent} is kept: it has other files (notes.txt)" in caplog.text
    notes.unlink()
    os.truncate(root / "0000000002" / "__0_0.distcp", 1)  # does not count as one to keep
    assert prune(root, one) == [] and [c.step for c in find(root)] == [1]
