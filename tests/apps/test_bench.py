"""Every measurement runs as a command, at its smallest size, and reports its figures. No test looks
at how long anything took."""

import json
import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from apps.bench import data, promise
from apps.bench.__main__ import CONFIG, MEASUREMENTS
from apps.bench.loop import Reference
from apps.bench.report import spread
from apps.bench.turns import Turn, take_round
from apps.main.config import TrainArgs
from apps.main.transformer import build
from lingua.base.errors import UserError
from lingua.config.load import load
from tests.programs import python

ROOT = Path(__file__).parents[2]
DIM, LAYERS, HIDDEN, VOCAB = 16, 2, 48, 258
PARAMETERS = 2 * VOCAB * DIM + DIM + LAYERS * (4 * DIM * DIM + 3 * DIM * HIDDEN + 2 * DIM)
UNITS = LAYERS + 2  # FSDP units: the blocks, the embedding, the norm with the head
FLOAT = 4  # bytes
SPREAD = {"median", "q1", "q3", "low", "high", "n"}
TEXT = ["data.sources={text: 1.0}", "data.source_files={text: {files: ['*.py', 'code/*.py']}}"]
MODEL = [f"model.dim={DIM}", f"model.n_layers={LAYERS}", "model.n_heads=2", "model.multiple_of=16"]
RUN = ["data.seq_len=16", "data.global_batch_size=8", "data.batch_size=4", "steps=4", "device=cpu"]
RUN += ["optim.warmup=1", "logging.freq=3", "validation.tokens=64", *TEXT, *MODEL]


