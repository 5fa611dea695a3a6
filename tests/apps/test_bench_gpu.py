"""`apps.bench gpu` on a CPU, where its sizes are small and its numbers real."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from apps.bench.gpu import command, numbers, prepare
from apps.bench.gpu.speed import steady_step
from lingua.tools.check.numbers import AttentionCase, Errors, attention_pass, multiples
from lingua.tools.plan.make import make_plan
from tests.programs import python

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def bench_gpu(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*python(), "-m", "apps.bench", "gpu", f"out={folder}/out", "device=cpu", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def parts_of(folder: Path) -> dict[str, dict[str, Any]]:
    content = json.loads((folder / "out/results.json").read_text())
    return {part["part"]: part for part in content["parts"]}


@pytest.mark.soak
def test_a_part_that_fails_costs_no_other_one_and_shows_in_the_exit_code(tmp_path: Path) -> None:
    done = bench_gpu(tmp_path, "--only", "meta_lingua,1B,machine")
    assert done.returncode == 1, done.stderr
    parts = parts_of(tmp_path)
    assert [*parts] == ["machine", "1B", "meta_lingua"]  # by value
    assert parts["machine"]["verdict"] == parts["1B"]["verdict"] == "right"
    assert parts["machine"]["values"]["bf16 products, TFLOP/s"] > 0
    speed = parts["1B"]["values"]["tokens/s"]
    assert 0 < speed["low"] <= speed["median"] <= speed["high"] and speed["n"] == 3
    assert parts["meta_lingua"]["verdict"] == "FAILED"
    assert "meta_lingua=FOLDER names a clone" in parts["meta_lingua"]["summary"]
    assert "meta_lingua=FOLDER names a clone" in (tmp_path / "out/log").read_text()
    assert not (tmp_path / "out/work").exists()


def test_what_does_not_fit_is_not_run_and_an_unknown_part_is_refused(tmp_path: Path) -> None:
    done = bench_gpu(tmp_path, "--only=machine", "minutes=0.1")
    assert done.returncode == 1 and parts_of(tmp_path)["machine"]["verdict"] == "not run"
    done = bench_gpu(tmp_path, "--only=machine,mashine")
    assert done.returncode == 2 and "mashine is no part" in done.stderr


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_part_is_right_on_a_cpu_beside_a_clone_that_the_user_names(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "model.py").write_text(STAND_IN)
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "model"]):
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(clone), *name, *words], check=True)
    done = bench_gpu(tmp_path, "minutes=30", f"nanogpt={clone}")
    parts = parts_of(tmp_path)
    assert {name: part["verdict"] for name, part in parts.items()} == dict.fromkeys(parts, "right")
    assert done.returncode == 0 and "nanogpt" in parts and "meta_lingua" not in parts
    assert parts["bits"]["values"]["float32, stopped: equal lines, equal tensors"] == [4, True]


def test_a_part_that_runs_out_of_time_keeps_what_it_has_found(tmp_path: Path) -> None:
    work = "print('{\"batch 1\": 5}\\nbatch 32', flush=True)\nimport time; time.sleep(60)"
    with (tmp_path / "log").open("wb") as f:
        part = subprocess.Popen([sys.executable, "-c", work], stdout=f, process_group=0)
    while not (tmp_path / "log").stat().st_size:
        time.sleep(0.02)
    row = command.finish("generation", part, time.monotonic(), tmp_path / "log")
    assert row["verdict"] == "FAILED: out of time" and row["summary"] == "batch 32"
    assert row["values"] == {"batch 1": 5}


def test_a_number_that_is_too_far_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    """A window that is wrong by one position, and a sum that is none."""
    passes = [attention_pass(AttentionCase(2, 1, 16, 64, window=w), "sdpa", CPU, torch.float32)[1]
              for w in (20, 21)]  # fmt: skip
    got, wrong = (work() for work in passes)
    assert numbers.judge("as it is", Errors(multiples(got, got, got), True)) == 0
    assert numbers.judge("wrong by one", Errors(multiples(wrong, got, got), True)) > 100
    numbers.judge("none", Errors([math.nan], True))
    found = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    keys = [key for line in found for key, value in line.items() if value == "wrong"]
    assert keys == ["TOO FAR: wrong by one", "TOO FAR: none"]


def test_a_trace_gives_kernels_waits_and_idle_time_of_a_step() -> None:
    events = [
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 5},
        {"cat": "cuda_driver", "name": "cuLaunchKernelEx", "ts": 5, "dur": 5},
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 9, "dur": 90},
        {"cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "ts": 99, "dur": 9},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 50},
        {"cat": "kernel", "name": "gemm", "ts": 10, "dur": 40},
        {"cat": "kernel", "name": "add", "ts": 30, "dur": 30},  # beside the other, in part
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 90, "dur": 20},
    ]
    # From 10 to 110 the device worked 50 and 20.
    expected = {"kernels": 1.5, "launches": 1.0, "waits": 0.5, "idle, %": pytest.approx(30)}
    assert steady_step(events, 2) == expected


@pytest.mark.soak
def test_prepared_plans_are_those_of_lingua_plan(tmp_path: Path) -> None:
    prepare.prepare_plan("124M", tmp_path / "124M.json")
    plans = json.loads((tmp_path / "124M.json").read_text())
    for gpu in ("h100", "h200"):
        plan = make_plan([*prepare.SHAPES["124M"], "device=cuda", f"gpu={gpu}"])[0].as_json()
        [prepared] = [v for k, v in plans.items() if k.split()[1].lower() == gpu]
        assert prepared["seconds"] == pytest.approx(plan["times"]["range"])
        assert prepared["GiB"] == plan["allocated"] / 2**30


def test_wheels_are_those_of_requirements_txt(tmp_path: Path) -> None:
    done = bench_gpu(tmp_path, "prepare", "wheels=numpyy")
    assert done.returncode == 2
    assert "wheels = numpyy: must be packages of requirements.txt" in done.stderr


STAND_IN = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=config.bias)

    def forward(self, idx, targets):
        logits = self.head(self.wte(idx))
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def configure_optimizers(self, weight_decay, lr, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr, betas, weight_decay=weight_decay)
"""
