"""`lingua.train` and `lingua.open_run`: the run of the command, in a process that is afterwards as
it was."""

import json
import math
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from jupyter_client.manager import start_new_kernel

import lingua
from lingua.base.errors import UserError
from lingua.parallel.alone import one_process
from lingua.parallel.gradients import grad_norm
from lingua.run.in_process import OpenRun
from lingua.run.records import Record
from tests.mistakes import refused
from tests.programs import python

CONFIG = """\
steps: 6
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

def look(run):  # what it leaves reaches no other step
    assert run.model.training
    run.model.eval()
    run.model(run.batch[0].tokens, run.batch[0].targets)[0].sum().backward()
    run.log("looked", norm=1.5)

def loop(words):  # left in its second step, then by an interrupt, by an error, and never
    losses = {}
    try:
        with lingua.open_run("apps.main", words) as run:
            for step in run:
                losses[step] = run.loss
                look(run)
                if step == 2:
                    break
        with lingua.open_run("apps.main", words) as run:
            for step in run:
                losses[step] = run.loss
                os.kill(os.getpid(), signal.SIGINT)
                while True:
                    pass
    except KeyboardInterrupt:
        pass
    try:
        with lingua.open_run("apps.main", words) as run:
            for step in run:
                losses[step] = run.loss
                look(run)
                1 / (5 - step)
    except ZeroDivisionError:
        pass
    with lingua.open_run("apps.main", words) as run:
        losses |= {step: run.loss for step in run}
    assert (run.record.metrics["loss"] == list(losses.values())).all(), losses
    reasons = [line.get("reason", line["event"]) for line in run.record.events]
    with lingua.open_run("apps.main", words) as run:
        assert run.step == 6 and list(run) == [] and run.model.training
    print("loop:", *losses, *reasons)

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
    before = state()
    loop(["config=my.yaml", "name=loop"])
    assert state() == before
"""


def write_text(folder):
    (folder / "data").mkdir()
    text = [json.dumps({"text": f"row {i} of the text " * 9}) + "\n" for i in range(40)]
    (folder / "data" / "text.jsonl").write_text("".join(text))
    (folder / "my.yaml").write_text(CONFIG)


def test_a_run_in_python_is_that_of_the_command_and_leaves_its_process_as_it_was(tmp_path):
    write_text(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["-m", "apps.main.train", "config=my.yaml", "name=command"]
    where: Any = {"cwd": tmp_path, "capture_output": True, "text": True}
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*python(), "script.py"], env=env, **where)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "refused: data.sources.none" in done.stdout, done.stdout
    assert "saved: 0000000003 done" in done.stdout
    reasons = "looked looked left start SIGINT start looked looked error start done"
    assert f"loop: 1 2 3 4 5 6 start {reasons}" in done.stdout, done.stdout
    subprocess.run([*python(), *words], env=env, check=True, **where)
    names = ("lingua", "second", "third", "loop", "command")
    runs = {name: Record(tmp_path / "runs" / name).metrics for name in names}
    losses = runs["command"]["loss"]
    assert len(losses) == 6 and len(set(losses)) == 6
    for metrics in runs.values():  # bitwise
        assert (metrics["loss"] == losses).all()
        assert metrics.text("batch_hash") == runs["command"].text("batch_hash")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"distributed.model_dtype": "fp32"},
        {"deterministic": "mesh"},
        {"deterministic": "mesh", "distributed.reshard": "step"},
    ],
    ids=lambda settings: " ".join(settings.values()) or "bf16",
)
def test_a_backward_in_the_body_has_its_gradients_and_reaches_no_step(tmp_path, settings):
    write_text(tmp_path)
    settings = {"config": tmp_path / "my.yaml", "data.root_dir": tmp_path / "data"} | settings
    settings |= {"steps": 3, "model.dropout": 0.0}  # steps of two micro-steps
    row = torch.arange(33)[None] % 7
    norms = []

    def train(name: str, body: bool) -> Record:
        def look(run: OpenRun) -> None:
            run.model.eval()
            for n in (1, 2):  # as always in torch, the second is added
                run.model(row[:, :-1], row[None, :, 1:]).sums.sum().backward()
                norms.append(float(grad_norm(list(run.model.parameters()))) / n)

        with lingua.open_run("apps.main", settings | {"dump_dir": tmp_path / name}) as run:
            if body:
                look(run)
            for _ in run:
                if body:
                    look(run)
        return run.record

    plain, looked = train("plain", body=False), train("looked", body=True)
    for key in ("loss", "grad_norm"):
        assert looked.metrics[key].tolist() == plain.metrics[key].tolist()
    assert min(norms) > 1 and norms[::2] == pytest.approx(norms[1::2], rel=1e-3)


