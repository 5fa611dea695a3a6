"""Checkpoints and the dump dir of apps/onefile/train.py: what it skips, refuses and takes over, and
that a run that was stopped at any moment is the run that was not."""

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from lingua.base.lock import exclusive
from tests.apps.onefile.conftest import (
    FILE,
    ONE,
    SIGNALS,
    different,
    module,
    results,
    run_file,
)
from tests.apps.runs import Outcome
from tests.programs import python, wait_for

KEEP_ALL = {"checkpoint.dump.every": 2, "checkpoint.dump.keep": -1}


@pytest.fixture(scope="module")
def through(onefile) -> Outcome:
    """Six steps without a stop. Tests copy it, or only read."""
    return onefile.train(KEEP_ALL)


@pytest.fixture
def run(through, tmp_path) -> Outcome:
    return through.copy(tmp_path / "run")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def seal(folder: Path) -> None:
    """Write the sizes and checksums of a changed checkpoint into its manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["xxh3_64"]
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        entry |= {"size": len(content), "xxh3_64": xxhash.xxh3_64_hexdigest(content)}
    text = json.dumps(manifest, sort_keys=True).encode()
    manifest["xxh3_64"] = xxhash.xxh3_64_hexdigest(text)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("program", ["onefile", pytest.param("runs", marks=pytest.mark.soak)])
def test_what_is_damaged_or_incomplete_is_skipped(onefile, runs, run, through, program):
    [tensors] = run.checkpoint(6).glob("*.distcp")
    flip(tensors)
    (run.checkpoint(4) / "manifest.json").write_text('{"step": 4, "fi')
    shutil.copytree(run.checkpoint(2), f"{run.checkpoint(8)}.tmp-1234")
    shutil.copytree(run.checkpoint(2), f"{run.checkpoint(8)}_bak")
    shutil.copytree(run.checkpoint(2), run.checkpoint(9))  # whose manifest is of step 2
    run.checkpoint(7).mkdir()
    start = onefile.train if program == "onefile" else lambda *a, **k: runs.train(ONE, *a, **k)
    again = start(KEEP_ALL, dump_dir=run.dump_dir)
    assert [event["step"] for event in again.events if event["event"] == "start"] == [0, 2]
    assert again.column("step") == [1, 2, 3, 4, 5, 6]
    assert different(results(again), results(through)) == []


def test_a_run_with_checkpoints_none_of_which_is_whole_is_refused(onefile, run):
    for step in (2, 4, 6):
        (run.checkpoint(step) / "train_state.json").unlink()
    before = (run.dump_dir / "metrics.jsonl").read_bytes()
    assert str(run.dump_dir) in onefile.train(KEEP_ALL, run.dump_dir, refused=True).error
    assert (run.dump_dir / "metrics.jsonl").read_bytes() == before


class Touch:
    """Unpickled it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_nothing_of_a_checkpoint_is_executed(onefile, run):
    made, metadata = run.dump_dir / "made", run.checkpoint(6) / ".metadata"
    whole = pickle.loads(metadata.read_bytes())
    entry = next(iter(whole.storage_data.values()))
    entry.relative_path = "../elsewhere"
    for content, name in ((pickle.dumps(Touch(made)), "mkdir"), (pickle.dumps(whole), "outside")):
        metadata.write_bytes(content)
        seal(run.checkpoint(6))
        more = KEEP_ALL | {"stop_at": 7}
        assert name in onefile.train(more, run.dump_dir, refused=True).error
        assert not made.exists()
    pickle.loads(pickle.dumps(Touch(made)))  # it would have
    assert made.exists()


def test_metrics_have_each_step_once_after_a_resume(onefile, run, through):
    shutil.rmtree(run.checkpoint(6))
    with (run.dump_dir / "metrics.jsonl").open("a") as f:
        f.write('{"step": 7, "loss": 1.0}\n{"step": 6, "config": "{}')
    again = onefile.train(KEEP_ALL, run.dump_dir)
    assert again.column("step") == [1, 2, 3, 4, 5, 6]
    assert different(results(again), results(through)) == []


def place_of(pid: int) -> str:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino} {fields[19]}"


def dates(folder: Path) -> dict[Path, int]:
    """Of its files but the log, in which apps/main says that it is refused."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "train.log")
    return {path: path.stat().st_mtime_ns for path in files}


def test_a_run_has_one_process(onefile, runs, run):
    """Neither program takes the folder of the other's living process; both that of a dead one."""
    more, lock = KEEP_ALL | {"stop_at": 7}, run.dump_dir / "run.lock"
    before = dates(run.dump_dir)
    with module().locked(run.dump_dir) as check:
        assert "run.lock" in runs.train(ONE, more, dump_dir=run.dump_dir, refused=True).error
        assert "run.lock" in onefile.train(more, run.dump_dir, refused=True).error
        check()
    assert not lock.exists()
    with exclusive(lock, print):
        assert "run.lock" in onefile.train(more, run.dump_dir, refused=True).error
    assert dates(run.dump_dir) == before
    owner = subprocess.Popen(["sleep", "60"])
    lock.write_text(f"process {owner.pid} on here, {place_of(owner.pid)}, {'0' * 16}\n")
    assert str(owner.pid) in onefile.train(more, run.dump_dir, refused=True).error
    owner.kill()
    owner.wait()
    assert onefile.train(more, run.dump_dir).column("step")[-1] == 7 and not lock.exists()
    lock.write_text(f"process 1 on elsewhere, {'0' * 36}-1 1, {'0' * 16}\n")
    assert "remove the file" in onefile.train(more, run.dump_dir, refused=True).error
    lock.write_text("")
    assert "remove the file" in onefile.train(more, run.dump_dir, refused=True).error


