"""Which checkpoints are kept."""

import os
import shutil
from pathlib import Path

import torch

from lingua.checkpoint.folder import find
from lingua.checkpoint.retention import CheckpointArgs, SaveEvery, mark, marks, prune
from lingua.checkpoint.save import save
from tests.checkpoints import join


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
        "the last two": ({"every": 1, "keep": 2}, none, steps, [7, 8]),
        "the last one": ({"every": 1, "keep": 1}, none, steps, [8]),
        "more than there are": ({"every": 1, "keep": 99}, none, steps, steps),
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
    mark(root / "0000000005", "paper")
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
