"""`lingua.train`: the run of the command, in a process that is afterwards as it was."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import lingua
from lingua.base.errors import UserError
from lingua.parallel.launch import one_process
from lingua.tools.runs.records import Record
from tests.mistakes import refused
from tests.programs import python

CONFIG = """\
steps: 4
device: cpu
deterministic: true
data: {sources: {text: 1}, seq_len: 32, global_batch_size: 4}
model: {dim: 16, n_layers: 1, n_heads: 2, dropout: 0.1}
logging: {freq: 1}
"""

# Twice the run of the command, in a row; then one that is interrupted, and goes on.
SCRIPT = """
import logging, os, signal, sys
import numpy as np, torch, torch.distributed as dist
import apps.main, lingua
from dataclasses import replace
from omegaconf import OmegaConf
from lingua.base.errors import UserError

def state():
    root = logging.getLogger()
    deterministic = torch.are_deterministic_algorithms_enabled()
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    generator = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()
    group = dist.is_initialized()
    return root.handlers[:], root.level, deterministic, handlers, generator, group, sys.excepthook

def interrupt(run):
    if run.progress.step + 1 == 2:
        os.kill(os.getpid(), signal.SIGINT)

if __name__ == "__main__":
    before = state()
    record = lingua.train("apps.main", "my.yaml")
    assert state() == before
    # A mistake in between leaves nothing behind.
    try:
        lingua.train("apps.main", {"config": "my.yaml", "data.sources": {"none": 1}})
        raise SystemExit("not refused")
    except UserError as error:
        print("refused:", error)
    assert state() == before
    torch.manual_seed(1)
    nested = OmegaConf.create({"config": "my.yaml", "name": "second", "data": {"workers": 0}})
    second = lingua.train(apps.main, nested)
    assert second.metrics["loss"].tolist() == record.metrics["loss"].tolist()
    asked = {"config": "my.yaml", "name": "third"}
    try:
        lingua.train(replace(apps.main.app, probe=interrupt), asked)
        raise SystemExit("not interrupted")
    except KeyboardInterrupt:
        saved = sorted(os.listdir("runs/third/checkpoints"))
    third = lingua.train("apps.main", asked)
    print("saved:", *saved, third.events[-1]["reason"])
"""


def test_a_run_in_python_is_that_of_the_command_and_leaves_its_process_as_it_was(tmp_path):
    (tmp_path / "data").mkdir()
    text = [json.dumps({"text": f"row {i} of the text " * 9}) + "\n" for i in range(40)]
    (tmp_path / "data" / "text.jsonl").write_text("".join(text))
    (tmp_path / "my.yaml").write_text(CONFIG)
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["-m", "apps.main.train", "config=my.yaml", "name=command"]
    where: Any = {"cwd": tmp_path, "capture_output": True, "text": True}
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*python(), "script.py"], env=env, **where)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "refused: data.sources.none" in done.stdout, done.stdout
    assert "saved: 0000000002 done" in done.stdout
    subprocess.run([*python(), *words], env=env, check=True, **where)
    names = ("lingua", "second", "third", "command")
    runs = {name: Record(tmp_path / "runs" / name).metrics for name in names}
    losses = runs["command"]["loss"]
    assert len(losses) == 4 and len(set(losses)) == 4
    for metrics in runs.values():  # bitwise
        assert (metrics["loss"] == losses).all()
        assert metrics.text("batch_hash") == runs["command"].text("batch_hash")


CELL = "import lingua; lingua.train('apps.main', {'optim': {'lrr': '\x1b[31m'}})"


def test_a_notebook_shows_the_message_of_a_mistake_alone(capsys):
    assert UserError("a\x1b\nb")._render_traceback_() == ["error: a\\x1b\nb"]  # IPython's hook
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell.instance()
    assert shell.run_cell(CELL).error_in_exec
    shown = capsys.readouterr().out
    assert shown.startswith("error: 3 mistakes in the configuration:\n  optim.lrr: unknown key")
    assert "Traceback" not in shown and "\x1b" not in shown and len(shown.splitlines()) == 4


def test_mistakes_are_exceptions_and_it_needs_a_process_of_its_own(tmp_path):
    for app, given, said in (
        ("apps.none", None, "app = apps.none (lingua.train): cannot be imported"),
        (json, None, "has no lingua.app.App"),
        ("apps.main", 3, "must be a mapping or a YAML file"),
        ("apps.main", "none.yaml", "config=none.yaml: cannot be read"),
        ("apps.main", {"optim": {"lrr": 1}}, 'optim.lrr: unknown key (did you mean "optim.lr"?)'),
    ):
        refused(lambda app=app, given=given: lingua.train(app, given), said)
    config = {"data.sources.text": 1, "model.n_heads": 4, "dump_dir": tmp_path}
    with one_process():
        refused(lambda: lingua.train("apps.main", config), "process group")
    assert not list(tmp_path.iterdir()) and not torch.are_deterministic_algorithms_enabled()
