"""Every measurement runs as a command, at its smallest size, and reports its figures. No test looks
at how long anything took."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apps.bench import data, promise
from apps.bench.__main__ import MEASUREMENTS
from apps.bench.loop import Reference
from apps.bench.report import shown
from apps.main.config import TrainArgs
from apps.main.transformer import build
from apps.speedrun import ablate
from lingua.config.load import load
from lingua.data.loader import MicroBatch
from tests.mistakes import refused
from tests.programs import python

ROOT = Path(__file__).parents[2]
SPREAD = {"median", "q1", "q3", "low", "high", "n"}
TEXT = ["data.sources={text: 1.0}", "data.source_files={text: {files: ['*.py', 'code/*.py']}}"]
MODEL = ["model.dim=16", "model.n_layers=2", "model.n_heads=2", "model.multiple_of=16"]
RUN = ["data.seq_len=16", "data.global_batch_size=8", "data.batch_size=4", "steps=4", "device=cpu"]
RUN += ["optim.warmup=1", "logging.freq=3", "validation.tokens=64", *TEXT, *MODEL]


def bench(folder: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`python -m apps.bench` on small text in `folder`, which is its working directory."""
    (folder / "code").mkdir(exist_ok=True)
    for part in range(200):  # documents, so that some are held out
        path = folder / ("code" if part % 2 else "") / f"{part}.py"
        path.write_text(f"# {part}\n" + "def f(x):\n    return x + {part * x}\n" * 12)
    # The agents of `elastic` are killed, and a fork has another process than its command.
    start = [sys.executable] if name == "elastic" else python()
    command = [*start, *program(name), f"data.root_dir={folder}", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def program(name: str) -> list[str]:
    """The program of a measurement, with smaller constants where no key makes it small."""
    if name in CONSTANTS:
        return ["-c", SMALLER.format(name=name, constants=CONSTANTS[name]), name]
    return ["-m", *program_words(name)]


def program_words(name: str) -> list[str]:
    """What a measurement records for tests lies beside them."""
    return ["tests.records.pairs"] if name == "pairs" else ["apps.bench", name]


def groups_in(content: Any) -> Iterator[dict[str, Any]]:
    """Every object of the results."""
    if isinstance(content, dict):
        yield content
    for part in content.values() if isinstance(content, dict) else content:
        if isinstance(part, dict | list):
            yield from groups_in(part)


def check_promise(results: dict[str, Any]) -> None:
    assert [line["step"] for line in results["stopped"]] == [1, 2, 3, 4, 5]
    assert results["batches_equal"] == [True] * 5 and max(results["apart"]) < 1e-5


def check_pairs(results: dict[str, Any]) -> None:
    losses = {name: torch.tensor(arm) for name, arm in results["runs"].items()}
    base = losses.pop("base")
    assert base.shape == (2, 2) and (base[0] != base[1]).all()
    # Rows in other micro-batches are the same mathematics; everything else is another run.
    apart = {name: float((arm / base - 1).abs().max()) for name, arm in losses.items()}
    assert apart.pop("micro-batch") < 1e-6 and min(apart.values()) > 1e-4, apart
    same = results["same"]["runs"]
    torch.testing.assert_close(*map(torch.tensor, same.values()), rtol=1e-6, atol=0)
    assert {name: len(runs) for name, runs in results["long"]["runs"].items()} == {
        "base": 1, "learning rate": 1
    }  # fmt: skip


def check_ablate(results: dict[str, Any]) -> None:
    base, *others = results["runs"].values()
    assert base[0]["loss"] != base[1]["loss"] and len(others) == len(results["differences"])
    other = [arm for name, arm in results["runs"].items() if name != "without BPE"]  # has none here
    assert all(base[i]["loss"] != arm[i]["loss"] for arm in other[1:] for i in range(2))


def check_onefile(results: dict[str, Any]) -> None:
    main, file = results["last"]["main"], results["last"]["onefile"]
    assert all(main[key] == file[key] for key in ("step", "loss", "grad_norm", "batch_hash"))
    assert main["created_at"] != file["created_at"]


def check_sync(rows: list[dict[str, Any]]) -> None:
    """On a mesh of 2 x 2, with four micro-steps."""
    last, replica_last, every, exact = rows
    units, n_bytes = last["dp_shard"], last["dp_shard, MiB"]
    assert units == last["dp_replicate"] > 1 and n_bytes == 2 * last["dp_replicate, MiB"]
    for row, axis, n in [
        (replica_last, "dp_shard", 4), (replica_last, "dp_replicate", 1),
        (every, "dp_shard", 4), (every, "dp_replicate", 4), (exact, "world", 4),
    ]:  # fmt: skip
        whole = n_bytes / 2 if axis == "dp_replicate" else n_bytes
        assert (row[axis], row[f"{axis}, MiB"]) == (n * units, pytest.approx(n * whole)), axis
    kept = [row["kept, MiB"] for row in rows]  # whole gradients, or a shard of them
    assert kept == pytest.approx([n_bytes, *[n_bytes / 2] * 3], rel=0.01)


def test_numbers_are_shown_with_three_digits_or_all_before_the_point() -> None:
    values = [0.0, 1.704, -12.34, 178.6, 12345.6, 0.0302, 1.7e-7, math.inf, 1024, None, "text"]
    expected = ["0", "1.70", "-12.3", "179", "12,346", "0.0302", "1.7e-07", "inf", "1,024"]
    assert [shown(value) for value in values] == [*expected, "-", "text"]


CHECKS = {
    "sync": check_sync,
    "promise": check_promise,
    "promise distributed.cp_size=2": check_promise,
    "pairs": check_pairs,
    "ablate": check_ablate,
    "onefile": check_onefile,
}
VOCABULARY = "model.vocab_size=258"
SMALLEST: dict[str, list[str]] = {
    "loop": [*RUN, "--repeats=2"],
    "step": [*RUN, "--repeats=1", VOCABULARY, "distributed.compile=false"],
    "onefile": [*RUN, "--repeats=1"],
    "step reference=nanogpt": [*RUN, "--repeats=1"],
    "generate": [*RUN, "--repeats=1", "data.seq_len=72"],
    "debug": RUN,
    "startup": [*RUN, "--repeats=1"],
    "elastic": [*RUN, "--repeats=1"],
    "busy": [*RUN, "--repeats=1", "steps=31"],
    "attention": [*RUN, "--repeats=1"],
    "ranks": RUN,
    "recurrence": [*RUN, "--repeats=1"],
    "sync": [*RUN, "--repeats=1", "data.batch_size=1", "data.global_batch_size=16"],
    "checkpoint": [*RUN, "--repeats=1"],
    "exchange": [*RUN, "--repeats=1", VOCABULARY],
    "lora": [*RUN, "--repeats=1", "lora.rank=2"],
    "receipt": [*RUN, "--repeats=1"],
    "recheck": [*RUN, "--repeats=1"],
    "promise": [*RUN, "steps=5"],
    "promise distributed.cp_size=2": [
        *(word for word in RUN if word not in ("model.n_heads=2", "steps=4")),
        "model.n_heads=4",  # which tp and cp divide together
        "steps=5",
    ],
    "context": [*RUN, "--repeats=1"],
    "ablate": [
        *RUN,
        "steps=12",
        "--repeats=2",
        "data.tokenizer={name: bytes}",
        "model.ngram_rows=64",
    ],
    "pairs": ["--repeats=2", "data.seq_len=16", "steps=4", "validation.every=2"],
}
# `elastic` without torchrun's own settings, by which it waits a minute for what is lost.
CONSTANTS = {
    "elastic": "m.STEPS = 5; m.SETTINGS.popitem()",
    "ranks": "m.RANKS = 8, 16; m.STEPS = 10",
    "context": "m.STEPS = 2",
}
SMALLER = """
import apps.bench.{name} as m
from apps.bench.__main__ import main
from lingua.parallel.program import run_program
{constants}
run_program(main)
"""
EQUAL = {"apart": 0.0, "loss_difference": 0.0, "equal tokens": 1.0}  # beside the reference
SOAK = (
    "onefile",
    "recheck",
    "elastic",
    "busy",
    "generate",
    "checkpoint",
    "attention",
    "ranks",
    "recurrence",
    "sync",
    "exchange",
    "promise",
    "promise distributed.cp_size=2",
    "context",
    "pairs",
)


def check_figures(folder: Path, name: str) -> None:
    done = bench(folder, *name.split(), "--json=report.json", *SMALLEST[name])
    assert done.returncode == 0, done.stderr
    content = json.loads((folder / "report.json").read_text())
    command = " ".join(["python", "-m", *program_words(name.split()[0]), ""])
    assert content["command"].startswith(command)
    assert {"cpu", "cores", "threads", "torch", "python", "device"} <= content["machine"].keys()
    assert content["rows"]
    for group in groups_in([content["rows"], content["results"]]):
        if group.keys() == SPREAD:
            assert group["low"] <= group["q1"] <= group["median"] <= group["q3"] <= group["high"]
            assert group["n"] >= 1 and all(map(math.isfinite, group.values()))
        for key in EQUAL.keys() & group.keys():
            assert np.allclose(group[key], EQUAL[key], rtol=0, atol=1e-5), key
    CHECKS.get(name, lambda results: None)(content["results"] or content["rows"])
    assert not [path for path in folder.iterdir() if path.name.startswith("bench-")]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.soak) if name in SOAK else name
        for name in SMALLEST
        if name != "ablate"  # the next test begins with it
    ],
)
def test_a_measurement_reports_its_figures(tmp_path: Path, name: str) -> None:
    check_figures(tmp_path, name)


