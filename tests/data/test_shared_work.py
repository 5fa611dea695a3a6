"""Preparation by many processes: shared, stopped, killed, taken over; and its command."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lingua.data.prepare.sources import shard_folder, source_files
from lingua.data.prepare.units import plan_units
from lingua.errors import UserError
from lingua.lock import is_free
from lingua.tokenizer import build_tokenizer
from tests.data.test_prepare import (
    TEXTS,
    Prepared,
    contents,
    error_of,
    expected_tokens,
    is_held_out,
    make_args,
    train_tokens,
    write_jsonl,
)


@pytest.fixture
def corpus(tmp_path):
    """A folder of jsonl in subfolders, in an order that sorting must find."""
    write_jsonl(tmp_path / "a" / "b" / "2.jsonl", TEXTS[300:500])
    write_jsonl(tmp_path / "a" / "a.jsonl", TEXTS[:300])
    write_jsonl(tmp_path / "a" / "z.jsonl", TEXTS[500:], key="content")
    return tmp_path


BUILD = """
import sys
from lingua.data.args import DataArgs
from lingua.data.prepare.sources import prepare_source
from lingua.tokenizer import build_tokenizer

if __name__ == "__main__":
    root, processes = sys.argv[1], int(sys.argv[2])
    args = DataArgs(root_dir=root, sources={"a": 1.0})
    say = lambda line: print(line, flush=True)
    tokenizer = build_tokenizer(args.tokenizer)
    say("ready")
    sys.stdin.readline()
    prepare_source("a", args, tokenizer, say, processes=processes, unit_bytes=2_000_000)
    print("done", flush=True)
