"""Checkpoints are whole or not there: saved, damaged in every way, found and pruned.

Real ranks do it, with small tensors in place of a model."""

import json
import os
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from lingua.checkpoint.args import CheckpointArgs
from lingua.checkpoint.folder import (
    find,
    find_on_rank_0,
    published,
    read_checkpoint,
    read_state,
)
from lingua.checkpoint.retention import prune
from lingua.checkpoint.save import Layout, save
from lingua.checkpoint.saved import newest
from lingua.checkpoint.tensors import tensors_of
from lingua.optim.args import OptimArgs
from lingua.optim.optimizer import build_optimizer
from lingua.parallel.mesh import on_rank_0
from tests.checkpoints import (
    ANY,
    CONFIG,
    STATE,
    join,
    load_here,
    refusal,
    save_here,
    tensors_on,
    whole_values,
)
from tests.disk import full_disk

KINDS = ("__0_0.distcp", ".metadata", "train_state.json", "config.yaml", "manifest.json")


def refused_here(root: Path) -> str:
    join()
    return refusal(lambda: newest(published(root, print), "full", print))


def newest_here(roots: list[Path], verify: str) -> list[tuple[str | None, list[str]]]:
    """For each root: the name of what is chosen, and what is told. Called by every rank."""
    join()
    results = []
    for root in roots:
        told: list[str] = []
        found = find_on_rank_0(partial(published, root, told.append))
        chosen = newest(found, verify, told.append).path.name if found else None
        results.append((chosen, told))
    return results


def test_the_manifest_lists_exactly_the_files(saved):
    folder = saved / "0000000002"
    manifest = json.loads((folder / "manifest.json").read_text())
    names = {p.name for p in folder.iterdir()}
    assert names == {*KINDS, "__1_0.distcp"}
    assert manifest["files"].keys() == names - {"manifest.json"}
    for name, entry in manifest["files"].items():
        assert entry["size"] == (folder / name).stat().st_size
    assert (manifest["step"], manifest["serial"]) == (2, 2)
    assert sorted(p.name for p in saved.iterdir()) == ["0000000001", "0000000002"]
    state = json.loads((folder / "train_state.json").read_text())
    assert len(state.pop("tensors")) == 16 and state == STATE
    assert read_state(read_checkpoint(folder)[0]).progress.step == STATE["progress"]["step"]
    assert (folder / "config.yaml").read_text() == CONFIG


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2, bias=False)
        self.tied = nn.Linear(3, 2, bias=False)
        self.tied.weight = self.linear.weight
        self.register_buffer("mean", torch.ones(2))
        self.register_buffer("angles", torch.ones(2), persistent=False)


def test_the_tensors_of_a_run_are_parameters_moments_and_lasting_buffers():
    model = Model()
    tensors = tensors_of(model, build_optimizer(model, OptimArgs()))
    assert tensors.keys() == {
        "model.linear.weight",
        "optim.exp_avg.linear.weight",
        "optim.exp_avg_sq.linear.weight",
        "optim.step.linear.weight",
        "model.mean",
    }
    assert tensors["model.mean"] is model.mean
    assert tensors["model.linear.weight"].data_ptr() == model.linear.weight.data_ptr()


