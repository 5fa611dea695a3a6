"""Preparation by processes: waited for, stopped, killed, taken over; and its command."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lingua.base.lock
from lingua.data.cache import shard_folder
from lingua.data.sources import source_files
from lingua.tokenizer.build import build_tokenizer
from lingua.tools.commands import data_prepare
from lingua.tools.prepare.units import UNIT_BYTES, plan_units
from tests.data.prepared import (
    TEXTS,
    Prepared,
    check,
    contents,
    error_of,
    is_held_out,
    make_args,
    write_jsonl,
)
from tests.locks import ELSEWHERE
from tests.mistakes import refused
from tests.programs import python, wait_for

BUILD = """
import sys
from lingua.data.args import DataArgs
from lingua.data.sources import prepare_source
from lingua.tokenizer.build import build_tokenizer

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
    """Of all its threads: one of them starts the workers."""
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in listed for child in path.read_text(encoding="utf-8").split()]


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


def test_two_that_start_at_once_build_each_part_once(big_corpus, tmp_path_factory):
    """The second waits and says for whom. Both end with the shards, which only one has built."""
    work = tmp_path_factory.mktemp("work")
    both = [start(work / f"build{i}.py", big_corpus, 2, hold=True) for i in range(2)]
    assert [process.stdout.readline() for process in both] == ["ready\n"] * 2
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    said = {process.pid: process.communicate(timeout=120) for process in both}
    assert [process.returncode for process in both] == [0, 0], said
    (builder,) = [pid for pid, (out, _) in said.items() if "tokenizing" in out]
    (waited,) = [out for pid, (out, _) in said.items() if pid != builder]
    assert f".lock is held by process {builder} on " in waited and ": waiting\n" in waited
    assert not Prepared(make_args(big_corpus), unit_bytes=2_000_000).built


def test_a_builder_that_died_elsewhere_is_followed(corpus, monkeypatch):
    monkeypatch.setattr(lingua.base.lock, "LIFETIME_S", 1)
    args = make_args(corpus)
    folder = shard_folder("a", args, build_tokenizer(args.tokenizer))
    folder.mkdir(parents=True)
    lock = folder.with_name(f"{folder.name}.lock")
    lock.write_text(ELSEWHERE)
    begin = time.monotonic()
    taken = Prepared(args, processes=1, unit_bytes=27_000)
    assert time.monotonic() - begin > 1
    check(taken, TEXTS)
    assert not lock.exists()


def test_parts_that_an_earlier_version_left_unfinished_are_named_and_built_again(corpus):
    """Its locks, and files with the temporary names of its processes."""
    args = make_args(corpus)
    folder = shard_folder("a", args, build_tokenizer(args.tokenizer))
    (unit,) = plan_units(source_files("a", args), UNIT_BYTES)
    folder.mkdir(parents=True)
    for name in (f"{unit.id}.lock", f"{unit.id}.tmp-elsewhere-1.train.tokens"):
        (folder / name).write_bytes(b"\1\0")
    prepared = Prepared(args)
    assert f"an earlier preparation did not finish are removed: {unit.id}" in prepared.lines[0]
    check(prepared, TEXTS)
    assert (
        sorted(p.suffix for p in folder.iterdir())
        == [".documents"] * 2 + [".json"] * 2 + [".tokens"] * 2
    )


def test_other_machines_do_not_wait_for_hours(corpus, monkeypatch):
    """A sparse file stands for much text. On one machine, or prepared before, it is no matter."""
    sparse = corpus / "a" / "much.txt"
    sparse.touch()
    os.truncate(sparse, 11 * 10**9)
    for key, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(key, str(value))
    message = error_of(make_args(corpus))
    assert "data.sources.a: no shards yet, and 11 GB of text are too much" in message
    assert "`python -m lingua data prepare` with this configuration on one machine" in message
    sparse.unlink()
    check(Prepared(make_args(corpus), processes=1), TEXTS)


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


def test_an_interrupt_while_workers_start_ends_them_without_a_traceback(
    big_corpus, tmp_path_factory
):
    process = start(tmp_path_factory.mktemp("work") / "build.py", big_corpus, 2)
    for pid in [*wait_for(lambda: workers_of(process.pid)), process.pid]:  # as a terminal sends it
        os.kill(pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert errors.count("Traceback") == 1 and errors.endswith("\nKeyboardInterrupt\n"), errors
    assert not list(big_corpus.glob(".tokens/a-*/????????????????.json"))  # no part is built


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
    lengths = [len(text.encode()) + 2 for text in TEXTS]
    held_out = [n for n, text in zip(lengths, TEXTS, strict=True) if is_held_out(text)]
    line = f"data.sources.a: 700 documents, {sum(lengths):,} tokens "
    line += f"({1 - 1400 / sum(lengths):.2f} bytes a token); held out {len(held_out)} documents "
    line += f"({len(held_out) / 700:.2%}), {sum(held_out)} tokens "
    assert f"{line}({sum(held_out) / sum(lengths):.2%})" in first.stdout
    skipped = "4 bad records left out (2 blank line, 1 null text, 1 text is not a string)"
    assert f"data.sources.a: {skipped}" in first.stdout
    assert "data.sources.late: 1 document, " in first.stdout and "unused" not in first.stdout
    assert "100%" in first.stderr and "B/s" in first.stderr

    data_prepare.main([config])
    again = capsys.readouterr()
    assert line in again.out and "tokenizing" not in again.out + again.err
    refused(lambda: data_prepare.main([config, "data.sources.b=1"]), "data.sources.b: there is no")