@pytest.mark.soak
def test_ablations_go_on_with_the_runs_that_are_missing(tmp_path: Path) -> None:
    check_figures(tmp_path, "ablate")
    file = tmp_path / ablate.FILE
    content = json.loads(file.read_text())
    expected = {name: [run["loss"] for run in arm] for name, arm in content["runs"].items()}
    del content["runs"]["without smear"][1]
    content["runs"][ablate.BASE][0]["loss"] = expected[ablate.BASE][0] = 4.5  # read, not made
    file.write_text(json.dumps(content))
    assert bench(tmp_path, "ablate", *SMALLEST["ablate"]).returncode == 0
    runs = json.loads(file.read_text())["runs"]
    assert {name: [run["loss"] for run in arm] for name, arm in runs.items()} == expected
    other = bench(tmp_path, "ablate", *SMALLEST["ablate"], "optim.lr=0.5")
    assert other.returncode == 2
    assert f"{ablate.FILE}: has runs of a recipe in which optim.lr differs" in other.stderr


@pytest.mark.soak
def test_text_and_rows_are_timed_beside_their_references(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "TEXT_BYTES": 400_000,
        "TEXT_REPEATS": {"tiktoken": 1, "sp": 1, "bytes": 1},
        "TRAINED_ON": 200_000,
        "VOCABULARY": 700,
        "SHARED_PARTS": 4,
        "GATHERED_TOKENS": 2**21,
        "SPARSE_TOKENS": 10**8,
    }
    for name, value in small.items():
        monkeypatch.setattr(data, name, value)
    report = data.measure([], repeats=1)
    rows = {row.pop(""): row for row in map(dict, report.rows)}
    names = ["tiktoken", "sentencepiece", "bytes", "two processes over one", "rows of shards"]
    others = ("uint16", "megatron", "datatrove", "datasets")
    for name in [*names, *(f"rows of {form} files over shards" for form in others)]:
        assert rows[name].keys() == {"ours", "reference", "ratio", "CPU ratio"}
        assert all(s.low > 0 and s.n == 1 for s in rows[name].values())
    assert report.results["first batch, ms"].low > 0