def test_a_run_whose_lock_another_took_writes_nothing_more(onefile, runs, tmp_path):
    """As after the process was stopped for long."""
    folder = tmp_path / "run"
    [result] = runs.ranks.run(
        1, run_file_and, onefile.words({"steps": 10**5, "stop_at": "null"}, folder), 3, replace_lock
    )
    assert result["code"] == 2 and "run.lock" in result["error"]
    assert (folder / "run.lock").read_text() == "another" and not (folder / "checkpoints").exists()


def replace_lock(folder: Path) -> None:
    (folder / "run.lock").write_text("another")


def interrupt(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def run_file_and(words: list[str], n_lines: int, act: Callable[[Path], None]) -> dict[str, Any]:
    """The program, and what happens beside it once it has written some lines of steps."""
    folder = Path(next(word.partition("=")[2] for word in words if word.startswith("dump_dir=")))
    metrics, done = folder / "metrics.jsonl", threading.Event()

    def watch() -> None:
        while not done.is_set():
            if metrics.exists() and metrics.read_text().count('"loss"') >= n_lines:
                act(folder)
                return
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        return run_file(words)
    finally:
        done.set()
        thread.join()


def test_ctrl_c_saves_and_the_resume_is_the_run_without_it(onefile, runs, tmp_path):
    endless = {"steps": 2000, "stop_at": "null"}
    words = onefile.words(endless, tmp_path / "run")
    [result] = runs.ranks.run(1, run_file_and, words, 3, interrupt)
    stopped = Outcome(tmp_path / "run", [result])
    step = stopped.column("step")[-1]
    assert result["code"] == 130 and stopped.checkpoint(step).is_dir() and 3 <= step < 2000
    end = {"stop_at": step + 2}
    again, alone = onefile.train(endless | end, stopped.dump_dir), onefile.train(endless | end)
    assert different(results(again), results(alone)) == []


def without_lingua(words: list[str]) -> dict[str, Any]:
    """The program where lingua and apps cannot be imported."""
    names = [n for n in sys.modules if n.partition(".")[0] in ("lingua", "apps", "omegaconf")]
    hidden = {name: sys.modules.pop(name) for name in names}
    sys.modules |= dict.fromkeys(("lingua", "apps", "omegaconf"))
    try:
        with pytest.raises(ImportError):
            import lingua  # noqa: F401
        return run_file(words)
    finally:
        for name in ("lingua", "apps", "omegaconf"):
            sys.modules.pop(name, None)
        sys.modules |= hidden


def test_it_needs_nothing_of_lingua(onefile, runs, through, tmp_path):
    words = onefile.words(KEEP_ALL, tmp_path / "run")
    [result] = runs.ranks.run(1, without_lingua, words)
    assert result["code"] == 0, result["printed"]
    assert different(results(Outcome(tmp_path / "run", [])), results(through)) == []


@pytest.mark.soak
def test_what_a_resumed_run_may_change_and_what_not(onefile, run, through):
    more = KEEP_ALL | {"stop_at": 8}
    refused = {"data.global_batch_size": 5, "seed": 1, "data.sources": "{one: 1, two: 1}"}
    refused |= {"data.seq_len": 8, "model.dim": 24, "model.weight_tying": True, "model.n_layers": 1}
    for key, value in refused.items():
        assert key in onefile.train(more | {key: value}, run.dump_dir, refused=True).error
    before = (run.checkpoint(6) / "manifest.json").read_bytes()
    early = onefile.train(KEEP_ALL | {"stop_at": 3}, run.dump_dir)
    assert early.column("step") == through.column("step")
    assert (run.checkpoint(6) / "manifest.json").read_bytes() == before
    other = onefile.train(more | {"data.batch_size": 2, "data.workers": 0}, run.dump_dir)
    alone = onefile.train(more)
    assert other.column("batch_hash") == alone.column("batch_hash")
    assert other.column("loss") == pytest.approx(alone.column("loss"), rel=1e-5)
    mesh = {"deterministic": "mesh"}
    begun = onefile.train(mesh | {"stop_at": 2})
    assert (
        "data.batch_size"
        in onefile.train(mesh | {"data.batch_size": 3}, begun.dump_dir, refused=True).error
    )


@pytest.mark.soak
def test_the_newest_checkpoints_are_kept(onefile):
    run = onefile.train({"checkpoint.dump.every": 1, "checkpoint.dump.keep": 2})
    names = sorted(path.name for path in (run.dump_dir / "checkpoints").iterdir())
    assert names == ["0000000005", "0000000006"]


def test_folders_that_cannot_be_written_and_shards_that_were_cut_are_named(onefile, runs, tmp_path):
    (tmp_path / "file").write_text("")
    assert "file" in onefile.train({}, tmp_path / "file" / "run", refused=True).error
    root = shutil.copytree(runs.text, tmp_path / "text")
    [tokens, *_] = sorted((root / ".tokens").glob("one-*/*.train.tokens"))
    os.truncate(tokens, tokens.stat().st_size - 100)
    assert tokens.parent.name in onefile.train({"data.root_dir": root}, refused=True).error
    shutil.rmtree(root / ".tokens")
    assert "lingua data prepare" in onefile.train({"data.root_dir": root}, refused=True).error


def test_the_config_of_a_run_takes_the_tokens_that_the_run_used_alone(onefile, runs, run, tmp_path):
    root = shutil.copytree(runs.text, tmp_path / "text")
    words = [f"{run.dump_dir}/config.yaml", f"data.root_dir={root}", "stop_at=1"]
    assert onefile.start([*words, f"dump_dir={tmp_path}/same"]).column("step") == [1]
    for path in (root / ".tokens").glob("one-*/manifest.json"):  # those of another tokenizer
        path.write_text(json.dumps(json.loads(path.read_text()) | {"fingerprint": "0" * 32}))
    other = onefile.start([*words, f"dump_dir={tmp_path}/other"], refused=True)
    assert "data.sources.one: none that the run used" in other.error


def test_keys_that_do_not_fit_each_other_are_named(onefile):
    mistakes: list[dict[str, Any]] = [
        {"grad_acc_steps": 2, "data.batch_size": 3},
        {"grad_acc_steps": 8},
        {"model.vocab_size": 100},
    ]
    for mistake in mistakes:
        assert next(iter(mistake)).rpartition(".")[2] in onefile.train(mistake, refused=True).error


def test_a_run_for_some_seconds_ends_by_the_clock_with_its_rate_down(onefile):
    settings = {"seconds": 0.3, "stop_at": "null", "steps": 1000, "optim.warmup": 100}
    began = time.monotonic()
    run = onefile.train(settings | {"optim.scheduler": "linear", "optim.lr_min_ratio": 0.0})
    assert 0.3 <= time.monotonic() - began < 10
    rates = run.column("lr")
    assert max(rates) > 3e-3 and rates[-1] < 1e-3
    assert "on another machine it is another run" in run.ranks[0]["printed"]
    assert run.ranks[0]["printed"].splitlines()[-1].startswith("held-out ")
    assert run.checkpoint(len(rates)).is_dir()


def start(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as f:
        return subprocess.Popen([*python(), str(FILE), *words], stdout=f, stderr=f)


@pytest.mark.soak
@pytest.mark.parametrize("number", SIGNALS)
def test_a_process_that_a_signal_stops_saves(onefile, tmp_path, number):
    endless, log = {"steps": 10**5, "stop_at": "null"}, tmp_path / "log"
    job = start(onefile.words(endless, tmp_path / "run"), log)
    run = Outcome(tmp_path / "run", [])
    try:
        wait_for(lambda: len(run.lines) >= 3, job)
        job.send_signal(number)
        job.wait(60)
    finally:
        job.kill()
    step = run.column("step")[-1]
    assert job.returncode in (-number, 128 + number)
    assert run.checkpoint(step).is_dir() and not (run.dump_dir / "run.lock").exists()


@pytest.mark.soak
def test_a_run_that_is_killed_at_any_moment_is_the_run_that_was_not(onefile, runs, tmp_path):
    chance, saves = random.Random(1), tmp_path / "run" / "checkpoints"
    settings = {"checkpoint.dump.every": 1, "checkpoint.dump.keep": 3, "steps": 10**4}
    settings |= {"stop_at": "null"}
    run, in_a_save = Outcome(tmp_path / "run", []), 0
    for in_save in (False, True, True, False, True):
        begun = len(run.lines)
        job = start(onefile.words(settings, run.dump_dir), tmp_path / "log")
        try:
            wait_for(lambda n=begun: len(run.lines) > n + 2, job)
            until = time.monotonic() + chance.uniform(0.0, 0.3)
            while time.monotonic() < until or (in_save and not any(saves.glob("*.tmp-*"))):
                time.sleep(0.0002)
            time.sleep(chance.uniform(0.0, 0.01))
        finally:
            job.kill()
            job.wait()
        in_a_save += any(saves.glob("*.tmp-*"))
    assert in_a_save > 0
    newest = max(int(path.name) for path in saves.glob("[0-9]" * 10))
    end = settings | {"stop_at": newest + 2}
    again, alone = onefile.train(end, run.dump_dir), runs.train(ONE, end)
    assert again.column("step") == list(range(1, newest + 3))
    assert different(results(again), results(alone)) == []
    assert not any(saves.glob("*.tmp-*"))