def bench(folder: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`python -m apps.bench` on small text in `folder`, which is its working directory."""
    (folder / "code").mkdir(exist_ok=True)
    for part in range(200):  # documents, so that some are held out
        path = folder / ("code" if part % 2 else "") / f"{part}.py"
        path.write_text(f"# {part}\n" + "def f(x):\n    return x + {part * x}\n" * 12)
    command = [*python(), "-m", "apps.bench", name, f"data.root_dir={folder}", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def spreads_in(content: Any) -> list[dict[str, float]]:
    """Every Spread of the results."""
    if isinstance(content, dict) and content.keys() == SPREAD:
        return [content]
    parts = content.values() if isinstance(content, dict) else content
    return [s for part in parts if isinstance(part, dict | list) for s in spreads_in(part)]


def check_loop(results: dict[str, Any]) -> None:
    loop, one, other = torch.tensor(results["rounds_s"])[..., 0].T
    ratio = results["tokens_ratio"]
    assert ratio["low"] == pytest.approx(((one + other) / (2 * loop)).min().item(), rel=1e-3)
    assert results["loss_difference"] < 1e-5


def check_step(results: dict[str, Any]) -> None:
    [case] = results["cases"]
    assert case["shape"] == "debug" and case["mfu"] is case["peak_gib"] is None  # of a CPU
    speeds = [case[key]["low"] for key in ("tokens_per_s", "bare_tokens_per_s")]
    assert case["ratio"]["low"] == pytest.approx(speeds[0] / speeds[1])
    assert case["loss_difference"] < 1e-5


def check_sync(results: dict[str, Any]) -> None:
    whole, part = PARAMETERS * FLOAT, PARAMETERS * FLOAT // 2
    for counts, scatters, reduces, kept in zip(
        results["modes"], (1, 4, 4), (1, 1, 4), (whole, part, part), strict=True
    ):
        assert counts["parameters"] == PARAMETERS
        assert counts["reduce_scatter"] == {"count": UNITS * scatters, "bytes": whole * scatters}
        assert counts["all_reduce"] == {"count": UNITS * reduces, "bytes": part * reduces}
        assert kept <= counts["kept_bytes"] <= kept + 1024  # the loop's own scalars


def check_promise(results: dict[str, Any]) -> None:
    assert [line["step"] for line in results["stopped"]] == [1, 2, 3, 4, 5]
    assert results["batches_equal"] == [True] * 5 and max(results["apart"]) < 1e-5


def check_checkpoint(results: dict[str, Any]) -> None:
    tensors = 3 * PARAMETERS * FLOAT  # the model and both moments
    assert tensors < results["bytes"] < 3 * tensors  # small tensors, each with a header
    [seconds] = results["rounds"]
    rate = results["rate of saving / of plain files written and synced"]
    assert rate["low"] == pytest.approx(seconds["write"] / seconds["save"])


def check_exchange(results: dict[str, Any]) -> None:
    *loaded, convert = results.values()
    for folder in loaded:  # rank 0, of eight, has the larger part of what does not divide
        assert 1 <= folder["held"] * 8 / (FLOAT * PARAMETERS) < 1.05
    [seconds] = convert["rounds"]
    assert convert["export / copy"]["low"] == seconds["export"] / seconds["copy"]


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


def check_startup(results: dict[str, Any]) -> None:
    for seconds in results["seconds"].values():
        parts = [seconds[part]["low"] for part in seconds if part != "all"]
        assert min(parts) > 0 and sum(parts) == pytest.approx(seconds["all"]["low"])


def check_debug(results: dict[str, Any]) -> None:
    assert (results["steps"], results["tokens"]) == (4, 4 * 8 * 16)
    assert 0 < results["waiting_for_data_s"] < results["training_s"] < results["wall_s"]
    assert results["held_out"][-1]["step"] == 4


def check_generate(results: dict[str, Any]) -> None:
    assert (results["prompt_tokens"], results["new_tokens"]) == (64, 8)
    assert results["batch_1"]["equal_tokens"] == results["batch_32"]["equal_tokens"] == 1.0


def check_attention(results: dict[str, Any]) -> None:
    assert len(results["cases"]) == 16
    assert all(case["difference"] < 1e-5 for case in results["cases"])


VOCABULARY = f"model.vocab_size={VOCAB}"
SMALLEST: dict[str, tuple[list[str], Callable[[dict[str, Any]], None]]] = {
    "loop": ([*RUN, "--repeats=2"], check_loop),
    "step": ([*RUN, "--repeats=1", VOCABULARY, "distributed.compile=false"], check_step),
    "generate": ([*RUN, "--repeats=1", "data.seq_len=72"], check_generate),
    "debug": (RUN, check_debug),
    "startup": ([*RUN, "--repeats=1"], check_startup),
    "attention": ([*RUN, "--repeats=1"], check_attention),
    "sync": ([*RUN, "data.batch_size=1", "data.global_batch_size=16"], check_sync),
    "checkpoint": ([*RUN, "--repeats=1"], check_checkpoint),
    "exchange": ([*RUN, "--repeats=1", VOCABULARY], check_exchange),
    "promise": ([*RUN, "steps=5"], check_promise),
    "pairs": (["--repeats=2", "data.seq_len=16", "steps=4", "validation.every=2"], check_pairs),
}
MINUTES = ("attention", "sync", "exchange", "promise", "pairs")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.soak) if n in MINUTES else n for n in SMALLEST]
)
def test_a_measurement_reports_its_figures(tmp_path: Path, name: str) -> None:
    words, check = SMALLEST[name]
    done = bench(tmp_path, name, "--json=report.json", *words)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["command"].startswith(f"python -m apps.bench {name} ")
    assert {"cpu", "cores", "threads", "torch", "python", "device"} <= content["machine"].keys()
    for s in spreads_in(content["results"]):
        assert s["low"] <= s["q1"] <= s["median"] <= s["q3"] <= s["high"], s
        assert s["n"] >= 1 and all(map(math.isfinite, s.values()))
    check(content["results"])
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("bench-")]


@pytest.mark.soak
def test_text_and_rows_are_timed_beside_their_references(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "TEXT_BYTES": 400_000,
        "TEXT_REPEATS": {"tiktoken": 1, "sentencepiece": 1, "bytes": 1},
        "TRAINED_ON": 200_000,
        "VOCABULARY": 700,
        "SHARED_PARTS": 4,
        "GATHERED_TOKENS": 2**21,
        "SPARSE_TOKENS": 10**8,
    }
    for name, value in small.items():
        monkeypatch.setattr(data, name, value)
    results = data.measure([], repeats=1).results
    for name in ("tiktoken", "sentencepiece", "bytes", "two processes", "rows"):
        assert results[name].keys() == {"ours", "reference", "ratio", "cpu_ratio"}
        assert all(s.low > 0 and s.n == 1 for s in results[name].values())
    assert results["first batch, ms"].low > 0


def test_every_measurement_is_tested() -> None:
    assert MEASUREMENTS.keys() == {*SMALLEST, "data"}


# ------------------------------------------------------------------------------------- controls


def test_a_reference_on_other_rows_has_other_losses() -> None:
    """The control of loss_difference: the comparison notices a row shifted by one."""
    args, _ = load(TrainArgs, [*RUN, VOCABULARY])
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


def test_a_broken_promise_shows() -> None:
    """The control of promise: another batch, another loss and a lost step are noticed."""
    never = [{"step": step, "loss": 2.0, "batch_hash": f"{step}"} for step in (1, 2, 3)]
    stopped = [dict(line) for line in never]
    stopped[1]["batch_hash"] = "other"
    stopped[2]["loss"] = 2.5
    assert promise.compare(never, stopped) == ([0, 0, 0.25], [True, False, True])
    with pytest.raises(UserError, match="same steps"):
        promise.compare(never, stopped[1:])


def test_sides_that_did_not_do_the_same_work_are_not_compared() -> None:
    for results in ((1000, 1001), (0, 0)):
        ours, reference = (Turn(1.0, 1.0, result) for result in results)
        with pytest.raises(AssertionError):
            data.speeds([{"ours": ours, "reference": reference}])


def test_no_side_is_always_first() -> None:
    called: list[str] = []
    sides = {name: lambda name=name: called.append(name) for name in "abc"}
    for i in range(3):
        assert list(take_round(sides, i)) == ["a", "b", "c"]
    assert called == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]


def test_a_spread_has_the_quartiles() -> None:
    s = spread([3.0, 1.0, 2.0, 5.0, 4.0])
    assert (s.median, s.q1, s.q3, s.low, s.high, s.n) == (3.0, 2.0, 4.0, 1.0, 5.0, 5)
    assert s.cells(".1f") == ("3.0", "1.0 to 5.0")


def test_a_mistake_is_one_message(tmp_path: Path) -> None:
    for name, word, message in (
        ("loop", "modle.dim=3", "error: modle"),
        ("step", f"config={CONFIG}", "error: model.vocab_size"),  # a mistake of every case
        ("sync", "--repeats=2", "--repeats: sync has no rounds"),
    ):
        done = bench(tmp_path, name, *RUN, word)
        assert done.returncode == 2
        assert message in done.stderr and "Traceback" not in done.stderr
