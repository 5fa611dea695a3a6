"""Trackers (`logging.to`) of runs of the program: what their own readers find is what the files of
the dump dir have, a resumed run continues them, and one that fails ends nothing."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lingua.monitor.args import LoggingArgs, TrackioArgs
from lingua.tools import trackers as tracking
from lingua.tools.inference.benchmarks import job_arguments
from lingua.tools.trackers import Trackers, check_packages
from tests.apps.runs import SMALL, arguments, write_sources
from tests.disk import full_disk
from tests.mistakes import refused
from tests.programs import python, wait_for
from tests.wandb_file import logged_in

NAMES = ("wandb", "tensorboard", "trackio")
Curves = Mapping[str, list[tuple[int, float]]]  # (step, number) by name


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_sources(folder)
    return folder


class Program:
    """Starts runs of one dump dir, whose trackers have a folder of their own."""

    def __init__(self, text: Path, folder: Path) -> None:
        self.text, self.folder, self.dump_dir = text, folder, folder / "run"
        self.env = os.environ | {"TRACKIO_DIR": str(folder / "trackio"), "WANDB_MODE": "offline"}
        self.env |= {"PYTHONPATH": str(folder / "fakes"), "HF_HUB_OFFLINE": "1"}

    def start(self, *more: str) -> subprocess.Popen[str]:
        settings = SMALL | {"data.root_dir": self.text, "dump_dir": self.dump_dir}
        words = [f"{key}={value}" for key, value in settings.items()]
        command = [*python(), "-m", "apps.main.train", *words, *more]
        return subprocess.Popen(
            command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def train(self, *more: str) -> str:
        """What a run prints that ends well."""
        started = self.start(*more)
        printed, _ = started.communicate()
        assert started.returncode == 0, printed
        return printed

    def lines(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        path = self.dump_dir / name
        return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []

    def expected(self) -> Curves:
        """What the files have, by the names of trackers."""
        curves = defaultdict[str, list[tuple[int, float]]](list)
        for file in ("metrics.jsonl", "metrics.validation.jsonl"):
            for line in self.lines(file):
                prefix = f"validation/{line['source']}/" if "source" in line else ""
                for key, value in line.items():
                    if "event" not in line and key != "step" and type(value) in (int, float):
                        curves[prefix + key].append((line["step"], value))
        return curves

    def tensorboard(self, **given: Any) -> EventAccumulator:
        read = EventAccumulator(str(self.dump_dir / "tensorboard"), {"scalars": 0}, **given)
        return read.Reload()

    def in_tensorboard(self, **given: Any) -> Curves:
        read = self.tensorboard(**given)
        tags = read.Tags()["scalars"]
        return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in tags}

    def in_trackio(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Rows and config of the only run of the project, by trackio's own API."""
        code = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