def test_every_measurement_is_tested() -> None:
    others = {"data", "gpu"}  # the latter in test_bench_gpu
    assert {*MEASUREMENTS, "pairs"} == {*(name.split()[0] for name in SMALLEST), *others}


def test_a_reference_on_other_rows_has_other_losses() -> None:
    """The control of loss_difference: the comparison notices a row shifted by one."""
    args, _ = load(TrainArgs, [*RUN, VOCABULARY])
    rows = torch.randint(256, (9, 17), generator=torch.Generator().manual_seed(0))
    losses = []
    for first in (0, 0, 1):
        reference = Reference(build(args).module, args, torch.device("cpu"))
        part = rows[first : first + 8]
        batch = [
            MicroBatch(torch.arange(4), part[i : i + 4, :-1], part[None, i : i + 4, 1:])
            for i in (0, 4)
        ]
        reference.run([batch, batch])
        losses.append(torch.stack(reference.losses))
    assert (losses[1] / losses[0] - 1).abs().max() < 1e-5
    assert (losses[2] / losses[0] - 1).abs().min() > 1e-4


FORKED = """
from apps.bench.launch import train_forked
from lingua.parallel.program import run_program
run_program(lambda: train_forked(["data.sourcs={one: 1}"], 2))
"""


@pytest.mark.soak
def test_ranks_that_are_forked_and_fail_are_named() -> None:
    """In a new process: a forkserver that another test has started keeps that test's stderr."""
    command = [sys.executable, "-c", FORKED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("data.sourcs: unknown key") == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and "its ranks have exit codes [2, " in last, done.stderr


def test_a_broken_promise_shows() -> None:
    """The control of promise: another batch, another loss and a lost step are noticed."""
    never = [{"step": step, "loss": 2.0, "batch_hash": f"{step}"} for step in (1, 2, 3)]
    stopped = [dict(line) for line in never]
    stopped[1]["batch_hash"] = "other"
    stopped[2]["loss"] = 2.5
    assert promise.compare(never, stopped) == ([0, 0, 0.25], [True, False, True])
    refused(lambda: promise.compare(never, stopped[1:]), "same steps")
