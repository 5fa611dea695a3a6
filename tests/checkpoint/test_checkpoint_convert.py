"""Checkpoints become plain files and files checkpoints, whole or not at all."""

import os
import pickle
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lingua.checkpoint.__main__ import main, summary
from lingua.checkpoint.folder import read_checkpoint
from tests.checkpoint.test_checkpoint_load import Evil
from tests.checkpoints import CONFIG, refusal, save_here, whole_values
from tests.programs import python
from tests.ranks import Ranks

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory) -> Path:
    """Step 7, saved by two ranks."""
    root = tmp_path_factory.mktemp("saved")
    ranks.run(2, save_here, root, [7])
    return root


def convert_here(*arguments: Any) -> str:
    return refusal(lambda: main(["convert", *(str(a) for a in arguments)]))


def model_values() -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("model."): t
        for name, t in whole_values(7).items()
        if name.startswith("model.")
    }


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == t.dtype and torch.equal(found[name], t) for name, t in expected.items()
    )


def test_a_checkpoint_becomes_a_file_that_torch_loads_and_the_file_a_checkpoint(
    ranks, saved, tmp_path
):
    file = tmp_path / "deep" / "model.pth"
    assert ranks.run(1, convert_here, saved, file) == ["not refused"]
    content = torch.load(file, weights_only=True)
    assert content.keys() == {"model", "config", "step"}
    assert same(content["model"], model_values())
    assert (content["config"], content["step"]) == (CONFIG, 7)

    assert ranks.run(1, convert_here, file, tmp_path / "back") == ["not refused"]
    checkpoint, why = read_checkpoint(tmp_path / "back" / "0000000007")
    assert checkpoint is not None, why
    dcp_to_torch_save(checkpoint.path, tmp_path / "again.pth")
    again = torch.load(tmp_path / "again.pth", weights_only=True)
    assert same(again, {f"model.{name}": t for name, t in model_values().items()})
    assert (checkpoint.path / "config.yaml").read_text() == CONFIG
    assert [p.name for p in (tmp_path / "back").iterdir()] == ["0000000007"]
    shown = summary(checkpoint)
    assert shown["step"] == 7 and list(shown["tensors"]) == ["model"] and "progress" not in shown


def refusals_here(folder: Path, saved: Path) -> dict[str, str]:
    bad = {
        "empty": b"",
        "text": b"model",
        "pickle": pickle.dumps(Evil(folder / "executed")),
    }
    for name, content in bad.items():
        (folder / name).write_bytes(content)
    torch.save({"model": Evil(folder / "executed")}, folder / "evil")
    torch.save({"model": {"w": 1.0}}, folder / "no tensors")
    torch.save([torch.ones(2)], folder / "no dict")
    torch.save({"model": {"w": torch.ones(10000)}}, folder / "good")
    (folder / "cut").write_bytes((folder / "good").read_bytes()[:-5000])
    names = [*bad, "evil", "no tensors", "no dict", "cut", "absent"]
    said = {name: convert_here(folder / name, folder / "out") for name in names}
    said["file exists"] = convert_here(saved, folder / "good")
    (folder / "root" / "0000000000").mkdir(parents=True)
    said["step exists"] = convert_here(folder / "good", folder / "root")
    return said


def test_what_cannot_be_converted_is_refused_by_name_and_nothing_is_executed(
    ranks, saved, tmp_path
):
    [said] = ranks.run(1, refusals_here, tmp_path, saved)
    good = (tmp_path / "good").read_bytes()
    for name in ("empty", "text", "pickle", "cut", "evil"):
        assert said[name].startswith(f"UserError: {tmp_path / name} cannot be read")
        assert "weights_only" not in said[name]  # torch's advice to trust the file
    assert "refers to posix.mkdir, which is not executed" in said["evil"]
    for name in ("no tensors", "no dict"):
        assert f"{tmp_path / name} has no model" in said[name]
    assert "no such file or folder" in said["absent"]
    assert f"{tmp_path / 'good'} exists: nothing is overwritten" in said["file exists"]
    assert f"{tmp_path / 'root' / '0000000000'} exists" in said["step exists"]
    assert (tmp_path / "good").read_bytes() == good
    assert not (tmp_path / "out").exists() and not (tmp_path / "executed").exists()
    torch.load(tmp_path / "evil", weights_only=False)  # the bait does bite
    assert (tmp_path / "executed").exists()


# --------------------------------------------------------------------------------- interrupted


def full_disk_here(src: Path, dst: Path) -> str:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        return convert_here(src, dst)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_fails_is_told_and_leaves_nothing_that_looks_done(ranks, saved, tmp_path):
    file, out = tmp_path / "model.pth", tmp_path / "out"
    assert ranks.run(1, convert_here, saved, file) == ["not refused"]
    [said] = ranks.run(1, full_disk_here, saved, out / "again.pth")
    assert f"UserError: {out / 'again.pth'} cannot be written" in said
    assert list(out.iterdir()) == []
    [said] = ranks.run(1, full_disk_here, file, out)
    assert said.startswith("NotSaved: step 7 could not be saved") and "File too large" in said
    assert list(out.iterdir()) == []
    for src, dst in ((saved, out / "again.pth"), (file, out)):  # and it can be tried again
        assert ranks.run(1, convert_here, src, dst) == ["not refused"]


KILLED = """
import os, signal, sys
from lingua.checkpoint.__main__ import main
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
main(["convert", *sys.argv[1:]])
"""


def test_a_kill_once_all_bytes_are_written_leaves_nothing_that_looks_done(ranks, saved, tmp_path):
    """Later there is only a rename of what is whole and synced."""
    file, out = tmp_path / "model.pth", tmp_path / "out"
    assert ranks.run(1, convert_here, saved, file) == ["not refused"]
    for src, dst in ((saved, out / "again.pth"), (file, out)):
        job = subprocess.run([*python(), "-c", KILLED, src, dst], cwd=REPO, check=False)
        assert job.returncode == -signal.SIGKILL
    left = {path.name.partition(".tmp-")[0] for path in out.iterdir()}
    assert left == {"again.pth", "0000000007"}  # the killed were at work
    assert all(".tmp-" in path.name for path in out.iterdir())
    for src, dst in ((saved, out / "again.pth"), (file, out)):
        assert ranks.run(1, convert_here, src, dst) == ["not refused"]


def test_the_program_says_what_it_made_and_needs_no_launcher(saved, tmp_path):
    program = [*python(), "-m", "lingua.checkpoint", "convert"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}

    def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*program, *arguments],
            cwd=REPO, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    file = tmp_path / "model.pth"
    job = run(saved, file)
    size = file.stat().st_size
    assert job.stdout.splitlines() == [
        f"the model of {saved / '0000000007'} (checkpoint, step 7): 6 tensors",
        f"wrote {file} ({size:,} bytes)",
    ]
    assert (job.returncode, job.stderr) == (0, "")
    again = run(saved, file)
    assert again.returncode == 2
    assert again.stderr == f"error: {file} exists: nothing is overwritten\n"
