"""A run that stops goes on as the same run (on any topology: test_matrix.py), or says why not."""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from apps.bench.launch import read_lines
from apps.bench.promise import compare
from apps.main import app as main
from apps.main import train as program
from lingua.base.dump_dir import METRICS
from lingua.base.lock import claimed
from lingua.data.cache import shard_folder
from lingua.run.records import Record
from lingua.tokenizer.build import build_tokenizer
from tests.apps.meshes import mesh, on_meshes
from tests.apps.runs import (
    SMALL,
    Interrupt,
    NanAt,
    Outcome,
    Runs,
    Twist,
    arguments,
    differs,
    digests,
    prepare,
    relative,
)
from tests.forks import optimizer, soap
from tests.programs import python, wait_for
from tests.tokenizer.test_tokenizer import write_byte_level

K, END = 4, 7  # where the run stops first, and then
GO_ON = {"stop_at": END}
SOAK = pytest.mark.soak
MUON = {"optim.name": "muon", "optim.muon.dtype": "fp32"}
REPO = Path(__file__).parents[2]
Process = subprocess.Popen[str]
SECRET = secrets.token_hex()  # of the environment of every program here


def test_a_global_batch_size_left_open_is_decided_once(runs, tmp_path):
    """By the first start: a later one, on other ranks, takes over what that wrote."""
    left_open = {"data.global_batch_size": "null", "data.batch_size": 2}
    run = runs.train((2, 1, 1), left_open | {"stop_at": 2})
    assert "global_batch_size: 4" in (run.dump_dir / "config.yaml").read_text()
    assert "data.global_batch_size = 4: it was left open" in run.log
    run = runs.train((1, 3, 1), left_open | {"stop_at": 4}, dump_dir=run.dump_dir)
    assert run.log.count("it was left open") == 1 and "null would give 6 now" in run.log
    four = runs.train((1, 1, 1), {"data.global_batch_size": 4, "stop_at": 4})
    assert differs(run, four) == []
    shutil.rmtree(run.dump_dir / "checkpoints")  # as if killed before the first save
    run = runs.train((1, 1, 1), left_open | {"stop_at": 4}, dump_dir=run.dump_dir)
    assert differs(run, four) == []


def test_a_guarded_change_is_refused_by_name_and_can_be_allowed(runs, tmp_path):
    """Also of a run that is finished."""
    run = runs.train((1, 2, 1), {"stop_at": K})
    allowed = {"seed": 7, "data.sources": "{one: 1, two: 1}"}
    change = allowed | {"model.n_layers": 3, "optim.name": "muon"}
    where = {"dump_dir": run.dump_dir}
    error = runs.train((2, 1, 1), change | {"stop_at": K}, **where, refused=True).error
    assert "seed: 42 in the checkpoint, 7 now" in error
    assert "data.sources: {'one': 2.0, 'two': 1.0} in the checkpoint" in error
    keys = re.search(r"or name them in checkpoint.allow_change: \[(.*)\]", error)[1].split(", ")
    assert set(keys) == change.keys() and all(f"\n  {key}: " in error for key in keys)

    assert "the run is finished" not in run.log
    runs.train((1, 2, 1), {"stop_at": K}, **where)
    assert "the run is finished" in run.log
    allowed |= GO_ON | {"checkpoint.allow_change": "[seed, data.sources]"}
    run = runs.train((2, 1, 1), allowed, **where)
    assert run.column("step") == list(range(1, END + 1))
    assert "seed" in run.log and "guarded" in run.log


