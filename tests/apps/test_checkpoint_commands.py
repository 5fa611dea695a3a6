"""Looking at checkpoints from outside a run: what one contains, what resuming it
would change, marks."""

import os
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

from lingua.checkpoint.args import CheckpointArgs, SaveEvery
from lingua.checkpoint.folder import find
from lingua.checkpoint.retention import prune
from lingua.config.load import to_yaml
from lingua.tools.commands.checkpoint import main
from tests.apps.runs import Outcome, Runs, arguments

KEPT = {"checkpoint.dump.every": 1, "stop_at": 3}


@pytest.fixture(scope="module")
def run(runs: Runs) -> Outcome:
    return runs.train((1, 2, 1), KEPT)


def said(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> list[str]:
    capsys.readouterr()
    main([str(arg) for arg in argv])
    assert not dist.is_initialized()
    return capsys.readouterr().out.splitlines()


def without_tensors(run: Outcome, folder: Path) -> Path:
    """A copy whose tensor files hold anything but tensors."""
    copy = shutil.copytree(run.dump_dir, folder / "run")
    for file in copy.rglob("*.distcp"):
        file.write_bytes(os.urandom(file.stat().st_size))
    return copy


def test_show_says_what_a_checkpoint_holds_and_reads_no_tensor(run, tmp_path, capsys):
    copy = without_tensors(run, tmp_path)
    tensors = run.tensors(3)
    model = [t for name, t in tensors.items() if name.startswith("model.")]
    values, size = sum(t.numel() for t in model), sum(t.nbytes for t in model)
    newest = said(capsys, "show", copy / "checkpoints" / "0000000003")
    assert said(capsys, "show", copy) == said(capsys, "show", copy / "checkpoints") == newest
    shown = yaml.safe_load("\n".join(newest))
    assert (shown["step"], shown["tokens"]) == (3, 3 * 7 * 16)
    model_size = f"{values:,} values, {len(model)} tensors, float32, {size / 1024:.2f} KiB"
    assert shown["tensors"]["model"] == shown["tensors"]["exp_avg_sq"] == model_size
    names = [group["param_names"] for group in shown["param_groups"]]
    assert sum(int(n.split()[0]) for n in names) == len(model)
    state = run.state(3)
    del state["param_groups"]
    assert shown["hash of tensors"] == state.pop("tensors")
    assert {key: shown[key] for key in state} == state
    second = said(capsys, "show", copy / "checkpoints" / "0000000002")
    assert yaml.safe_load("\n".join(second))["step"] == 2


def test_diff_prints_the_table_of_a_resume(runs, run, tmp_path, capsys):
    """And refuses what a resume would: tests/mistakes.txt."""
    copy = without_tensors(run, tmp_path)
    config = tmp_path / "config.yaml"
    here = {"data.root_dir": runs.text, "data.global_batch_size": "null"}
    config.write_text(to_yaml(arguments(here)))
    same = said(capsys, "diff", copy, f"config={config}")
    assert same == [f"nothing that matters differs from {copy}/checkpoints/0000000003"]

    change = {"steps": 9, "optim.lr": 1e-3, "stop_at": 4}
    table = said(capsys, "diff", copy, f"config={config}", *(f"{k}={v}" for k, v in change.items()))
    dump_dir = shutil.copytree(run.dump_dir, tmp_path / "resumed")
    resumed = runs.train((1, 1, 1), change, dump_dir=dump_dir)
    log = resumed.log.splitlines()
    words = [line.split()[1:] for line in log]
    begin = words.index(["key", "saved", "now", "class"])
    assert len(table) == 3
    assert [line.split() for line in table] == words[begin : begin + 3]


def test_what_is_marked_or_falls_on_keep_every_is_kept(run, tmp_path, capsys):
    root = shutil.copytree(run.dump_dir, tmp_path / "run") / "checkpoints"
    said(capsys, "mark", root / "0000000001", "good")
    assert "- good" in said(capsys, "show", root / "0000000001")
    (root / "0000000002.tar").mkdir()  # a folder is no mark
    last = CheckpointArgs(SaveEvery(keep=1))
    every = CheckpointArgs(SaveEvery(keep=1), keep_every=2)
    assert prune(root, every) == []
    assert prune(root, last) == [root / "0000000002"]
    said(capsys, "unmark", root / "0000000001", "good")
    assert prune(root, last) == [root / "0000000001"]
    assert [c.step for c in find(root)] == [3] and (root / "0000000002.tar").is_dir()
