"""The table of runs: states, columns, filters, seeds, and what programs read of it."""

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
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from lingua.tools.commands.runs import main
from lingua.tools.runs.table import TAIL_BYTES
from tests.locks import ELSEWHERE, hold_lock
from tests.mistakes import refused
from tests.tools.runs.test_records import a_run

pytestmark = pytest.mark.quick


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
    assert names("filter=state=failed") == []
    by_loss = names("sort=loss")
    assert by_loss[:2] == ["lr=0.01/seed=2", "lr=0.01/seed=3"] and by_loss[-1] == "lr=0.01/seed=1"
    assert names("sort=-loss")[0] == "lr=0.02/seed=3" and names("sort=-loss")[-1] == by_loss[-1]
    assert names("sort=-name") == sorted(names(), reverse=True)
    assert "nan" in next(line for line in shown(capsys, sweep) if "11/10" in line)


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
