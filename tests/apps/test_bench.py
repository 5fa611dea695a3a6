"""The measurements measure what they promise: every number is reported, the counts obey
arithmetic, and the loop's reference does the loop's work. No test looks at how long anything took.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from apps.bench import exchange, promise
from apps.bench.attention import DOCUMENTS, ROWS
from apps.bench.attention import measure as measure_attention
from apps.bench.checkpoint import TOPOLOGIES
from apps.bench.checkpoint import report as report_checkpoint
from apps.bench.checkpoint_rank import measure as measure_checkpoint
from apps.bench.debug import measure as measure_debug
from apps.bench.exchange_rank import measure as measure_exchange
from apps.bench.generate import measure as measure_generate
from apps.bench.generate import take_turns, transformers_model
from apps.bench.loop import Reference
from apps.bench.report import spread
from apps.bench.startup import PARTS, start_once
from apps.bench.step import STEPS
from apps.bench.step import measure as measure_step
from apps.bench.sync import table
from apps.bench.sync_rank import count
from apps.main.config import TrainArgs
from apps.main.transformer import build
from lingua.config.load import load
from lingua.errors import UserError
from lingua.format import align
from tests.programs import python
from tests.ranks import Ranks

ROOT = Path(__file__).parents[2]
DIM, LAYERS, HIDDEN, VOCAB = 16, 2, 48, 258
PARAMETERS = 2 * VOCAB * DIM + DIM + LAYERS * (4 * DIM * DIM + 3 * DIM * HIDDEN + 2 * DIM)
UNITS = LAYERS + 2  # of FSDP: the blocks, the embedding, the norm with the head
FLOAT = 4  # bytes
SPREAD = {"median", "q1", "q3", "low", "high", "n"}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started here have little to do: two threads each would only wait for a core."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def keys(tmp_path: Path) -> list[str]:
    """A run that takes no time, on text of its own."""
    text = "\n".join(f"def f{i}(x):\n    return x + {i * i}\n" for i in range(3000))
    (tmp_path / "text").mkdir()
    for part in range(200):  # documents, so that some are held out
        (tmp_path / "text" / f"{part}.txt").write_text(f"# {part}\n{text[part::200]}")
    return [
        f"config={ROOT / 'apps/main/configs/debug.yaml'}",
        f"data.root_dir={tmp_path}",
        "data.sources={text: 1.0}",
        "data.seq_len=16",
        "data.global_batch_size=8",
        "data.batch_size=4",
        "steps=100",
        f"model.dim={DIM}",
        f"model.n_layers={LAYERS}",
        "model.n_heads=2",
        "model.multiple_of=16",
        "logging.freq=3",
        "validation.tokens=64",
        "device=cpu",
    ]


def bench(*arguments: str) -> subprocess.CompletedProcess:
    command = [*python(), "-m", "apps.bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_loop_reports_its_overhead_and_that_both_did_the_same_work(tmp_path, keys):
    done = bench("loop", "--repeats", "2", "--json", str(tmp_path / "loop.json"), *keys)
    assert done.returncode == 0, done.stderr
    assert "overhead, % of time" in done.stdout
    content = json.loads((tmp_path / "loop.json").read_text())
    assert content["command"].startswith("python -m apps.bench loop --repeats 2")
    assert {"cpu", "cores", "threads", "torch", "python", "device"} <= content["machine"].keys()
    results = content["results"]
    for key in ("overhead", "control", "overhead_cpu", "control_cpu"):
        assert results[f"{key}_percent"].keys() == SPREAD
        assert results[f"{key}_percent"]["n"] == 2
    seconds = torch.tensor(results["rounds_s"])
    assert seconds.shape == (2, 3, 2)
    assert (seconds > 0).all()
    loop, first, second = seconds[..., 0].T
    overhead = (200 * loop / (first + second) - 100).tolist()
    assert results["overhead_percent"]["low"] == pytest.approx(min(overhead), abs=1e-3)
    ratios = ((first + second) / (2 * loop)).tolist()
    assert results["tokens_ratio"]["low"] == pytest.approx(min(ratios), rel=1e-3)
    assert results["steps_per_round"] == 3
    assert results["loss_difference"] < 1e-5


def test_a_reference_on_other_rows_has_other_losses(keys):
    """The control of the loss difference above: the comparison notices a row shifted by one."""
    args, _ = load(TrainArgs, [*keys, f"model.vocab_size={VOCAB}"])
    rows = torch.randint(256, (9, 17), generator=torch.Generator().manual_seed(0))
    losses = []
    for first in (0, 0, 1):
        reference = Reference(build(args).module, args, torch.device("cpu"))
        part = rows[first : first + 8]
        batch = [(part[i : i + 4, :-1], part[None, i : i + 4, 1:]) for i in (0, 4)]
        reference.run(1, [batch, batch])
        losses.append(torch.stack([reference.losses[1], reference.losses[2]]))
    assert (losses[1] / losses[0] - 1).abs().max() < 1e-5
    assert (losses[2] / losses[0] - 1).abs().min() > 1e-4


@pytest.mark.soak
def test_pairs_of_runs_differ_by_the_change_alone(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    for part in range(40):  # enough that some are held out
        (tmp_path / ("a" * (part % 2)) / f"{part}.py").write_text(
            f"def f{part}(x):\n    return x + {part}\n" * 20
        )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    small = ["data.seq_len=16", "steps=4", "optim.warmup=1", "validation.every=2"]
    words = ["--repeats=2", "--json=pairs.json", f"config={ROOT}/apps/main/configs/debug.yaml"]
    command = [*python(), "-m", "apps.bench", "pairs", *words, f"data.root_dir={tmp_path}", *small]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "pairs.json").read_text())["results"]
    assert results["steps"] == [2, 4]
    losses = {name: torch.tensor(of_seeds) for name, of_seeds in results["runs"].items()}
    base = losses.pop("base")
    assert base.shape == (2, 2) and (base[0] != base[1]).all()
    # Rows in other micro-batches are the same mathematics; everything else is another run.
    apart = {name: float((arm / base - 1).abs().max()) for name, arm in losses.items()}
    assert apart.pop("micro-batch") < 1e-6 and min(apart.values()) > 1e-4, apart
    shown = [line.split() for line in done.stdout.splitlines() if line.startswith("width ")]
    assert [float(line[2]) for line in shown] == pytest.approx(
        (losses["width"] - base).mean(0).tolist(), abs=1e-5
    )


@pytest.mark.soak
def test_a_step_is_timed_beside_a_bare_loop_that_does_the_same_work(ranks: Ranks, keys):
    case = [f"model.vocab_size={VOCAB}", "data.batch_size=8", "distributed.compile=false"]
    report = ranks.run(1, measure_step, [*keys, *case], 2)[0]
    found = report.results["cases"][0]
    assert (found["shape"], found["distributed.compile"]) == ("debug", "false")
    ours, bare, ratio = (found[key] for key in ("tokens_per_s", "bare_tokens_per_s", "ratio"))
    assert ours.n == bare.n == ratio.n == 2
    rounding = 1 + 1e-9  # where the fastest turn of one met the slowest of the other
    assert ours.low / bare.high <= ratio.low * rounding
    assert ratio.high <= ours.high / bare.low * rounding
    assert found["loss_difference"] < 1e-5
    assert found["mfu"] is found["peak_gib"] is None  # of a CPU
    assert f"2 turns of {STEPS} steps" in report.lines[-1]


def test_a_mistake_that_ends_every_case_ends_the_measurement(keys):
    with pytest.raises(UserError, match="vocab_size"):
        measure_step(keys, 1)


@pytest.mark.soak
def test_documents_one_by_one_are_timed_beside_a_mask_that_gives_the_same_gradients(keys):
    report = measure_attention([*keys, "distributed.model_dtype=fp32"], repeats=2)
    cases = report.results["cases"]
    assert [(c["seq_len"], c["documents"]) for c in cases] == list(product(ROWS, DOCUMENTS))
    assert all(c["ratio"].n == 2 and c["difference"] < 1e-5 for c in cases)
    assert len(report.lines) == len(cases) + 4


@pytest.mark.soak
def test_gradient_traffic_is_what_arithmetic_says(ranks: Ranks, tmp_path, keys):
    mesh = ["distributed.dp_replicate=2", "distributed.dp_shard=2", "data.batch_size=1"]
    keys = [*keys, *mesh, "data.global_batch_size=16"]  # 4 micro-steps of a row
    found = {}
    for mode in ("last", "replica_last", "every"):
        ours = [f"distributed.grad_sync={mode}", f"dump_dir={tmp_path / mode}"]
        args, _ = load(TrainArgs, [*keys, *ours])
        found[mode] = ranks.run(4, count, args)[0]
    for mode, scatters, reduces in (("last", 1, 1), ("replica_last", 4, 1), ("every", 4, 4)):
        scatter = {"count": UNITS * scatters, "bytes": PARAMETERS * FLOAT * scatters}
        reduce = {"count": UNITS * reduces, "bytes": PARAMETERS * FLOAT // 2 * reduces}
        assert found[mode]["mode"] == mode
        assert found[mode]["parameters"] == PARAMETERS
        assert found[mode]["reduce_scatter"] == scatter
        assert found[mode]["all_reduce"] == reduce
    whole, part = PARAMETERS * FLOAT, PARAMETERS * FLOAT // 2
    few = 1024  # bytes of the loop's own scalars
    assert whole <= found["last"]["kept_bytes"] <= whole + few
    assert part <= found["replica_last"]["kept_bytes"] <= part + few
    assert part <= found["every"]["kept_bytes"] <= part + few
    assert len(table(list(found.values()))) == 4


@pytest.mark.soak
def test_a_start_is_the_sum_of_its_parts(tmp_path, keys):
    seconds = start_once(keys, tmp_path, "to build")
    assert seconds.keys() == {*PARTS, "all"}
    assert all(value > 0 for value in seconds.values())
    assert sum(seconds[part] for part in PARTS) == pytest.approx(seconds["all"])


@pytest.mark.soak
def test_debug_reports_time_and_held_out_loss(keys):
    report = measure_debug([*keys, "steps=4"])
    assert report.results["steps"] == 4
    assert report.results["tokens"] == 4 * 8 * 16
    waiting, training, wall = (
        report.results[key] for key in ("waiting_for_data_s", "training_s", "wall_s")
    )
    assert 0 < waiting < training < wall
    assert report.results["held_out"][-1]["step"] == 4
    assert any("held-out text after step 4" in line for line in report.lines)


@pytest.mark.soak
def test_generation_is_timed_beside_transformers_which_finds_the_same_tokens(ranks: Ranks, keys):
    report = ranks.run(1, measure_generate, [*keys, "data.seq_len=72"], 2)[0]
    assert report.results["prompt_tokens"] == 64 and report.results["new_tokens"] == 8
    for batch in ("batch_1", "batch_32"):
        of_batch = report.results[batch]
        assert of_batch["equal_tokens"] == 1.0
        here, there, ratio = (of_batch[key] for key in ("here", "transformers", "ratio"))
        assert here.n == there.n == ratio.n == 2
        assert here.low / there.high <= ratio.median <= here.high / there.low
    assert sum("100.00%" in line for line in report.lines) == 2


def test_turns_alternate_and_a_token_that_differs_shows():
    called = []

    def answers(name: str, tokens: list[int]) -> Callable[[int], list[list[int]]]:
        return lambda n: called.append(name) or [tokens] * n

    seconds, equal = take_turns(answers("a", [1, 2, 3, 4]), answers("b", [1, 2, 3, 5]), 2, 3)
    assert equal == 0.75
    assert called == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert [len(of) for of in seconds] == [3, 3]  # the first turn only warms up


@pytest.mark.soak
def test_checkpoints_are_timed_beside_plain_files_of_their_size(ranks: Ranks, tmp_path, keys):
    args, _ = load(TrainArgs, keys)
    found = ranks.run(2, measure_checkpoint, args, tmp_path, 2)[0]
    assert not list(tmp_path.glob("checkpoints*")) and not list(tmp_path.glob("plain*"))
    tensors = 3 * PARAMETERS * FLOAT  # the model and both moments
    assert tensors < found["bytes"] < 3 * tensors  # small tensors, each with a header
    turns = {"save", "write", "read", *(f"load {name}" for name in TOPOLOGIES)}
    assert [seconds.keys() for seconds in found["rounds"]] == [turns, turns]
    assert all(s > 0 for seconds in found["rounds"] for s in seconds.values())


@pytest.mark.soak
def test_folders_of_transformers_are_timed_beside_plain_files(ranks: Ranks, tmp_path, keys):
    args, _ = load(TrainArgs, [*keys, f"model.vocab_size={VOCAB}"])
    folder = tmp_path / "theirs"
    assert exchange.write_folder(folder, args.model, torch.bfloat16) > 2 * PARAMETERS
    of_ranks = ranks.run(2, measure_exchange, folder, 2)
    assert sum(found["held"] for found in of_ranks) == FLOAT * PARAMETERS
    [seconds] = ranks.run(1, exchange.convert_once, folder)
    assert {path.name for path in tmp_path.iterdir()} == {"text", "theirs"}
    turns = {f"{turn}, {where}" for turn in ("load", "read") for where in exchange.WHERE}
    assert [seconds.keys() for seconds in of_ranks[0]["rounds"]] == [turns, turns]
    shown = exchange.report({"theirs": of_ranks[0], "convert": {"rounds": [seconds]}})
    assert shown.results["convert"]["export / copy"].low == seconds["export"] / seconds["copy"]
    assert any(line.startswith("theirs: load, from the disk / read, fr") for line in shown.lines)


def test_rates_of_checkpoints_are_quotients_of_the_same_round():
    first, second, third = TOPOLOGIES
    rounds = [
        {
            "write": 3,
            "save": 4,
            "read": 1,
            f"load {first}": 2,
            f"load {second}": 5,
            f"load {third}": 8,
        },
        {
            "write": 1,
            "save": 4,
            "read": 3,
            f"load {first}": 2,
            f"load {second}": 1,
            f"load {third}": 2,
        },
    ]
    lines = "\n".join(report_checkpoint(8 * 10**9, rounds).lines)
    for name, low, high in (
        ("rate of saving / of plain files written and synced", 0.25, 0.75),
        ("rate of loading with checksums / of plain files read", 0.5, 1.5),
        (f"seconds on {second} / on {first}", 0.5, 2.5),
        (f"seconds on {third} / on {first}", 1, 4),
    ):
        assert f"{low:.2f} to {high:.2f}" in next(li for li in lines.splitlines() if name in li)
    assert "8.00 GB" in lines


@pytest.mark.soak
def test_the_promise_is_measured_on_real_runs(monkeypatch, keys):
    starts = (((1, 1, 1), 4), ((2, 1, 1), 3))
    monkeypatch.setattr(promise, "STARTS", starts)
    report = promise.measure([*keys, "steps=4"])
    for run in ("never", "stopped"):
        assert [line["step"] for line in report.results[run]] == [1, 2, 3, 4]
    assert report.results["batches_equal"] == [True] * 4
    assert max(report.results["apart"]) < 1e-5
    assert "batch hashes equal in 4 of 4 steps" in report.lines[-1]
    rows = [line.split() for line in report.lines]
    assert ["(1,", "1,", "1)", "4", "rows", "1", "to", "2", "2"] in [row[:-1] for row in rows]
    assert ["(2,", "1,", "1)", "3", "rows", "3", "to", "4", "2"] in [row[:-1] for row in rows]


def test_a_broken_promise_shows():
    """The control of the test above: another batch, another loss and a lost step are noticed."""
    ends = list(range(1, 1 + len(promise.STARTS)))
    never = [{"step": step, "loss": 2.0, "batch_hash": f"{step}"} for step in ends]
    stopped = [dict(line) for line in never]
    stopped[1]["batch_hash"] = "other"
    stopped[2]["loss"] = 2.5
    results = promise.report(never, stopped, ends, None).results
    assert results["batches_equal"] == [step != 2 for step in ends]
    assert results["apart"] == [0.25 if step == 3 else 0 for step in ends]
    with pytest.raises(UserError, match="same steps"):
        promise.report(never, stopped[1:], ends, None)


def test_a_picture_without_matplotlib_is_refused_before_training(monkeypatch, keys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="matplotlib"):
        promise.measure(keys, Path("promise.png"))


def test_without_transformers_the_message_names_the_package(monkeypatch, keys, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    args, _ = load(TrainArgs, keys)
    with pytest.raises(UserError, match=r"needs the Python package transformers, .* \(pip install"):
        transformers_model(args, torch.nn.Identity(), tmp_path)


def test_a_mistake_is_told_without_a_traceback(keys):
    done = bench("loop", *keys, "modle.dim=3")
    assert done.returncode == 2
    assert "error: modle" in done.stderr
    assert "model" in done.stderr  # the nearest name
    assert "Traceback" not in done.stderr


def test_spread_and_columns():
    s = spread([3.0, 1.0, 2.0, 5.0, 4.0])
    assert (s.median, s.q1, s.q3, s.low, s.high, s.n) == (3.0, 2.0, 4.0, 1.0, 5.0, 5)
    assert spread([2.5]).median == 2.5
    assert align([("a", "b"), ("long", "10")], left=1) == ["a      b", "long  10"]
