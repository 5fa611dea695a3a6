"""Checkpoints become plain files and files checkpoints, whole or not at all."""

import signal
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lingua.checkpoint.folder import read_checkpoint
from lingua.tools.exchange.convert import main
from lingua.tools.inspect.checkpoint import summary
from tests.checkpoints import CONFIG, refusal, save_here, whole_values
from tests.disk import full_disk
from tests.programs import python
from tests.ranks import Ranks
from tests.tools.exchange.converted import same

REPO = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory) -> Path:
    """Step 7, saved by two ranks."""
    root = tmp_path_factory.mktemp("saved")
    ranks.run(2, save_here, root, [7])
    return root


def convert_here(source: Path, out: Path, *keys: str) -> str:
    return refusal(lambda: main([f"source={source}", f"out={out}", *keys]))


VALUES = {k[6:]: t for k, t in whole_values(7).items() if k.startswith("model.")}


def test_a_checkpoint_becomes_a_file_and_the_file_a_checkpoint(ranks, saved, tmp_path):
    file = tmp_path / "deep" / "model.pth"
    assert ranks.run(1, convert_here, saved, file) == ["not refused"]
    content = torch.load(file, weights_only=True)
    assert content.keys() == {"model", "config", "step"}
    assert same(content["model"], VALUES)
    assert (content["config"], content["step"]) == (CONFIG, 7)

    assert ranks.run(1, convert_here, file, tmp_path / "back") == ["not refused"]
    other = "tokenizer.name=bytes", "dtype=bfloat16", "to=checkpoint"
    assert ranks.run(1, convert_here, file, tmp_path / "other", *other) == ["not refused"]
    config = yaml.safe_load((tmp_path / "other" / "0000000007" / "config.yaml").read_text())
    assert config["data"]["tokenizer"]["name"] == "bytes"
    dcp_to_torch_save(tmp_path / "other" / "0000000007", tmp_path / "other.pth")
    rounded = {name: t.bfloat16() if t.is_floating_point() else t for name, t in VALUES.items()}
    expected = {f"model.{name}": t for name, t in rounded.items()}
    assert same(torch.load(tmp_path / "other.pth", weights_only=True), expected)
    checkpoint, why = read_checkpoint(tmp_path / "back" / "0000000007")
    assert checkpoint is not None, why
    dcp_to_torch_save(checkpoint.path, tmp_path / "again.pth")
    again = torch.load(tmp_path / "again.pth", weights_only=True)
    assert same(again, {f"model.{name}": t for name, t in VALUES.items()})
    assert (checkpoint.path / "config.yaml").read_text() == CONFIG
    assert [p.name for p in (tmp_path / "back").iterdir()] == ["0000000007"]
    content = file.read_bytes()
    for source, out, there in ((saved, file, file), (file, tmp_path / "back", checkpoint.path)):
        [said] = ranks.run(1, convert_here, source, out)
        assert f"out: {there} exists already" in said
    assert file.read_bytes() == content and read_checkpoint(checkpoint.path)[0] is not None
    shown = summary(checkpoint)
    assert shown["step"] == 7 and list(shown["tensors"]) == ["model"] and "progress" not in shown


def full_disk_here(src: Path, dst: Path) -> str:
    with full_disk(1000):
        return convert_here(src, dst)


KILLED = """
import os, signal, sys
from lingua.tools.exchange.convert import main
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
main(sys.argv[1:])
"""


def test_a_write_that_fails_or_is_killed_leaves_nothing_that_looks_done(ranks, saved, tmp_path):
    file, out = tmp_path / "model.pth", tmp_path / "out"
    assert ranks.run(1, convert_here, saved, file) == ["not refused"]
    unwritten = f"UserError: {out / 'again.pth'} cannot be written"
    for src, dst, said in ((saved, out / "again.pth", unwritten), (file, out, "NotSaved: step 7")):
        [message] = ranks.run(1, full_disk_here, src, dst)
        assert said in message and list(out.iterdir()) == []
    # A kill once all bytes are written: later there is only a rename of what is whole and synced.
    for src, dst in ((saved, out / "again.pth"), (file, out)):
        words = f"source={src}", f"out={dst}"
        job = subprocess.run([*python(), "-c", KILLED, *words], cwd=REPO, check=False)
        assert job.returncode == -signal.SIGKILL
    left = {path.name.partition(".tmp-")[0] for path in out.iterdir()}
    assert left == {"again.pth", "0000000007"}  # the killed were at work
    assert all(".tmp-" in path.name for path in out.iterdir())
    for src, dst in ((saved, out / "again.pth"), (file, out)):  # and it can be tried again
        assert ranks.run(1, convert_here, src, dst) == ["not refused"]
