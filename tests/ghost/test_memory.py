"""The memory of a training step at full size, by torch's own allocator, is what it should be."""

import json

import pytest

from tests.ghost.conftest import Ghost


@pytest.mark.parametrize(
    ("config", "ranks", "rows", "checkpointing", "limit_gib"),
    [
        ("llama_1B", 1, 4, "none", 55),
        ("llama_1B", 8, 4, "none", 38),
        ("llama_7B", 8, 2, "selective", 40),
    ],
)
def test_a_step_needs_no_more_than_this(
    ghost: Ghost, config: str, ranks: int, rows: int, checkpointing: str, limit_gib: float
) -> None:
    keys = {
        "config": f"apps/main/configs/{config}.yaml",
        "data.seq_len": 4096,
        "data.batch_size": rows,
        "data.global_batch_size": rows * ranks,
        "model.vocab_size": 128256,
        "distributed.activation_checkpointing": checkpointing,
        "distributed.dp_replicate": 1,
    }
    output = ghost(
        *("python", "-m", "tests.ghost.memory", "--ranks", str(ranks)),
        *(f"{key}={value}" for key, value in keys.items()),
    )
    found = json.loads(output.splitlines()[-1])
    # float32 weights, gradients and two moments, of which each rank has its part
    least_gib = 16 * found["parameters"] / ranks / 2**30
    assert least_gib < found["step_gib"] <= limit_gib


@pytest.mark.parametrize("config", ["llama_1B", "llama_3B", "llama_7B", "llama_8B"])
def test_the_configs_fit_eight_gpus_of_80_gb(ghost: Ghost, config: str) -> None:
    output = ghost(
        *("python", "-m", "tests.ghost.memory", "--ranks", "8", "--steps", "2"),
        *(f"config=apps/main/configs/{config}.yaml", "model.vocab_size=128256"),
    )
    assert json.loads(output.splitlines()[-1])["reserved_gib"] < 65  # of 74.5, less CUDA and NCCL