def test_an_announced_change_is_printed_and_holds(runs, stopped, tmp_path):
    dump_dir = stopped.copy(tmp_path / "run").dump_dir
    change = GO_ON | {"optim.weight_decay": 0.5, "optim.lr": 1e-3, "optim.beta2": 0.9}
    copy = stopped.copy(tmp_path / "before").dump_dir
    before = runs.train((1, 1, 1), GO_ON, dump_dir=copy, look=True).restored["groups"]
    run = runs.train((1, 1, 1), change, dump_dir=dump_dir, look=True)
    after = run.restored["groups"]
    matrix, gain = "layers.0.attention.wq.weight", "norm.weight"
    assert (before[matrix]["weight_decay"], after[matrix]["weight_decay"]) == (0.1, 0.5)
    assert (before[gain]["weight_decay"], after[gain]["weight_decay"]) == (0.0, 0.0)
    assert after[matrix]["betas"] == (0.9, 0.9)
    table = [line.split()[1:] for line in run.log.splitlines()]
    assert ["optim.weight_decay", "0.1", "0.5", "announced"] in table
    assert ["optim.lr", "0.004", "0.001", "announced"] in table
    assert run.lines[K]["lr"] == pytest.approx(1e-3, rel=0.1)


def test_another_text_or_tokenizer_behind_the_same_name_is_refused(runs, tmp_path):
    for name in ("one", "two"):
        shutil.copy(runs.text / f"{name}.jsonl", tmp_path)
    path = tmp_path / "tokenizer.json"
    settings = {
        "data.root_dir": tmp_path,
        "data.tokenizer.name": "hf",
        "data.tokenizer.path": write_byte_level(path),
        "model.vocab_size": 400,
        "stop_at": 2,
    }
    run = runs.train((1, 1, 1), prepare(settings))

    def error() -> str:
        changed = prepare(settings | GO_ON)
        return runs.train((1, 1, 1), changed, dump_dir=run.dump_dir, refused=True).error

    spec = json.loads(path.read_text())
    vocabulary = spec["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(spec))
    assert "data.tokenizer.content: " in error()
    write_byte_level(path)
    shutil.copy(tmp_path / "two.jsonl", tmp_path / "one.jsonl")
    said = error()
    assert "data.content.one" in said and "data.content.two" not in said
    shutil.copy(runs.text / "one.jsonl", tmp_path)
    again = runs.train((1, 1, 1), prepare(settings | GO_ON), dump_dir=run.dump_dir)
    assert again.column("step")[:3] == [1, 2, 3]


def test_a_finished_run_shows_text_whatever_positions_tp_shares(runs):
    """A prompt of 64 tokens does not divide by 3 ranks; the head has a token more than bytes."""
    heads = {"model.n_heads": 3, "model.n_kv_heads": 3, "model.n_layers": 1, "data.seq_len": 96}
    run = runs.train((1, 1, 3), heads | {"steps": 1, "stop_at": "null"})
    assert len(run.samples[0]["prompt"]) > 50


def test_a_finished_run_says_so_and_can_be_extended(runs):
    short = {"steps": 3, "stop_at": "null", "data.seq_len": 32}
    run = runs.train((1, 2, 1), short)
    assert {line["step"] for line in run.held_out} == {3}
    assert {sample["step"] for sample in run.samples} == {3}
    assert all(sample["prompt"] and sample["text"] for sample in run.samples)
    assert f"the newest checkpoint is {run.checkpoint(3)}" in run.log
    lines, files = run.lines, sorted(run.dump_dir.rglob("*"))
    start = run.dump_dir / "starts" / "000002"

    again = runs.train((2, 1, 1), short, dump_dir=run.dump_dir)
    assert f"the run is finished: {run.checkpoint(3)} is step 3 of 3" in again.log
    assert again.lines == lines and sorted(run.dump_dir.rglob("*")) == sorted([*files, start])

    longer = runs.train((1, 1, 1), short | {"steps": 5}, dump_dir=run.dump_dir)
    assert longer.column("step") == [1, 2, 3, 4, 5]
    assert longer.lines[:3] == lines
    assert f"resuming {run.checkpoint(3)} (step 3)" in longer.log
    table = [line.split()[1:] for line in longer.log.splitlines()]
    assert ["steps", "3", "5", "announced"] in table


def test_a_damaged_checkpoint_is_skipped_with_a_line_and_lines_are_cut_back(runs, through):
    """The other folders that are skipped: tests/checkpoint/test_checkpoint.py."""
    often = {"checkpoint.dump.every": 2}
    run = runs.train((1, 2, 1), often | {"stop_at": 6})
    newest = run.checkpoint(6)
    with next(newest.glob("__1_*")).open("r+b") as shard:
        shard.truncate(100)
    with (run.dump_dir / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 7, "lo')  # torn by a kill

    run = runs.train((2, 1, 1), often | GO_ON, dump_dir=run.dump_dir)
    assert f"resuming {run.checkpoint(4)} (step 4)" in run.log
    [line] = [line for line in run.log.splitlines() if f"{newest} is " in line]
    assert "is not a whole checkpoint (__1_0.distcp has 100 bytes" in line
    start = [event for event in run.events if event["event"] == "start"][-1]
    assert (start["cause"], start["steps_again"], start["start_number"]) == ("stop_at", 2, 2)
    assert "start 2: 2 steps to do again; before: stop_at" in run.log
    assert run.column("step") == list(range(1, END + 1))
    assert differs(run, through) == []


@pytest.fixture(scope="module")
def nan_at_step_3(runs: Runs) -> NanAt:
    position = 2 * 7 + 4
    return NanAt(runs.stream().rows([position])[0, :16].tolist())


@pytest.mark.parametrize(
    ("sizes", "app", "settings"),
    [
        pytest.param((1, 2, 1), main, {}, id="adamw"),
        pytest.param((1, 1, 2), main, MUON, id="muon"),
        pytest.param((1, 1, 2), optimizer.app, {}, id="of torch"),
        pytest.param((2, 1, 1), soap.app, {}, id="of whole matrices"),
        pytest.param((1, 2, 2), main, MUON, id="muon on four", marks=SOAK),
    ],
)
def test_a_bad_step_changes_nothing_and_is_counted(runs, nan_at_step_3, sizes, app, settings):
    settings = settings | {"stop_at": 4}
    clean = runs.train((1, 1, 1), settings, app=app)
    settings |= {"optim.on_nonfinite": "skip", "checkpoint.dump.every": 1}
    run = runs.train(sizes, settings, app=app, build=nan_at_step_3)
    assert run.column("skipped_steps") == [0, 0, 1, 1]
    assert run.lines[2]["loss"] is None and run.lines[2]["grad_norm"] is None
    assert digests(run.tensors(3)) == digests(run.tensors(2))
    assert digests(run.tensors(4)) != digests(run.tensors(3))
    # It consumed its rows and its rate.
    assert run.column("batch_hash") == clean.column("batch_hash")
    assert run.column("lr") == clean.column("lr")
    assert max(relative(run.column("loss")[:2], clean.column("loss")[:2])) < 1e-5
    again = runs.train(sizes, settings | {"stop_at": 5}, app=app, dump_dir=run.dump_dir)
    assert again.column("skipped_steps") == [0, 0, 1, 1, 1]


def test_a_bad_step_stops_the_run_is_named_and_loses_nothing(runs, nan_at_step_3):
    seldom = {"logging.freq": 5, "checkpoint.dump.every": 100}
    run = runs.train((2, 1, 1), seldom, build=nan_at_step_3, refused=True)
    assert "step 3: the gradient is not finite (rows 14 to 20)" in run.error
    [checkpoint] = run.checkpoint(0).parent.iterdir()
    assert checkpoint == run.checkpoint(2)
    two = runs.train((2, 1, 1), {"stop_at": 2})
    assert digests(run.tensors(2)) == digests(two.tensors(2))
    assert run.state(2)["progress"]["position"] == 14

    again = runs.train((1, 2, 1), seldom, build=nan_at_step_3, dump_dir=run.dump_dir, refused=True)
    assert again.error == run.error
    skip = {"optim.on_nonfinite": "skip", "stop_at": 4}
    run = runs.train((1, 2, 1), skip, build=nan_at_step_3, dump_dir=run.dump_dir)
    assert run.column("step") == [3, 4] and run.column("skipped_steps") == [1, 1]


@pytest.mark.parametrize(
    ("sizes", "other", "app", "settings"),
    [
        pytest.param((1, 2, 1), (2, 1, 1), main, {"data.batch_size": 2}, id="adamw"),
        pytest.param((1, 1, 2), (1, 2, 1), main, MUON, id="muon"),
        pytest.param((2, 1, 1), (1, 1, 2), soap.app, {}, id="of whole matrices", marks=SOAK),
        pytest.param((1, 2, 2), (2, 2, 1), main, MUON, id="on four", marks=SOAK),
    ],
)
def test_a_step_without_targets_changes_nothing_and_is_counted(runs, sizes, other, app, settings):
    settings = settings | {"stop_at": 4}
    clean = runs.train((1, 1, 1), settings, app=app)
    settings |= {"data.on_no_targets": "skip", "checkpoint.dump.every": 1}
    where = {"app": app, "twist": Twist(without_targets=3)}
    run = runs.train(sizes, settings, **where)
    assert run.column("skipped_steps") == [0, 0, 1, 1]
    assert run.lines[2]["loss"] is None and run.lines[3]["loss"] is not None
    assert digests(run.tensors(3)) == digests(run.tensors(2))
    assert digests(run.tensors(4)) != digests(run.tensors(3))
    assert run.column("lr") == clean.column("lr")
    assert run.state(4)["progress"]["position"] == clean.state(4)["progress"]["position"]
    later = settings | {"stop_at": 6}
    stopped = runs.train(other, settings | {"stop_at": 2}, **where)
    again = runs.train(other, later, dump_dir=stopped.dump_dir, **where)
    through = runs.train(sizes, later, dump_dir=run.dump_dir, **where)
    assert again.column("skipped_steps") == [0, 0, 1, 1, 1, 1]
    for key in ("loss", "grad_norm"):
        numbers = [r.column(key)[:2] + r.column(key)[3:] for r in (again, through)]
        assert max(relative(*numbers)) < 1e-4


def test_a_run_that_stops_before_a_step_without_targets_loses_nothing(runs, nan_at_step_3):
    seldom = {"logging.freq": 5, "checkpoint.dump.every": 100}
    twist = Twist(without_targets=3)
    run = runs.train((2, 1, 1), seldom, twist=twist, refused=True)
    parts = "step 3: all targets are ignored", "(rows 14 to 20 of one, two)", "data.on_no_targets"
    assert all(part in run.error for part in parts)
    [checkpoint] = run.checkpoint(0).parent.iterdir()
    assert checkpoint == run.checkpoint(2)
    two = runs.train((2, 1, 1), {"stop_at": 2})
    assert digests(run.tensors(2)) == digests(two.tensors(2))
    again = runs.train((1, 2, 1), seldom, twist=twist, dump_dir=run.dump_dir, refused=True)
    assert again.error == run.error
    skip = {"data.on_no_targets": "skip", "stop_at": 4}
    run = runs.train((1, 2, 1), skip, twist=twist, dump_dir=run.dump_dir)
    assert run.column("step") == [3, 4] and run.column("skipped_steps") == [1, 1]

    # The count is right where one kind of step stops the run and the other is skipped.
    for step, key, end in ((4, "optim.on_nonfinite", 3), (2, "data.on_no_targets", 2)):
        settings, twist = seldom | {key: "skip"}, Twist(without_targets=step)
        run = runs.train((1, 2, 1), settings, twist=twist, build=nan_at_step_3, refused=True)
        assert f"step {end + 1}: " in run.error
        assert run.state(end)["progress"]["skipped_steps"] == 1


BACKGROUND = {"checkpoint.dump.every": 2, "checkpoint.async_save": True}
# The step after which a run stops: ranks agree while they work on a step, and begin before it.
MOMENTS: dict[str, tuple[Interrupt, dict[str, Any], int | None]] = {
    "in the first of two micro-steps": (
        Interrupt(signal.SIGINT, forward=1, rank=1), {"data.batch_size": 2}, 2,
    ),
    "in the third, to all": (Interrupt(signal.SIGUSR2, forward=3, rank=None), {}, 4),
    "in the first validation": (
        Interrupt(signal.SIGTERM, forward=3, rank=1), {"validation.every": 2}, 3,
    ),
    "in a save": (Interrupt(signal.SIGUSR2, None, rank=1), {"checkpoint.dump.every": 2}, 3),
    "in a save behind the next steps": (Interrupt(signal.SIGTERM, None, rank=0), BACKGROUND, None),
}  # fmt: skip


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_at_any_moment_stops_and_saves_all(runs, through, moment):
    interrupt, settings, expected = MOMENTS[moment]
    run = runs.train((1, 2, 1), settings, build=interrupt)
    step = run.column("step")[-1]
    assert expected in (None, step)
    number = signal.Signals(interrupt.number).name
    last = run.log.splitlines()[-1]
    assert f"stopped by {number} after step {step}, which is saved. The same command" in last
    assert run.checkpoint(step).is_dir() and not list(run.checkpoint(0).parent.glob("*.tmp-*"))
    run = runs.train((1, 1, 1), settings | GO_ON, dump_dir=run.dump_dir)
    assert differs(run, through) == []


def test_a_signal_while_text_is_prepared_is_followed_at_once(runs, tmp_path):
    """Who is waited for never finishes. Torchrun may end the rank that leaves last."""
    shutil.copy(runs.text / "one.jsonl", tmp_path)
    args = arguments({"data.root_dir": tmp_path, "data.sources": "{one: 1}"})
    folder = shard_folder("one", args.data, build_tokenizer(args.data.tokenizer))
    folder.parent.mkdir(parents=True)
    with claimed(folder.with_name(f"{folder.name}.lock")):
        run = tmp_path / "run"
        where = {"data.root_dir": tmp_path, "data.sources": "{one: 1}", "dump_dir": run}
        job, log = start(2, python(), where), run / "train.log"
        wait_for(lambda: log.exists() and ": waiting" in log.read_text(), job)
        os.kill(process_of_rank(run, 0), signal.SIGUSR2)
        said, _ = job.communicate(timeout=60)
    codes = re.findall(r"exitcode  : (-?\d+) \(pid: ", said)
    assert job.returncode == 1 and len(codes) == 2 and {"140"} <= set(codes) <= {"140", "-15"}, said
    assert "stopped by SIGUSR2 while the text was prepared. The same command resumes it" in said
    assert list((run / "checkpoints").iterdir()) == []


def start(
    n_ranks: int,
    python: list[str],
    settings: dict[str, Any],
    max_restarts: int = 0,
    env: Mapping[str, str] = os.environ,
    **options: Any,
) -> Process:
    """The training program with `settings` over SMALL, under torchrun where it has several ranks;
    `options` of Popen."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    torchrun += [f"--max-restarts={max_restarts}"]
    launcher = [*python, *torchrun, "--no-python"] if n_ranks > 1 else []
    words = [f"{k}={v}" for k, v in (SMALL | settings).items()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(
        [*launcher, *python, "-m", "apps.main.train", *words],
        cwd=REPO,
        env={**env, "OMP_NUM_THREADS": "1", "A_SECRET": SECRET},
        **(pipes | options),
    )


def process_of_rank(dump_dir: Path, rank: int) -> int:
    """The process that torchrun started for a rank of the run."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, environ = ((process / n).read_bytes() for n in ("cmdline", "environ"))
        except OSError:  # it has ended
            continue
        wanted = f"dump_dir={dump_dir}".encode() in command.split(b"\0")
        if wanted and f"RANK={rank}".encode() in environ.split(b"\0"):
            return int(process.name)
    raise AssertionError(f"no process of rank {rank}")


def test_torchrun_does_not_restart_a_run_that_is_asked_to_stop(runs, through, tmp_path):
    """Another, a rank of which is killed, it does: that start finds nothing of the one before."""
    where = {"data.root_dir": runs.text, "dump_dir": tmp_path / "run"}
    endless = {"steps": 2000, "stop_at": "null", "checkpoint.dump.every": 1}
    job = start(2, python(), where | endless, max_restarts=3)
    metrics, log = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "train.log"
    wait_for(lambda: metrics.exists() and metrics.read_text().count('"loss"') >= 2, job)
    os.kill(process_of_rank(tmp_path / "run", 1), signal.SIGKILL)
    resuming = re.compile(r" resuming .*? step +\d+ loss", re.DOTALL)
    wait_for(lambda: resuming.search(log.read_text()), job)
    first, second = (process_of_rank(tmp_path / "run", rank) for rank in (0, 1))
    os.kill(second, signal.SIGINT)
    os.kill(first, signal.SIGTERM)
    said, _ = job.communicate(timeout=60)
    assert job.returncode == 0, said
    run = Outcome(tmp_path / "run", [])
    step = run.column("step")[-1]
    assert step < 2000
    assert f"stopped by SIGINT after step {step}, which is saved" in said
    assert "Traceback" not in said.partition(" resuming ")[2]
    files = [path for path in run.dump_dir.rglob("*") if path.is_file()]
    assert SECRET not in said and not any(SECRET.encode() in f.read_bytes() for f in files)

    end = {"steps": 2000, "stop_at": max(step + 1, END)}
    resumed = runs.train((1, 1, 1), end, dump_dir=run.dump_dir)
    assert resumed.column("step") == list(range(1, end["stop_at"] + 1))
    assert resumed.column("batch_hash")[:END] == through.column("batch_hash")


SAMPLES = REPO / "tests/samples"  # by version: text, shards, a dump dir after step 6, all metrics
CLOSE = 1e-5  # of losses, relative


@on_meshes((1, 1, 2), soak=[(1, 1, 1), (2, 1, 1)])
@pytest.mark.parametrize("version", [folder.name for folder in SAMPLES.iterdir()])
def test_a_run_of_an_earlier_version_goes_on_as_the_same_run(ranks, tmp_path, version, sizes):
    sample = shutil.copytree(SAMPLES / version, tmp_path / "sample")
    shards = {path: path.read_bytes() for path in sample.glob("text/.tokens/*/*.tokens")}
    inodes = {path: path.stat().st_ino for path in shards}
    config = sample / "config.yaml"  # without the key: a run keeps its held-out text
    config.write_text(config.read_text().replace("tokens: 200, ", ""))
    argv = [f"config={config}", f"dump_dir={sample}/run"]
    argv += [f"{key}={n}" for key, n in mesh(sizes).items()]
    argv += [f"data.root_dir={sample}/text", "data.workers=0"]
    n = sizes[0] * sizes[1] * sizes[2]
    ranks.run(n, program.main, argv)

    assert "(step 6)" in (sample / "run" / "train.log").read_text()
    whole = [json.loads(line) for line in (sample / "metrics.jsonl").read_text().splitlines()]
    whole = [line for line in whole if "loss" in line]
    found = read_lines(sample / "run" / METRICS)
    apart, equal = compare(whole, found)
    assert len(equal) == 12 and all(equal) and max(apart) < CLOSE
    a_step_off = [abs(b["loss"] / a["loss"] - 1) for a, b in pairwise(found)]
    assert min(a_step_off) > CLOSE and max(a_step_off) > 100 * CLOSE  # is seen
    assert [line["lr"] for line in found] == [line["lr"] for line in whole]
    assert Record(sample / "run").config["validation.tokens"] == 200
    # Its shards are used as they are, and no others are built.
    assert shards and set(sample.glob("text/.tokens/*/*.tokens")) == shards.keys()
    assert {path: path.stat().st_ino for path in shards} == inodes
