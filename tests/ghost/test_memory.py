"""The memory of a training step at full size, by torch's own allocator, is what it should be."""

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("config", "ranks", "rows", "checkpointing", "limit_gib"),
    [
        ("llama_1B", 1, 4, "none", 55),
        ("llama_1B", 8, 4, "none", 38),
        ("llama_7B", 8, 2, "selective", 40),
    ],
)
def test_a_step_needs_no_more_than_this(ghost, config, ranks, rows, checkpointing, limit_gib):
    keys = [
        f"config=apps/main/configs/{config}.yaml",
        "data.seq_len=4096",
        f"data.batch_size={rows}",
    ]
    keys += [f"data.global_batch_size={rows * ranks}", "model.vocab_size=128256"]
    keys += [f"distributed.activation_checkpointing={checkpointing}", "distributed.dp_replicate=1"]
    output = ghost("python", "-m", "tests.ghost.memory", "--ranks", str(ranks), *keys)
    found = json.loads(output.splitlines()[-1])
    # float32 weights, gradients and two moments, of which each rank has its part
    least_gib = 16 * found["parameters"] / ranks / 2**30
    assert least_gib < found["step_gib"] <= limit_gib


@pytest.mark.parametrize("config", ["llama_1B", "llama_3B", "llama_7B", "llama_8B"])
def test_the_configs_fit_eight_gpus_of_80_gb(ghost, config):
    output = ghost(
        *("python", "-m", "tests.ghost.memory", "--ranks", "8", "--steps", "2"),
        *(f"config=apps/main/configs/{config}.yaml", "model.vocab_size=128256"),
    )
    assert json.loads(output.splitlines()[-1])["reserved_gib"] < 65  # of 74.5, less CUDA and NCCL


@pytest.mark.parametrize(
    ("config", "ranks", "rows", "keys"),
    [
        ("llama_1B", 1, 4, []),
        ("llama_1B", 8, 32, []),
        ("llama_1B", 8, 96, []),
        ("llama_1B", 8, 64, ["optim.name=muon"]),
        ("llama_1B", 8, 64, ["data.document_mask=ignore"]),
        ("llama_1B", 8, 64, ["distributed.reshard=step"]),
        ("llama_1B", 64, 256, []),
        ("llama_7B", 1, 2, []),
        ("llama_7B", 8, 48, ["distributed.activation_checkpointing=none"]),
        ("llama_7B", 8, 48, []),
        ("llama_7B", 8, 48, ["distributed.activation_checkpointing=full"]),
        ("llama_7B", 64, 256, ["distributed.activation_checkpointing=full"]),
    ],
)
def test_a_plan_has_the_memory_that_the_allocator_allocates(
    ghost, tmp_path, config, ranks, rows, keys
):
    run = [
        *(f"config=apps/main/configs/{config}.yaml", "model.vocab_size=128256"),
        *(f"data.global_batch_size={rows}", *keys),
    ]
    output = ghost("python", "-m", "tests.ghost.memory", "--ranks", str(ranks), *run)
    plan = tmp_path / "plan.json"
    command = [sys.executable, "-m", "lingua", "plan", f"ngpu={ranks}", f"json={plan}", *run]
    subprocess.run(command, check=True)
    allocated = json.loads(plan.read_text())["allocated"] / 2**30
    assert allocated == pytest.approx(json.loads(output.splitlines()[-1])["step_gib"], rel=0.05)