[run] = trackio.Api().runs("lingua")
print(json.dumps([SQLiteStorage.get_logs("lingua", run.name, run_id=run.id), run.config]))
"""
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=True)
        rows, config = json.loads(done.stdout)
        return rows, config

    def in_wandb(self) -> list[dict[str, Any]]:
        """What was logged, in the order of starts."""
        files = sorted(self.dump_dir.glob("wandb/offline-run-*/run-*.wandb"))
        return [line for file in files for line in logged_in(file)]


def rounded(curves: Curves) -> Curves:
    """With numbers as an event file has them, in single precision."""
    return {
        name: [(step, float(np.float32(value))) for step, value in points]
        for name, points in curves.items()
    }


def curves_of(lines: list[dict[str, Any]], like: Curves) -> Curves:
    """The curves of rows that have a step, of the names of others."""
    return {n: [(line["step"], line[n]) for line in lines if n in line] for n in like}


@pytest.fixture(scope="module")
def killed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Program, int, Curves]:
    """A run that was killed after its checkpoint, then resumed; the step that was restored, and
    what TensorBoard had before that."""
    program = Program(text, tmp_path_factory.mktemp("killed"))
    to = ["logging.to=[tensorboard,trackio,wandb]", "validation.every=10", "steps=100000"]
    to += ["stop_at=null", "checkpoint.dump.every=20", "optim.scheduler=constant"]
    first = program.start(*to)
    wait_for(lambda: sum("loss" in line for line in program.lines()) >= 35, first)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    before = program.in_tensorboard()
    with closing(sqlite3.connect(program.folder / "trackio" / "lingua.db")) as db, db:
        db.execute(
            "DELETE FROM metrics WHERE step > 7"
        )  # as if they still waited when it was killed
    restored = max(int(f.name) for f in program.dump_dir.glob("checkpoints/" + "[0-9]" * 10))
    program.train(*to, f"stop_at={restored + 5}")
    return program, restored, before


def test_a_resumed_run_continues_the_curves_of_tensorboard(killed):
    program, restored, before = killed
    expected, found = program.expected(), program.in_tensorboard()
    assert {"loss", "lr", "tokens", "validation/one/nats_per_byte"} <= expected.keys()
    assert rounded(expected) == {name: found[name] for name in expected}
    assert [step for step, _ in found["loss"]] == list(range(1, restored + 6))
    # a control: steps were removed
    assert before["loss"][-1][0] > restored
    whole = program.in_tensorboard(purge_orphaned_data=False)["loss"]
    assert [step for step, _ in whole].count(restored + 1) == 2


def test_the_config_is_in_the_place_of_hyperparameters_with_a_metric(killed):
    program, _, _ = killed
    content = program.tensorboard().PluginTagToContent("hparams")
    plugin = {tag: HParamsPluginData.FromString(data) for tag, data in content.items()}
    given = plugin["_hparams_/session_start_info"].session_start_info.hparams
    assert given["optim.lr"].number_value == SMALL["optim.lr"]
    assert given["model.dim"].number_value == SMALL["model.dim"]
    assert given["optim.scheduler"].string_value == "constant"
    assert json.loads(given["data.sources"].string_value) == {"one": 2, "two": 1}
    experiment = plugin["_hparams_/experiment"].experiment
    metrics = [info.name.tag for info in experiment.metric_infos]
    assert metrics == ["loss", "validation/one/nats_per_byte", "validation/two/nats_per_byte"]
    assert {info.name for info in experiment.hparam_infos} == set(given)


def test_a_resumed_run_continues_its_rows_in_trackio(killed):
    program, restored, _ = killed
    rows, config = program.in_trackio()
    expected = program.expected()
    assert curves_of(rows, expected) == expected
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == list(range(1, restored + 6))
    assert config["optim.lr"] == SMALL["optim.lr"]


def test_a_resumed_run_of_wandb_has_the_same_numbers_and_one_id(killed):
    """Of a process that is killed, its client may lose lines, and those of repeated steps stay."""
    program, restored, _ = killed
    lines, expected = program.in_wandb(), program.expected()
    for name, points in curves_of(lines, expected).items():
        there, last = dict(expected[name]), dict(points)
        assert {step: last[step] for step in there if step > restored} == {
            step: value for step, value in there.items() if step > restored
        }
        assert {step: last[step] for step in last.keys() & there.keys()}.items() <= there.items()
    assert len({line["step"] for line in lines}) > 10
    starts = program.dump_dir.glob("wandb/offline-run-*")
    ids = {folder.name.rpartition("-")[2] for folder in starts}
    assert ids == {(program.dump_dir / "wandb_id").read_text().strip()}


def test_only_rank_0_of_several_writes_samples_and_the_last_step(text, tmp_path):
    program = Program(text, tmp_path)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    settings = SMALL | {"data.root_dir": text, "dump_dir": program.dump_dir, "steps": 3}
    settings |= {"logging.to": "[tensorboard]", "stop_at": "null"}
    words += ["-m", "apps.main.train", *(f"{key}={value}" for key, value in settings.items())]
    done = subprocess.run([*python(), *words], env=program.env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list((program.dump_dir / "tensorboard").iterdir())) == 1
    read = program.tensorboard()
    assert [event.step for event in read.Scalars("loss")] == [1, 2, 3]
    shown = read.Tensors("samples/one/text_summary")[0].tensor_proto.string_val[0].decode()
    samples = [line for line in program.lines("samples.jsonl") if line["source"] == "one"]
    first_line = samples[0]["prompt"].splitlines()[0]
    assert shown.startswith(f"    {first_line}")


# ------------------------------------------------------------------------------------ that fail

FAKE = """
import sys

class Run:
    id, url, project = "abc", "elsewhere", "lingua"
    lines = 0
    def define_metric(self, *names, **values):
        pass
    def log(self, values, *more):
        self.lines += 1
        if self.lines == 3 and "{stage}" == "log":
            {failure}
    def finish(self):
        if "{stage}" == "finish":
            {failure}

class Table:
    def __init__(self, **values):
        pass

def init(*names, **values):
    if "{stage}" == "init":
        {failure}
    return Run()

if "{stage}" == "import":
    {failure}
