"""Preparation by many processes: shared, stopped, killed, taken over; and its command."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lingua.base.lock
from lingua.data.args import DataArgs
from lingua.data.sources import shard_folder, source_files
from lingua.tokenizer import build_tokenizer
from lingua.tools.commands import data_prepare
from lingua.tools.prepare.units import plan_units
from tests.data.prepared import (
    TEXTS,
    Prepared,
    check,
    contents,
    is_held_out,
    make_args,
    write_jsonl,
)
from tests.locks import ELSEWHERE, hold_lock
from tests.mistakes import refused
from tests.programs import python, wait_for

BUILD = """
import sys
from lingua.data.args import DataArgs
from lingua.data.sources import prepare_source
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


def workers_of(pid: int) -> list[int]:
    children = children_of(pid)
    return [p for p in children if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]


def test_kill_9_loses_only_the_parts_under_way(big_corpus, tmp_path_factory):
    work = tmp_path_factory.mktemp("work")
    cache = big_corpus / ".tokens"
    process = start(work / "build.py", big_corpus, 2)
    wait_for(lambda: list(cache.glob("a-*/????????????????.json")))
    wait_for(lambda: list(cache.glob("a-*/*.tmp-*.tokens")))  # of the next part
    children = children_of(process.pid)
    process.kill()
    process.wait()
    wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    finished = {p: p.stat().st_mtime_ns for p in cache.glob("a-*/????????????????.json")}
    assert 1 <= len(finished) < 8
    args = make_args(big_corpus)
    begin = time.monotonic()
    again = Prepared(args, unit_bytes=2_000_000, processes=1)
    assert time.monotonic() - begin < 15, "waited for a lock whose owner is dead"
    assert f"parts to build: {8 - len(finished)} of 8" in "".join(again.lines)
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
    builders = set()  # (part, process), by the names of what is being written
    while any(process.poll() is None for process in both):
        names = "\n".join(path.name for path in big_corpus.glob(".tokens/a-*/*.tmp-*"))
        builders |= set(re.findall(r"^(\w{16})\.tmp-.*-(\d+)\.", names, re.MULTILINE))
        time.sleep(0.001)
    assert [process.returncode for process in both] == [0, 0], [p.stderr.read() for p in both]
    assert {int(process) for _, process in builders} == {process.pid for process in both}
    assert len({part for part, _ in builders}) == len(builders), "a part was built twice"
    assert not Prepared(make_args(big_corpus), unit_bytes=2_000_000).built


def lock_of_a_part(args: DataArgs) -> Path:
    folder = shard_folder("a", args, build_tokenizer(args.tokenizer))
    folder.mkdir(parents=True)
    return folder / f"{plan_units(source_files('a', args), 27_000)[1].id}.lock"


def test_a_part_that_another_process_builds_is_waited_for_and_the_rest_built(corpus):
    args = make_args(corpus)
    begin = time.monotonic()
    with hold_lock(lock_of_a_part(args), 1.5) as process:
        waited = Prepared(args, processes=1, unit_bytes=27_000)
        assert time.monotonic() - begin > 1.5
    (line,) = [line for line in waited.lines if "waiting" in line]
    assert f"waiting for 1 part of other processes, such as process {process.pid} on " in line
    check(waited, TEXTS)


@pytest.mark.parametrize("content", [ELSEWHERE, ""], ids=["elsewhere", "unreadable"])
def test_a_part_whose_builder_died_elsewhere_is_taken_over(corpus, monkeypatch, content):
    monkeypatch.setattr(lingua.base.lock, "LIFETIME_S", 1)
    args = make_args(corpus)
    lock = lock_of_a_part(args)
    lock.write_text(content)
    begin = time.monotonic()
    taken = Prepared(args, processes=1, unit_bytes=27_000)
    assert time.monotonic() - begin > 1
    check(taken, TEXTS)
    assert not list(lock.parent.glob("*.lock*"))


def test_a_worker_that_is_killed_is_an_error_not_a_hang(big_corpus, tmp_path_factory):
    work = tmp_path_factory.mktemp("work")
    process = start(work / "build.py", big_corpus, 2)

    def workers() -> list[int]:
        begun = list((big_corpus / ".tokens").glob("a-*/*.tmp-*"))
        return workers_of(process.pid) if begun else []

    os.kill(wait_for(workers)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "data.sources.a: a process that tokenized it was killed" in errors


def test_an_interrupt_while_workers_start_shows_no_traceback_of_them(big_corpus, tmp_path_factory):
    process = start(tmp_path_factory.mktemp("work") / "build.py", big_corpus, 2)
    for pid in [*wait_for(lambda: workers_of(process.pid)), process.pid]:  # as a terminal sends it
        os.kill(pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert errors.count("Traceback") == 1 and errors.endswith("\nKeyboardInterrupt\n"), errors


def test_the_command_takes_a_training_config_and_reports_what_exists(corpus, capsys):
    with open(corpus / "a" / "a.jsonl", "a", encoding="utf-8") as file:
        file.write('\n{"text": null}\n{"text": 1}\n\n')
    write_jsonl(corpus / "late.jsonl", ["text of a stage"])
    (corpus / "c.yaml").write_text(
        f"name: x\nsteps: 10\nmodel: {{dim: 8}}\nmyapp: {{x: 1}}\ndata:\n"
        f"  root_dir: {corpus}\n  sources: {{a: 1, unused: 0}}\n  on_bad_record: skip\n"
        "  stages: [{from_step: 5, sources: {late: 1}}]\n"
    )
    config = f"config={corpus / 'c.yaml'}"
    command = [*python(), "-m", "lingua", "data", "prepare", config, "processes=1"]
    first = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)
    assert first.returncode == 0, first.stderr
    held_out = [text for text in TEXTS if is_held_out(text)]
    count = lambda texts: sum(len(text.encode()) + 2 for text in texts)  # noqa: E731
    tokens, held_out_tokens = count(TEXTS), count(held_out)
    lines = [line for line in first.stdout.splitlines() if "data.sources.a: 700 documents" in line]
    assert lines[0].startswith(
        f"data.sources.a: 700 documents, {tokens:,} tokens "
        f"({1 - 1400 / tokens:.2f} bytes a token); held out {len(held_out)} documents "
        f"({len(held_out) / 700:.2%}), "
        f"{held_out_tokens} tokens ({held_out_tokens / tokens:.2%})"
    )
    skipped = "4 bad records left out (2 blank line, 1 null text, 1 text is not a string)"
    assert f"data.sources.a: {skipped}" in first.stdout
    assert "data.sources.late: 1 document, " in first.stdout and "unused" not in first.stdout
    assert "100%" in first.stderr and "B/s" in first.stderr

    data_prepare.main([config])
    again = capsys.readouterr()
    assert lines[0] in again.out and "tokenizing" not in again.out + again.err
    refused(lambda: data_prepare.main([config, "data.sources.b=1"]), "data.sources.b: there is no")
