"""A run that begins with the weights of a Hugging Face Llama folder, on any topology."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from lingua.data import IGNORE
from tests.apps.runs import GLOBAL_BATCH, Runs, differs

ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8}
MODEL = {
    "model.dim": 24,
    "model.ffn_dim_multiplier": 0.92,
    "model.rope_theta": 500000.0,
    "model.rope_scaling": "{factor: 8, original_seq_len: 8}",
    "model.weight_tying": True,
    "stop_at": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=259, hidden_size=24, intermediate_size=58, num_hidden_layers=2, head_dim=6,
        num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters=ROPE, initializer_range=0.2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def loss_there(folder: Path, runs: Runs) -> float:
    """transformers' loss on the rows of the first step."""
    model = LlamaForCausalLM.from_pretrained(folder)
    rows = torch.from_numpy(runs.stream().rows(np.arange(GLOBAL_BATCH)).astype(np.int64))
    with torch.no_grad():
        logits = model(rows[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), ignore_index=IGNORE).item()


def test_a_run_begins_with_the_weights_of_a_folder_on_every_topology(runs: Runs, folder: Path):
    given = MODEL | {"checkpoint.init_from": folder}
    alone = runs.train((1, 1, 1), given)
    assert alone.column("loss")[0] == pytest.approx(loss_there(folder, runs), rel=1e-6)
    for sizes in ((1, 3, 1), (1, 1, 2)):
        assert differs(runs.train(sizes, given), alone) == []
    assert "loss" in differs(runs.train((1, 1, 1), MODEL), alone)


def test_the_checkpoint_of_a_run_wins_over_the_weights_it_began_with(
    runs: Runs, folder: Path, tmp_path: Path
):
    elsewhere = shutil.copytree(folder, tmp_path / "llama")
    given = MODEL | {"checkpoint.init_from": elsewhere}
    whole = runs.train((1, 1, 1), MODEL | {"checkpoint.init_from": folder})
    part = runs.train((1, 2, 1), given | {"stop_at": 1})
    shutil.rmtree(elsewhere)  # it is not even looked for
    resumed = runs.train((1, 1, 1), given, dump_dir=part.dump_dir)
    assert differs(resumed, whole) == []


def test_a_folder_that_is_none_or_of_another_model_stops_the_run_before_its_data_is_read(
    runs: Runs, folder: Path, tmp_path: Path
):
    for given, said in (
        (
            {"checkpoint.init_from": tmp_path},
            f"checkpoint.init_from: {tmp_path} has no whole checkpoint",
        ),
        ({"checkpoint.init_from": folder, "model.dim": 28}, "model.dim = 28: must be 24"),
    ):
        refused = runs.train((1, 2, 1), MODEL | given, refused=True)
        assert said in refused.error