"""


def write_fake(folder: Path, package: str, stage: str, failure: str) -> None:
    """A package that stands for the client of another party, and fails at a stage of its life."""
    fake = folder / "fakes" / package
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text(FAKE.format(stage=stage, failure=failure))
    for name in ("sqlite_storage", "utils"):  # of trackio
        (fake / f"{name}.py").write_text("SQLiteStorage = None\nget_storage_mode = lambda: ''\n")


class Odd(Exception):
    pass


FAILURES = {  # of wandb, of trackio, of TensorBoard
    "import": ("raise ImportError('half of it')", "import no_such_part", "raise OSError('torn')"),
    "init": ("raise ValueError('two\\nlines')", "sys.exit(3)", None),
    "log": ("raise BrokenPipeError(32, 'x')", "raise type('Odd', (Exception,), {})('o')", None),
    "finish": ("raise KeyboardInterrupt", "raise MemoryError", None),
}


@pytest.fixture(scope="module")
def plain(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    program = Program(text, tmp_path_factory.mktemp("plain"))
    program.train("deterministic=true")
    return program


@pytest.mark.parametrize("stage", FAILURES)
def test_trackers_that_fail_are_named_once_and_the_run_is_the_same(text, plain, tmp_path, stage):
    program = Program(text, tmp_path)
    for package, failure in zip(("wandb", "trackio", "tensorboard"), FAILURES[stage], strict=True):
        if failure is not None:
            write_fake(tmp_path, package, stage, failure)
    if stage == "init":  # nothing can be written there
        program.dump_dir.mkdir()
        (program.dump_dir / "tensorboard").symlink_to("/proc")
    printed = program.train("deterministic=true", f"logging.to=[{','.join(NAMES)}]")
    assert "Traceback" not in printed and "Exception" not in printed
    for name, failure in zip(("wandb", "trackio", "tensorboard"), FAILURES[stage], strict=True):
        named = re.findall(rf"warning: logging\.to: {name} has failed \(.*", printed)
        fails = failure is not None or stage == "init"
        assert len(named) == fails, printed
    if stage in ("log", "finish"):
        expected = rounded(program.expected())
        assert {name: program.in_tensorboard()[name] for name in expected} == expected
    same = [line for line in program.lines() if "loss" in line]
    there = [line for line in plain.lines() if "loss" in line]
    assert [line["chain"] for line in same] == [line["chain"] for line in there]
    assert (program.dump_dir / "checkpoints/0000000006/manifest.json").exists()


def start(folder: Path, *names: str) -> Trackers:
    to = LoggingArgs(to=list(names), trackio=TrackioArgs() if "trackio" in names else None)
    return Trackers(to, "name", {"data.sources": {"one": 1}}, folder)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("lingua")]


def test_a_full_disk_ends_the_event_file_and_nothing_else(tmp_path, caplog):
    trackers = start(tmp_path, "tensorboard")
    [file] = (tmp_path / "tensorboard").iterdir()
    trackers.log("metrics.jsonl", {"step": 1, "loss": 0.5})
    wait_for(lambda: trackers.threads[0].lines.empty())
    with full_disk(file.stat().st_size + 10):
        for step in (2, 3, 4):
            trackers.log("metrics.jsonl", {"step": step, "loss": 1.0})
        trackers.finish()
    [warning] = warnings_of(caplog)
    assert "logging.to: tensorboard has failed (OSError: [Errno 27] File too large" in warning
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(1, 0.5)]


@pytest.mark.parametrize("stage", ["init", "log", "finish"])
def test_one_that_hangs_is_left_behind(tmp_path, monkeypatch, caplog, stage):
    monkeypatch.setattr(tracking, "WAIT_S", 0.3)
    monkeypatch.setattr(tracking, "MAX_LINES", 5)
    monkeypatch.syspath_prepend(tmp_path / "fakes")
    monkeypatch.delitem(sys.modules, "wandb")
    write_fake(tmp_path, "wandb", stage, "__import__('time').sleep(1000)")
    trackers = start(tmp_path, "wandb", "tensorboard")
    for step in range(1, 12):
        trackers.log("metrics.jsonl", {"step": step, "loss": float(step)})
        wait_for(lambda: trackers.threads[1].lines.empty())
    trackers.finish()
    warning = warnings_of(caplog)[-1]
    why = "it has not finished after 0 s" if stage == "finish" else "5 lines wait for it"
    assert f"logging.to: wandb has failed ({why}); nothing more is sent" in warning
    assert len(warnings_of(caplog)) == 1
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in read.Scalars("loss")] == list(range(1, 12))


@pytest.mark.soak
def test_a_program_ends_though_the_end_of_a_tracker_hangs(text, tmp_path):
    program = Program(text, tmp_path)
    write_fake(tmp_path, "wandb", "finish", "__import__('time').sleep(1000)")
    assert "wandb has failed (it has not finished after 30 s)" in program.train(
        "logging.to=[wandb]"
    )


def test_rows_that_trackio_cannot_write_are_named(text, tmp_path):
    program = Program(text, tmp_path)
    program.env["TRACKIO_DIR"] = "/proc/trackio"
    printed = program.train("logging.to=[trackio]")
    assert len(re.findall(r"warning: logging\.to: trackio has failed", printed)) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_package_that_is_missing_is_a_mistake(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # as Python marks an absent package
    advice = f"{name}, which is not installed (pip install {name})"
    refused(lambda: check_packages(LoggingArgs(to=[name])), f"logging.to = {name}", advice)


def test_the_group_of_a_tracker_chooses_it_too():
    assert LoggingArgs().trackers == {}
    both = LoggingArgs(to=["tensorboard", "tensorboard"], trackio=TrackioArgs("mine"))
    assert both.trackers == {"tensorboard": None, "trackio": TrackioArgs("mine")}


def test_a_job_that_evaluates_has_a_run_of_wandb_where_its_run_has():
    def given(to: str) -> dict[str, str]:
        args = arguments({"logging.to": to, "eval.tasks": "[choice]"})
        words = (word.partition("=") for word in job_arguments(args, Path("checkpoint"), 3))
        return {key: value for key, _, value in words if key.startswith("wandb.")}

    assert (
        given("[wandb]").items() >= {"wandb.project": '"lingua"', "wandb.group": '"small"'}.items()
    )
    assert given("[tensorboard,trackio]") == {}