def photograph(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    files = [(p, p.stat()) for p in folder.iterdir()]
    return {p.name: (stat.st_mtime_ns, stat.st_ino, p.read_bytes()) for p, stat in files}


def test_saving_a_published_step_again_changes_nothing(ranks, saved, tmp_path):
    root = shutil.copytree(saved, tmp_path / "root")
    before = [photograph(folder) for folder in sorted(root.iterdir())]
    ranks.run(4, save_here, root, [2, 1])  # other ranks, other tensors
    assert [photograph(folder) for folder in sorted(root.iterdir())] == before


def test_the_last_published_is_the_newest_not_the_highest_step(ranks, tmp_path):
    ranks.run(1, save_here, tmp_path, [10, 30, 20])
    assert [c.step for c in find(tmp_path)] == [20, 30, 10]
    assert ranks.run(2, newest_here, [tmp_path], "full") == [[("0000000020", [])]] * 2


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def damaged_roots(saved: Path, folder: Path, damage) -> dict[str, Path]:
    """A copy of the two checkpoints for each kind of file, damaged in the newer one."""
    roots = {}
    for name in (*KINDS, "__1_0.distcp"):
        roots[name] = shutil.copytree(saved, folder / name)
        damage(roots[name] / "0000000002" / name)
    return roots


@pytest.mark.parametrize("damage", [flip_bit, cut, empty, os.remove])
@pytest.mark.parametrize("verify", ["full", "size"])
def test_a_damaged_file_is_named_and_the_step_before_taken(ranks, saved, tmp_path, damage, verify):
    roots = damaged_roots(saved, tmp_path, damage)
    first, second = ranks.run(2, newest_here, list(roots.values()), verify)
    for name, (chosen, told), (also, _) in zip(roots, first, second, strict=True):
        assert chosen == also
        if verify == "size" and damage is flip_bit and name != "manifest.json":
            assert (chosen, told) == ("0000000002", [])  # sizes alone cannot show it
            continue
        assert chosen == "0000000001", name
        (line,) = told
        assert "0000000002" in line and name in line and "skipped" in line
        assert second[list(roots).index(name)][1] == []  # one rank tells it


def test_a_flipped_bit_anywhere_in_the_manifest_is_seen(saved, tmp_path):
    folder = shutil.copytree(saved / "0000000001", tmp_path / "0000000001")
    manifest = folder / "manifest.json"
    text = manifest.read_bytes()
    assert read_checkpoint(folder)[0] is not None
    for i in range(len(text)):  # one bit of each byte
        flipped = bytearray(text)
        flipped[i] ^= 1 << i % 8
        manifest.write_bytes(flipped)
        checkpoint, why = read_checkpoint(folder)
        assert checkpoint is None and "manifest.json" in why, (i, why)


def test_leftovers_and_other_peoples_folders_are_skipped_with_a_line(ranks, saved, tmp_path):
    root = shutil.copytree(saved, tmp_path / "root")
    shutil.copytree(root / "0000000002", root / "0000000002_bak")
    shutil.copytree(root / "0000000002", root / "0000000003.tmp-0123abcd")
    shutil.copytree(root / "0000000002", root / "0000000009")  # renamed by hand
    (root / "0000000004").mkdir()
    (root / "notes").mkdir()
    (root / "0000000005").write_text("a file")
    told: list[str] = []
    assert [c.path.name for c in find(root, told.append)] == ["0000000002", "0000000001"]
    assert [line.replace(f"{root}/", "") for line in told] == [
        "0000000002_bak is not a checkpoint: skipped",
        "0000000003.tmp-0123abcd is not a checkpoint: skipped",
        "0000000004 is not a whole checkpoint (manifest.json is missing): skipped",
        "0000000009 is not a whole checkpoint (its manifest is of step 2): skipped",
        "notes is not a checkpoint: skipped",
    ]
    assert find(tmp_path / "nothing here") == []
    assert ranks.run(1, newest_here, [tmp_path / "nothing here"], "full") == [[(None, [])]]


def test_where_no_checkpoint_can_be_used_nothing_begins_anew_beside_them(ranks, saved, tmp_path):
    root = shutil.copytree(saved, tmp_path / "root")
    for step, name in ((1, "__0_0.distcp"), (2, "manifest.json")):
        flip_bit(root / f"{step:010d}" / name)
    refused = f"UserError: {root}: has checkpoints, but none that can be used; "
    assert all(told.startswith(refused) for told in ranks.run(2, refused_here, root))
    flip_bit(root / "0000000001" / "manifest.json")
    assert all(told.startswith(refused) for told in ranks.run(1, refused_here, root))


def test_a_save_takes_nothing_from_attempts_and_replaces_a_damaged_step(ranks, saved, tmp_path):
    root = shutil.copytree(saved, tmp_path / "root")
    for folder in ("0000000003", "0000000003.tmp-0123abcd"):  # by more ranks, not finished
        (root / folder).mkdir()
        (root / folder / "__5_0.distcp").write_bytes(b"stale")
        (root / folder / ".metadata").write_bytes(b"stale")
    flip_bit(root / "0000000002" / "__1_0.distcp")  # its size is right
    ranks.run(2, save_here, root, [3, 2])
    for folder in ("0000000003", "0000000002"):
        assert {p.name for p in (root / folder).iterdir()} == {*KINDS, "__1_0.distcp"}
    chosen = ranks.run(2, newest_here, [root], "full")
    assert [answer[0][0] for answer in chosen] == ["0000000002"] * 2
    assert ranks.run(1, load_here, root / "0000000002", 2) == [True]
    prune(root, CheckpointArgs())
    assert [p.name for p in sorted(root.iterdir())] == ["0000000001", "0000000002", "0000000003"]


def synced_here(root: Path) -> list[tuple[str, int]]:
    """What this rank had the system bring to the disk in a save: names, and sizes at that time."""
    mesh, synced, fsync = join(), [], os.fsync

    def recorded(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        synced.append((name.removesuffix(".tmp"), os.fstat(descriptor).st_size))
        fsync(descriptor)

    os.fsync = recorded
    try:
        save(root, 1, tensors_on(mesh), STATE, CONFIG)
    finally:
        os.fsync = fsync
    return synced


def test_every_file_is_on_the_disk_before_its_folder_gets_its_name(ranks, tmp_path):
    synced, of_rank_1 = ranks.run(2, synced_here, tmp_path / "root")
    files = {p.name: p.stat().st_size for p in (tmp_path / "root" / "0000000001").iterdir()}
    assert files.keys() == {*KINDS, "__1_0.distcp"}
    *of_files, (temporary, _), (root, _) = synced
    assert dict(of_files + of_rank_1) == files
    assert temporary.startswith("0000000001.tmp-") and root == "root"


def fail_here(root: Path, limits: dict[int, int], state: dict) -> tuple[str, list[str]]:
    """A save in which files cannot grow past a size, by rank; then one that can."""
    mesh = join()
    with full_disk(limits[rank]) if (rank := dist.get_rank()) in limits else nullcontext():
        told = refusal(lambda: save(root, 5, tensors_on(mesh), state, CONFIG), ANY)
    after_failure = on_rank_0(lambda: sorted(p.name for p in root.iterdir()))
    assert not (root / "0000000005").exists()
    dist.barrier()
    save(root, 5, tensors_on(mesh, fill=5), STATE, CONFIG)
    return told, after_failure


@pytest.mark.parametrize(
    ("limits", "big_state"),
    [({1: 100}, False), ({0: 100}, False), ({0: 100, 1: 100}, False), ({0: 100_000}, True)],
    ids=["tensors of rank 1", "tensors of rank 0", "tensors of both", "state after the tensors"],
)
def test_a_write_that_fails_raises_on_every_rank(ranks, saved, tmp_path, limits, big_state):
    root = shutil.copytree(saved, tmp_path / "root")
    state = {"big": "x" * 200_000} if big_state else STATE
    for told, found in ranks.run(2, fail_here, root, limits, state):
        assert told.startswith(f"NotSaved: step 5 could not be saved into {root}: ")
        assert "File too large" in told
        assert found == ["0000000001", "0000000002"]  # no leftover either
    assert [c.step for c in find(root)] == [5, 2, 1]  # the next attempt is not in its way
    assert ranks.run(1, load_here, root / "0000000005", 5) == [True]


def save_layouts_here(root: Path) -> None:
    """Two saves of one layout, and a third with one more tensor, on two replicas."""
    mesh, layout = join((2, 1, 1)), Layout()
    for step in (1, 2, 3):
        more = {"model.late": torch.arange(3)} if step == 3 else {}
        tensors = tensors_on(mesh, fill=step) | more
        save(root, step, tensors, STATE, CONFIG, layout=layout)


def test_metadata_is_made_again_only_where_the_layout_changed(ranks, tmp_path):
    ranks.run(2, save_layouts_here, tmp_path)
    folders = [tmp_path / f"{step:010d}" for step in (1, 2, 3)]
    first, second, third = ((folder / ".metadata").read_bytes() for folder in folders)
    assert first == second != third
    for step, folder in enumerate(folders, 1):
        expected = whole_values(step) | ({"model.late": torch.arange(3)} if step == 3 else {})
        read = {name: torch.full_like(t, 0) for name, t in expected.items()}
        dcp.load(read, checkpoint_id=folder, no_dist=True)
        assert all(torch.equal(read[name], t) for name, t in expected.items())
        assert (folder / "__1_0.distcp").stat().st_size > 1000  # replicas divide the work


def own_disk_here(disks: Path) -> str:
    """Every rank with a disk of its own, as on nodes that share no file system."""
    mesh = join()
    disk = disks / str(dist.get_rank())
    disk.mkdir()
    before = Path.cwd()
    os.chdir(disk)
    try:
        return refusal(lambda: save(Path("checkpoints"), 1, tensors_on(mesh), STATE, CONFIG))
    finally:
        os.chdir(before)


def test_ranks_that_share_no_file_system_are_told_so_and_nothing_is_published(ranks, tmp_path):
    # The others wait at the store for rank 0, so all are told the same.
    for told in ranks.run(2, own_disk_here, tmp_path):
        assert "__1_0.distcp is missing" in told and "file system that all processes share" in told
    assert find(tmp_path / "0" / "checkpoints") == []
