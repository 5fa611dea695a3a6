"""Reading dump dirs: which are runs, lines that are torn, doubled, foreign or huge, and numbers of
them, computed here from the lines themselves."""

import csv
import fcntl
import io
import json
import os
import signal
import struct
import subprocess
import sys
import termios
import tracemalloc
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest

from apps.main.config import TrainArgs
from lingua.config.load import to_yaml
from lingua.config.values import plain, read_file
from lingua.run.records import Record
from lingua.tools.commands.runs import main
from lingua.tools.runs.held_out import heldout
from lingua.tools.runs.records import find_runs, open_runs
from lingua.tools.runs.table import TAIL_BYTES
from lingua.tools.slurm.freeze import move_away
from tests.locks import ELSEWHERE, hold_lock
from tests.mistakes import refused

pytestmark = pytest.mark.quick

REPO = Path(__file__).parents[2]


def a_run(folder: Path, config: str = "steps: 10\n", **files: Any) -> Path:
    """A dump dir; `files` are the lines of its metrics.jsonl (`metrics`) and of its others."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    (folder / "train.log").touch()
    for kind, lines in files.items():
        text = lines if isinstance(lines, str) else "".join(json.dumps(x) + "\n" for x in lines)
        (folder / f"{kind.replace('_', '.')}.jsonl").write_text(text)
    return folder


def test_a_record_and_its_columns_are_a_line_in_a_notebook(tmp_path):
    lines = [{"step": s, "loss": 9 / s} for s in (1, 7)]
    folder = a_run(tmp_path / "run", "steps: 4000\n", metrics=lines)
    assert repr(Record(folder)) == f"<Record of {folder}: stopped, step 7 of 4,000, loss 1.286>"
    assert repr(Record(folder).metrics) == "<2 lines: step, loss>"
    (folder / "metrics.jsonl").unlink()
    (folder / "config.yaml").unlink()
    assert repr(Record(folder)) == f"<Record of {folder}: not started, step 0>"


def test_runs_are_found_at_any_depth_each_once_and_named_by_what_tells_them_apart(tmp_path):
    a_run(tmp_path / "a" / "seed1")
    a_run(tmp_path / "b" / "seed1")
    only = a_run(tmp_path / "b" / "c" / "only")
    (only / "checkpoints" / "0000000010").mkdir(parents=True)
    for name in ("config.yaml", "train.log"):  # as a copied dump dir there would have
        (only / "checkpoints" / "0000000010" / name).touch()
    a_run(tmp_path / ".hidden" / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text("of: another program\n")
    os.symlink(tmp_path, tmp_path / "b" / "circle")
    os.symlink(only, tmp_path / "again")
    found = open_runs([tmp_path, tmp_path / "b", only])
    assert [r.name for r in found] == ["a/seed1", "only", "b/seed1"]
    assert find_runs([str(only)]) == [only]


def test_copies_of_the_code_and_links_that_lead_out_are_not_searched(tmp_path):
    """A continued sweep has moved the code of its first launch to code.1."""
    sweep, elsewhere = tmp_path / "sweep", a_run(tmp_path / "elsewhere" / "run")
    for _ in range(3):
        for name in ("code", "code.commit"):
            move_away(sweep / name)
        a_run(sweep / "code" / "tests" / "samples" / "old")
        (sweep / "code.commit").touch()
    first = a_run(sweep / "000_lr=1")
    os.symlink(elsewhere.parent, sweep / "link")
    os.symlink(sweep, sweep / "circle")
    assert find_runs([sweep]) == [first]
    assert find_runs([sweep / "link"]) == [sweep / "link" / "run"]  # given by name
    for name in ("config.yaml", "metrics.jsonl"):  # a run that was started in the sweep's folder
        (sweep / name).touch()
    a_run(sweep / "logs" / "old")
    assert find_runs([sweep]) == [sweep, first]
    (sweep / "code.commit").unlink()
    assert find_runs([sweep]) == [sweep, first]


def test_lines_that_cannot_be_read_are_left_out_and_named(tmp_path):
    text = '{"step": 1, "loss": 2.5}\n\n[]\n{"loss": 1}\n{"step": -1}\n{"step": 1e300}\n\xff\n'
    text += f'{"[" * 5000}\n{{"step": 2, "loss": NaN}}\n{{"step": 3.0, "loss": null}}\n'
    text += f'{{"step": 4, "loss": {"9" * 400}}}\n{{"step": 5, "lo'
    record = Record(a_run(tmp_path / "run", metrics=text))
    assert record.metrics.step.tolist() == [1, 2, 3, 4]
    np.testing.assert_equal(record.metrics["loss"], [2.5, np.nan, np.nan, np.nan])
    numbers = [problem.partition(".jsonl:")[2].partition(":")[0] for problem in record.problems]
    assert numbers[:5] == list("34567")
    assert record.problems[5].endswith("metrics.jsonl: 2 more lines are left out")


def test_a_resumed_run_has_each_step_once(tmp_path):
    steps = [10, 20, 30, 40, 20, 30, 30]
    lines = [{"step": s, "loss": float(i)} for i, s in enumerate(steps)]
    lines.insert(4, {"step": 20, "event": "start"})
    record = Record(a_run(tmp_path / "run", metrics=lines))
    assert record.metrics.step.tolist() == [10, 20, 30]
    assert record.metrics["loss"].tolist() == [0.0, 4.0, 6.0]
    assert [e["event"] for e in record.events] == ["start"]
    table = pytest.importorskip("pandas").DataFrame(record.metrics)
    assert table.to_dict("list") == {"step": [10, 20, 30], "loss": [0.0, 4.0, 6.0]}


def test_the_columns_of_a_long_run_that_was_resumed_often_are_those_of_its_last_lines(tmp_path):
    random = np.random.default_rng(1)
    lines: list[dict[str, Any]] = []
    kept: dict[int, dict[str, Any]] = {}
    step = 0
    for i in range(6000):
        step += 1
        if random.random() < 0.003:
            step = max(1, step - int(random.integers(1, 300)))
            kept = {s: earlier for s, earlier in kept.items() if s < step}
        line: dict[str, Any] = {
            "step": step,
            "loss": i / 7,
            "hash": f"{i}\0\u00fc",
            f"late{i // 2000}": i,
        }
        if step % 3 == 0:
            line |= {"loss": [None, "x", True, {}][i % 4], "hash": ["", None, 7, []][i % 4]}
        kept[step] = line
        lines.append(line)
    columns = Record(a_run(tmp_path / "run", metrics=lines)).metrics
    assert columns.step.tolist() == list(kept) and 1000 < len(kept) < 6000
    names = dict.fromkeys(name for line in kept.values() for name in line)
    assert [name for name in names if name != "hash"] == [n for n in columns if n != "hash"]
    for name in names:
        values = [line.get(name) for line in kept.values()]
        numbers = [v if type(v) in (int, float) else np.nan for v in values]
        np.testing.assert_equal(columns.numbers(name), np.array(numbers, np.float64))
        assert columns.text(name) == [v if isinstance(v, str) else None for v in values]
    assert [name for name in ("late0", "late1", "late2", "late3") if columns.has(name)] == [
        name for name in names if name.startswith("late")
    ]


def test_a_long_run_is_read_without_an_object_for_each_number(tmp_path):
    """The lines as dicts would take five times the size of the file."""
    line = dict.fromkeys(("loss", "grad_norm", "lr", "tokens_per_s", "mfu"), 0.123456789012345)
    texts = {"batch_hash": "342c25b24bd059bc", "created_at": "2026-11-27T05:13:23.180352+00:00"}
    text = "".join(json.dumps({"step": s, **line, **texts}) + "\n" for s in range(1, 10_000))
    record = Record(a_run(tmp_path / "run", metrics=text))
    tracemalloc.start()
    try:
        n = len(record.metrics.step)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert n == 9_999 and peak < 0.8 * len(text), peak / len(text)


def test_columns_are_numbers_or_text_and_those_of_other_versions_may_be_missing(tmp_path):
    lines = [{"step": 1, "loss": 1, "mfu": None, "batch_hash": "aa", "nested": {"a": 1}}]
    lines += [{"step": 2, "loss": "2.5", "new": True}, {"step": 3, "loss": 0.5, "new": 7}]
    columns = Record(a_run(tmp_path / "run", metrics=lines)).metrics
    assert isinstance(columns, Mapping) and list(columns) == ["step", "loss", "new"]
    assert repr(columns) == "<3 lines: step, loss, new>" and "mfu" not in columns
    np.testing.assert_equal(columns["loss"], [1.0, np.nan, 0.5])
    for unknown in ("losss", "mfu", 0):
        with pytest.raises(KeyError, match=f"{unknown}: no line has a number .*'loss', 'new'"):
            columns[unknown]
    assert columns.text("batch_hash") == ["aa", None, None]
    assert columns["loss"].dtype == np.float64 and columns.step.dtype == np.int64


def test_the_tail_of_a_file_has_its_last_whole_lines(tmp_path):
    lines = [{"step": s, "loss": 1.0} for s in range(1000, 2000)]
    folder = a_run(tmp_path / "run", metrics=lines)
    length = len(json.dumps(lines[0])) + 1
    record = Record(folder, tail=10 * length + 3)
    assert record.metrics.step.tolist() == list(range(1990, 2000)) and record.problems == []
    assert len(Record(folder, tail=1 << 20).metrics.step) == 1000


def test_a_run_without_files_or_with_hostile_ones_is_empty(tmp_path):
    folder = a_run(tmp_path / "run", "a: [\n")
    os.mkfifo(folder / "metrics.jsonl")
    (folder / "samples.jsonl").mkdir()
    text = '{"step": 1, "source": "one"}\n{"step": 2, "source": 3}\n'
    (folder / "metrics.validation.jsonl").write_text(text)
    record = Record(folder)
    assert (record.config, list(record.metrics), record.events) == ({}, ["step"], [])
    assert record.samples == [] and record.evaluation == []
    assert list(record.validation) == ["one"]
    assert len(record.problems) == 3 and all(str(folder) in p for p in record.problems)
    assert heldout(record)[1].tolist() == []


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, dict) and value and prefix + key != "data.sources"
        found |= flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return found


def test_a_config_is_read_as_training_reads_it(tmp_path):
    args = TrainArgs(name="3e-4", dump_dir="a b/[c]")
    args.data.sources = {"one": 2.0, "two": 1e-05}
    args.checkpoint.allow_change = ["seed", "data.content.one"]
    quoted, simple = to_yaml(args), to_yaml(TrainArgs(name="x"))
    files = [quoted, simple, "a:\n  b: 1\n  c:\nd:\n- 1\n- x y\ne: null\nf: []\ng: {}\n"]
    files += [path.read_text() for path in (REPO / "apps" / "main" / "configs").glob("*.yaml")]
    for i, text in enumerate(files):
        folder = a_run(tmp_path / str(i), text)
        path = folder / "config.yaml"
        expected = flat(plain(read_file(path, str(path))))
        assert Record(folder).config == expected and len(expected) > 4
    assert Record(tmp_path / "0").config["data.sources"] == {"one": 2.0, "two": 1e-05}


def test_held_out_loss_is_weighted_with_bytes_where_all_sources_were_measured(tmp_path):
    def line(step: int, source: str, loss: float, size: int) -> dict[str, Any]:
        losses = {"nats_per_byte": loss, "nats_per_token": loss}
        return losses | {"step": step, "source": source, "bytes": size, "tokens": 10}

    lines = [line(5, "old", 9.0, 1), line(10, "a", 2.0, 100), line(10, "b", 1.0, 300)]
    lines += [line(20, "a", 1.0, 100), line(20, "b", 0.5, 300), line(30, "a", 0.1, 100)]
    lines += [{"step": 20, "source": "pairs", "accuracy": 0.5}]
    record = Record(a_run(tmp_path / "run", metrics_validation=lines))
    steps, values = heldout(record)
    assert steps.tolist() == [10, 20]
    np.testing.assert_allclose(values, [(2 * 100 + 300) / 400, (100 + 150) / 400])
    np.testing.assert_allclose(heldout(record, "nats_per_token")[1], [1.5, 0.75])


def trained(folder: Path, lr: float, seed: int, n: int = 10, **more: Any) -> Path:
    """A dump dir after n steps of 10; a run of another rate or seed has other losses."""
    config = f"name: {folder.name}\nsteps: 10\nseed: {seed}\noptim:\n  lr: {lr}\n"
    now = (datetime.now(UTC) - timedelta(hours=3)).isoformat()
    common = {"created_at": now, "step_time_s": 2.0, "tokens_per_s": 31_200.0}
    lines = [{"step": s, "loss": 100 * lr + seed / 10, **common} for s in range(1, n + 1)]
    measured = [
        {"step": s, "source": name, "nats_per_byte": loss, "bytes": size}
        for s in range(5, n + 1, 5)
        for name, loss, size in (("a", lr * s, 100), ("b", lr * s + seed, 300))
    ]
    return a_run(folder, config, metrics=lines, metrics_validation=measured, **more)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    for lr in (0.01, 0.02):
        for seed in (1, 2, 3):
            trained(tmp_path / f"lr={lr}" / f"seed={seed}", lr, seed)
    return tmp_path


def shown(capsys: pytest.CaptureFixture, *words: object) -> list[list[str]]:
    """The cells of the table."""
    main([str(word) for word in words])
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def read(capsys: pytest.CaptureFixture, *words: object) -> list[dict[str, Any]]:
    main([*map(str, words), "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_table_has_what_differs_and_where_each_run_is(sweep, capsys):
    head, first, *_ = lines = shown(capsys, sweep)
    assert " ".join(head) == "run seed lr state age step held-out loss tok/s left"
    assert " ".join(first) == ("lr=0.01/seed=1 1 0.01 finished 3.0h 10/10 0.8500 1.1000 31.2k -")
    assert len(lines) == 7
    head, first, *_ = shown(capsys, sweep / "lr=0.01", "sources=true", "columns=[seed,lr]")
    assert (head[6:9], first[6:9]) == (["held-out", "a", "b"], ["0.8500", "0.1000", "1.1000"])


def test_a_state_follows_from_the_lock_and_the_newest_line(tmp_path, capsys):
    stop = {"event": "stop", "step": 4}
    for name, last in (("killed", {}), ("stopped", stop | {"reason": "SIGTERM"}), ("here", {}),
                       ("error", stop | {"reason": "error", "error": "ValueError: x"}),
                       ("there", {}), ("earlier version", {}))  :  # fmt: skip
        folder = trained(tmp_path / name, 0.01, 1, n=4)
        if last:
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(last) + "\n")
    trained(tmp_path / "finished", 0.01, 1)
    launched = tmp_path / "launched"
    launched.mkdir()
    (launched / "base_config.yaml").write_text("steps: 10\n")
    with hold_lock(tmp_path / "killed" / "run.lock") as process:
        process.kill()
    (tmp_path / "there" / "run.lock").write_text(ELSEWHERE)
    with hold_lock(tmp_path / "here" / "run.lock"):
        before = sorted(tmp_path.rglob("*"))
        found = {row["name"]: row for row in read(capsys, tmp_path)}
        assert sorted(tmp_path.rglob("*")) == before  # nothing is removed, stale locks neither
    assert {name: row["state"] for name, row in found.items()} == {
        "here": "running", "there": "running", "killed": "failed", "error": "failed",
        "stopped": "stopped", "earlier version": "stopped", "finished": "finished",
        "launched": "not started",
    }  # fmt: skip
    assert found["here"]["left_s"] == 6 * 2.0 and found["stopped"]["left_s"] is None
    assert found["launched"]["step"] == 0 and found["launched"]["heldout"] is None
    assert 3 * 3600 <= found["here"]["age_s"] < 4 * 3600


def test_runs_are_averaged_over_seeds_at_their_last_common_step(sweep, capsys):
    trained(sweep / "lr=0.02" / "seed=4", 0.02, 4, n=7)
    trained(sweep / "alone", 0.03, 1)
    of_runs = {row["name"]: row for row in read(capsys, sweep)}
    rows = read(capsys, sweep, "seeds=true")
    equal, unequal, alone = sorted(rows, key=lambda row: row["config.optim.lr"])
    names = ["alone", "lr=0.01/seed=*", "lr=0.02/seed=1 ... seed=4"]  # a mean is of no seed
    assert [row["name"] for row in rows] == names
    assert equal["folder"] == str(sweep / "lr=0.01") and alone["folder"] == str(sweep / "alone")
    losses = [of_runs[f"lr=0.01/seed={seed}"]["heldout"] for seed in (1, 2, 3)]
    assert equal["heldout"] == pytest.approx(mean(losses)) and equal["runs"] == 3
    assert equal["spread.heldout"] == pytest.approx(stdev(losses))
    assert (unequal["runs"], unequal["state"], unequal["step"]) == (4, "mixed", 7)
    at_5 = [0.02 * 5 + 0.75 * seed for seed in (1, 2, 3, 4)]
    assert (unequal["heldout_step"], unequal["heldout"]) == (5, pytest.approx(mean(at_5)))
    assert unequal["spread.heldout"] == pytest.approx(stdev(at_5))
    assert alone["runs"] == 1 and alone.get("spread.heldout") is None
    [line] = [line for line in shown(capsys, sweep, "seeds=true") if "mixed" in line]
    assert "±0.9682" in line and "at" in line


def test_runs_of_other_code_are_no_seeds_of_one_another_however_long_they_are(tmp_path, capsys):
    for seed, code in enumerate("xxy"):
        folder = trained(tmp_path / f"{seed}", 0.01, seed)
        start = {"event": "start", "step": 0, "code": code}
        steps = [{"step": s, "loss": 1.0, "text": 80 * "x"} for s in range(1, 2000)]
        text = "".join(json.dumps(line) + "\n" for line in (start, *steps))
        (folder / "metrics.jsonl").write_text(text)
        assert len(text) > 2 * TAIL_BYTES  # the start is not in the part that is read
    rows = read(capsys, tmp_path, "seeds=true")
    assert [(row["runs"], row["config.code"]) for row in rows] == [(2, "x"), (1, "y")]


def test_runs_are_filtered_and_sorted_by_columns_and_config_keys(sweep, capsys):
    nan = {"step": 11, "loss": None}
    with (sweep / "lr=0.01" / "seed=1" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(nan) + "\n")

    def names(*words: str) -> list[str]:
        return [row["name"] for row in read(capsys, sweep, *words)]

    assert names("filter=optim.lr=1e-2,seed>=2") == ["lr=0.01/seed=2", "lr=0.01/seed=3"]
    assert names("filter=lr!=0.01,heldout<1") == ["lr=0.02/seed=1"]
    assert names("filter=state=failed") == names("filter=state=failed,optim.lr>0", "sort=lr") == []
    by_loss = names("sort=loss")
    assert by_loss[:2] == ["lr=0.01/seed=2", "lr=0.01/seed=3"] and by_loss[-1] == "lr=0.01/seed=1"
    assert names("sort=-loss")[0] == "lr=0.02/seed=3" and names("sort=-loss")[-1] == by_loss[-1]
    assert names("sort=-name") == sorted(names(), reverse=True)
    assert "nan" in next(line for line in shown(capsys, sweep) if "11/10" in line)


def test_of_many_keys_the_table_has_those_that_people_change(tmp_path, capsys):
    keys = ["data.workers", "data.batch_size", *(f"model.key_{i}" for i in range(9)), "optim.lr"]
    for n in (1, 2):
        groups: dict[str, dict[str, int]] = {"data": {}, "model": {}, "optim": {}}
        for group, key in (key.split(".") for key in keys):
            groups[group][key] = n
        a_run(tmp_path / f"run-{n}", json.dumps(groups), metrics=[{"step": 1}])
    head, *_, hidden = shown(capsys, tmp_path)
    assert head[1:9] == [*(f"key_{i}" for i in range(7)), "lr"]
    assert hidden[:4] == ["4", "more", "keys", "differ"]
    assert hidden[-4:] == ["data.workers,", "data.batch_size,", "model.key_7,", "model.key_8"]


def test_a_watched_table_is_printed_again_in_place_until_ctrl_c(tmp_path):
    run = trained(tmp_path / "run", 0.01, 1, n=4)
    terminal, inside = os.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    command = [sys.executable, "-m", "lingua", "runs", str(tmp_path), "watch=1"]
    with subprocess.Popen(command, stdout=inside, stderr=inside) as process:
        os.close(inside)  # reading fails where the process has ended
        shown = ""
        while " 4/10 " not in shown:
            shown += os.read(terminal, 4096).decode()
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 7}\n')
        while " 7/10 " not in shown:
            shown += os.read(terminal, 4096).decode()
        process.send_signal(signal.SIGINT)
    assert process.returncode == 0
    *_, screen = shown.split("\x1b[H\x1b[J")
    assert screen.count("held-out") == 1 and "again every 1 s; Ctrl-C ends" in screen
    refused(lambda: main([str(tmp_path), "watch=1", "--csv"]), "watch = 1", "--csv")


def test_programs_read_csv_and_json(sweep, capsys):
    rows = read(capsys, sweep)
    main([str(sweep), "--csv"])
    of_csv = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == len(of_csv) == 6
    for a, b in zip(rows, of_csv, strict=True):
        assert (a["name"], a["heldout"]) == (b["name"], float(b["heldout"]))
        assert a["heldout.b"] == float(b["heldout.b"]) and a["folder"] == b["folder"]
        assert a["config.optim.lr"] == float(b["config.optim.lr"]) and b["left_s"] == ""
    metrics = sweep / "lr=0.01/seed=1/metrics.validation.jsonl"
    metrics.write_text(metrics.read_text().replace('"a"', '"\\ud800"'))  # JSON, but no UTF-8
    main([str(sweep), "--csv"])
    assert "heldout.\\ud800" in capsys.readouterr().out.splitlines()[0].split(",")