"""


@pytest.fixture
def big_corpus(tmp_path):
    for i in range(8):
        write_jsonl(tmp_path / "a" / f"{i}.jsonl", [f"{i} {text}" * 40 for text in TEXTS[:400]])
    return tmp_path


def start(script: Path, root: Path, processes: int, hold: bool = False) -> subprocess.Popen:
    """A process that prepares source a; with `hold` it begins when it gets a line."""
    script.write_text(BUILD, encoding="utf-8")
    command = [sys.executable, str(script), str(root), str(processes)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE if hold else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
    return [int(child) for child in listed.split()]


def wait_for(condition, timeout_s: float = 20):
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, "timed out"
        time.sleep(0.002)
    return value


@pytest.mark.parametrize("processes", [1, 2])
def test_kill_9_loses_only_the_parts_under_way(big_corpus, tmp_path_factory, processes):
    work = tmp_path_factory.mktemp("work")
    cache = big_corpus / ".tokens"
    process = start(work / "build.py", big_corpus, processes)
    wait_for(lambda: list(cache.glob("a-*/????????????????.json")))
    children = children_of(process.pid)
    process.kill()
    process.wait()
    finished = {p: p.stat().st_mtime_ns for p in cache.glob("a-*/????????????????.json")}
    assert 1 <= len(finished) < 8
    wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    args = make_args(big_corpus)
    begin = time.monotonic()
    again = Prepared(args, unit_bytes=2_000_000, processes=1)
    assert time.monotonic() - begin < 15, "waited for a lock whose owner is dead"
    assert "of 8 parts are there already" in "".join(again.lines)
    for path, mtime in finished.items():
        assert path.stat().st_mtime_ns == mtime
    untouched = make_args(big_corpus, cache_dir=str(work / "cache"))
    fresh = Prepared(untouched, unit_bytes=2_000_000, processes=1)
    assert contents(again.source.folder) == contents(fresh.source.folder)


def test_two_that_start_at_once_share_the_work(big_corpus, tmp_path_factory):
    work = tmp_path_factory.mktemp("work")
    both = [start(work / f"build{i}.py", big_corpus, 1, hold=True) for i in range(2)]
    assert [process.stdout.readline() for process in both] == ["ready\n"] * 2
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    made = [int(re.search(r"all 8 parts are there, (\d) made here", out)[1]) for out, _ in outputs]
    assert sum(made) == 8 and min(made) > 0
    again = Prepared(make_args(big_corpus), unit_bytes=2_000_000)
    assert not again.built


def hold_lock(lock: Path, lifetime_s: int, host: str = "") -> subprocess.Popen:
    """A process that holds the lock for 4 s; with `host`, as if on that machine."""
    script = (
        "import sys, time\nfrom datetime import timedelta\nfrom flufl.lock import Lock\n"
        "lock = Lock(sys.argv[1], lifetime=timedelta(seconds=int(sys.argv[2])))\n"
        "if sys.argv[3]:\n"
        "    lock._hostname = sys.argv[3]\n"
        "    lock._set_claimfile()\n"
        "with lock:\n"
        "    print('held', flush=True); time.sleep(4)\n"
    )
    command = [sys.executable, "-c", script, str(lock), str(lifetime_s), host]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_part_that_another_process_builds_is_waited_for_and_the_rest_built(corpus):
    args = make_args(corpus)
    folder = shard_folder("a", args, build_tokenizer(args.tokenizer))
    folder.mkdir(parents=True)
    unit = plan_units(source_files("a", args), 27_000)[1]
    process = hold_lock(folder / f"{unit.id}.lock", 60)
    begin = time.monotonic()
    waited = Prepared(args, processes=1, unit_bytes=27_000)
    assert time.monotonic() - begin > 3
    process.wait()
    (line,) = [line for line in waited.lines if "waiting" in line]
    assert f"waiting for 1 parts of other processes, such as process {process.pid}" in line
    assert train_tokens(waited.source) == expected_tokens(TEXTS)


def test_a_part_whose_builder_died_on_another_machine_is_taken_over(corpus):
    """Its lock expires: here it did 11 s ago, one more than the clocks may differ."""
    args = make_args(corpus)
    folder = shard_folder("a", args, build_tokenizer(args.tokenizer))
    folder.mkdir(parents=True)
    unit = plan_units(source_files("a", args), 27_000)[1]
    lock = folder / f"{unit.id}.lock"
    process = hold_lock(lock, 60, host="elsewhere.example")
    process.kill()
    process.wait()
    assert not is_free(lock)
    os.utime(lock, (time.time() - 9, time.time() - 9))
    assert not is_free(lock)
    os.utime(lock, (time.time() - 11, time.time() - 11))
    assert is_free(lock)
    taken = Prepared(args, processes=1, unit_bytes=27_000)
    assert train_tokens(taken.source) == expected_tokens(TEXTS)
    assert not list(folder.glob("*.lock*"))


def test_one_that_waits_says_for_whom(corpus):
    args = make_args(corpus)
    folder = shard_folder("a", args, build_tokenizer(args.tokenizer))
    folder.mkdir(parents=True)
    lock = f"{folder}.lock"
    process = hold_lock(Path(lock), 60)
    waited = Prepared(args)
    process.wait()
    (line,) = [line for line in waited.lines if "waiting" in line]
    assert f"waiting for process {process.pid}" in line and lock in line
    assert waited.built


def test_a_worker_that_is_killed_is_an_error_not_a_hang(big_corpus, tmp_path_factory):
    work = tmp_path_factory.mktemp("work")
    process = start(work / "build.py", big_corpus, 2)

    def workers() -> list[int]:
        found = [
            pid
            for pid in children_of(process.pid)
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        return found if list((big_corpus / ".tokens").glob("a-*/*.tmp-*")) else []

    os.kill(wait_for(workers)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "data.sources.a: a process that tokenized it was killed" in errors


def test_a_workers_error_is_the_real_one(corpus):
    with open(corpus / "a" / "b" / "2.jsonl", "a", encoding="utf-8") as file:
        file.write("not json\n")
    with pytest.raises(UserError, match=r"2\.jsonl:201: not JSON"):
        Prepared(make_args(corpus), processes=2, unit_bytes=27_000)


# ---- python -m lingua.data.prepare


def run_prepare(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lingua.data.prepare", *argv]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)


def test_the_command_takes_a_training_config_and_reports_what_is_there(corpus):
    with open(corpus / "a" / "a.jsonl", "a", encoding="utf-8") as file:
        file.write('\n{"text": null}\n{"text": 1}\n\n')
    write_jsonl(corpus / "late.jsonl", ["text of a stage"])
    (corpus / "c.yaml").write_text(
        f"name: x\nsteps: 10\nmodel: {{dim: 8}}\nmyapp: {{x: 1}}\ndata:\n"
        f"  root_dir: {corpus}\n  sources: {{a: 1, unused: 0}}\n  on_bad_record: skip\n"
        "  stages: [{from_step: 5, sources: {late: 1}}]\n"
    )
    config = f"config={corpus / 'c.yaml'}"
    first = run_prepare(config, "processes=1")
    assert first.returncode == 0, first.stderr
    held_out = [text for text in TEXTS if is_held_out(text)]
    tokens, held_out_tokens = (
        sum(len(text.encode()) + 2 for text in texts) for texts in (TEXTS, held_out)
    )
    lines = [line for line in first.stdout.splitlines() if "data.sources.a: 700 documents" in line]
    assert lines[0].startswith(
        f"data.sources.a: 700 documents, {tokens:,} tokens "
        f"({1 - 1400 / tokens:.2f} bytes a token); held out {len(held_out)} documents "
        f"({len(held_out) / 700:.2%}), "
        f"{held_out_tokens} tokens ({held_out_tokens / tokens:.2%})"
    )
    skipped = "4 bad records left out (2 blank line, 1 null text, 1 text is not a string)"
    assert f"data.sources.a: {skipped}" in first.stdout
    assert "data.sources.late: 1 documents" in first.stdout and "unused" not in first.stdout
    assert "100%" in first.stderr and "B/s" in first.stderr

    again = run_prepare(config)
    assert lines[0] in again.stdout and "tokenizing" not in again.stdout + again.stderr
    wrong = run_prepare(config, "data.sources.b=1")
    assert wrong.returncode == 2 and "data.sources.b: there is no" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_a_disk_that_is_clearly_too_small_is_told_before_tokenizing(corpus, monkeypatch):
    text_bytes = sum(path.stat().st_size for path in corpus.rglob("*.jsonl"))

    def with_free(n_bytes: int) -> None:
        usage = type(shutil.disk_usage(corpus))(10**12, 10**12 - n_bytes, n_bytes)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    with_free(text_bytes)  # byte tokens take two bytes
    message = error_of(make_args(corpus))
    assert "data.sources.a: the token shards" in message and "data.cache_dir" in message
    assert not list((corpus / ".tokens").glob("a-*/*"))
    with_free(2 * text_bytes)
    assert Prepared(make_args(corpus)).built