@pytest.mark.parametrize("exact", [True, "mesh"])
def test_a_measurement_is_that_of_the_run_and_changes_nothing(tmp_path, exact):
    (tmp_path / "my.yaml").write_text(CONFIG)
    text = [json.dumps({"text": f"row {i} of the text " * 9}) + "\n" for i in range(300)]
    (tmp_path / "text.jsonl").write_text("".join(text))
    settings = {"config": tmp_path / "my.yaml", "data.root_dir": tmp_path, "deterministic": exact}
    settings |= {"steps": 4, "validation.every": 2}
    plain = lingua.train(
        "apps.main", settings | {"dump_dir": tmp_path / "a", "validation.every": 1}
    )
    [held_out] = plain.validation.values()
    expected = dict(zip(held_out.step.tolist(), held_out["nats_per_byte"].tolist(), strict=True))
    settings |= {"dump_dir": tmp_path / "b"}
    with lingua.open_run("apps.main", settings) as run:
        opened = time.perf_counter()
        first = run.measure()
        time.sleep(2)
        outside_s = time.perf_counter() - opened
        for step in run:
            run.model(*run.batch[0].inputs())
            assert run.measure() == expected[step] != first
            if step == 2:
                break
        train_s = time.perf_counter() - opened - outside_s
        assert run.measure() == expected[2]
    assert run.record.metrics["step_time_s"].sum() < train_s + 1.9  # and of the start
    refused(run.measure, "must be called inside of")
    with lingua.open_run("apps.main", settings) as run:
        assert run.measure() == expected[2]
        assert [run.measure() for _ in run] == [expected[3], expected[4]]
        assert run.measure() == expected[4]
        head: Any = run.model.output
        weight = head.weight
        with torch.no_grad():  # the model as it is, not what a forward has gathered
            run.model(*run.batch[0].inputs())
            weight.zero_()
        assert run.measure() == pytest.approx(math.log(run.args.model.vocab_size), rel=0.02)
    for key in ("loss", "grad_norm"):
        assert run.record.metrics[key].tolist() == plain.metrics[key].tolist()
    lines = (tmp_path / "b" / "metrics.validation.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4]


NOTEBOOK = """
import lingua
losses = {}
with lingua.open_run("apps.main", "my.yaml") as run:
    for step in run:
        losses[step] = run.loss
        print("step", step)
        while WAIT:
            pass
print(list(losses), run.step)
"""


@pytest.mark.soak
def test_a_notebook_interrupts_a_run_and_continues_it(tmp_path, monkeypatch):
    write_text(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        shown: list[str] = []  # texts and names of errors, in the order of their messages

        def show(message: dict[str, Any]) -> None:
            content = message["content"]
            if "text" in content or "ename" in content:
                shown.append(content.get("text") or content["ename"])
                if "".join(shown).endswith("step 1\n"):  # a line may arrive in several messages
                    manager.interrupt_kernel()

        def run(wait: bool) -> str:
            cell = NOTEBOOK.replace("WAIT", str(wait))
            client.execute_interactive(cell, output_hook=show, timeout=300)
            return "".join(shown).splitlines()[-1]

        assert run(wait=True) == "KeyboardInterrupt"
        assert run(wait=False) == "[2, 3, 4, 5, 6] 6"
        assert run(wait=False) == "[] 6"  # it is finished
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    record = Record(tmp_path / "runs" / "lingua")
    assert record.metrics.step.tolist() == [1, 2, 3, 4, 5, 6]
    stops = [line["reason"] for line in record.events if line["event"] == "stop"]
    assert stops == ["SIGINT", "done"]


CELL = "import lingua; lingua.train('apps.main', {'optim': {'lrr': '\x1b[31m'}})"


def test_a_notebook_shows_the_message_of_a_mistake_alone(capsys):
    error = UserError("a\x1b\nb" + "x" * 9999)
    assert str(error) == "a\\x1b\nb" + "x" * 999 + " ... " + "x" * 500
    assert error._render_traceback_() == [f"error: {error}"]  # IPython's hook
    shell = InteractiveShell.instance()
    assert shell.run_cell(CELL).error_in_exec
    shown = capsys.readouterr().out
    assert shown.startswith("error: 2 mistakes in the configuration:\n  optim.lrr: unknown key")
    assert "Traceback" not in shown and "\x1b" not in shown and len(shown.splitlines()) == 3


def test_mistakes_are_exceptions_and_it_needs_a_process_of_its_own(tmp_path):
    refused(lambda: lingua.train(json), "has no lingua.app.App")
    config = {"data.sources.text": 1, "model.n_heads": 4, "dump_dir": tmp_path}
    with one_process():
        refused(lambda: lingua.train("apps.main", config), "process group")
    assert not list(tmp_path.iterdir()) and not torch.are_deterministic_algorithms_enabled()
