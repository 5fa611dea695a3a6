"""Keys of Meta Lingua's configs, which have another name here or none."""

from functools import partial
from pathlib import Path

import pytest

from lingua.base.errors import UserError
from lingua.config.foreign import Foreign
from lingua.config.load import load, meta_lingua
from tests.config.example import Config, mistakes, write

pytestmark = pytest.mark.quick


def lingua(tmp_path: Path, text: str, *argv: str) -> Config:
    return load(Config, [write(tmp_path / "c.yaml", text), *argv], meta_lingua)[0]


def test_lingua_fsdp_types_become_mesh_sizes(tmp_path):
    def sizes(text: str, *argv: str) -> tuple[int | None, int | None]:
        got = lingua(tmp_path, f"distributed: {{{text}}}\n", *argv).distributed
        return got.dp_replicate, got.dp_shard

    assert sizes("fsdp_type: full_shard") == (1, None)
    assert sizes("fsdp_type: no_shard") == (None, 1)
    assert sizes("fsdp_type: full_shard, dp_shard: 4, dp_replicate: 2") == (2, 4)
    assert sizes("dp_shard: 4, dp_replicate: 2, fsdp_type: full_shard") == (2, 4)
    assert sizes("fsdp_type: full_shard", "distributed.dp_shard=2") == (1, 2)
    assert sizes("dp_shard: 2", "distributed.fsdp_type=full_shard") == (1, 2)  # ours comes first
    assert sizes("fsdp_type: no_shard", "distributed.fsdp_type=full_shard") == (1, None)


def test_lingua_checkpointing_becomes_a_choice(tmp_path):
    for given, ours in (("true", "selective"), ("false", "none"), ("no", "none")):
        text = f"distributed: {{selective_activation_checkpointing: {given}}}\n"
        assert lingua(tmp_path, text).distributed.activation_checkpointing == ours


def test_lingua_seeds_must_agree(tmp_path):
    assert lingua(tmp_path, "seed: 7\nmodel: {seed: 7}\ndata: {seed: 7}\n").seed == 7


def test_lingua_keys_that_change_nothing_are_accepted(tmp_path):
    neutral = "detect_anomaly: false, float8_recipe: null, spawn_method: forkserver"
    assert lingua(tmp_path, f"distributed: {{{neutral}}}\n") == Config()
    assert lingua(tmp_path, "distributed: {float8_recipe: x}\n", "distributed.float8_recipe=null")


def test_another_name_of_a_key_means_the_same_in_any_layer(tmp_path):
    table = partial(Foreign, alias_of={"data.old_steps": "steps"})
    path = write(tmp_path / "c.yaml", "data: {old_steps: 70}\n")
    assert load(Config, [path], table)[0].steps == 70
    assert load(Config, [path, "steps=70"], table)[0].steps == 70
    assert load(Config, ["steps=70", "data.old_steps=null"], table)[0].steps == 70
    with pytest.raises(UserError, match=r"old_steps = 70: is another name of steps = 80;"):
        load(Config, [path, "steps=80"], table)


def test_a_key_of_ours_comes_before_the_foreign_table():
    ignored = {"optim": "never", "steps": "never", "odd": "old"}
    got, notices = load(
        Config, ["steps=5", "odd.a=1", "odd.b=2", "optim.warmup=1"], lambda: Foreign(ignored)
    )
    assert (got.steps, got.optim.warmup) == (5, 1)
    assert notices == ["odd has no effect here: old (command line)"]
    lines = mistakes("optim.lrr=1", foreign=Foreign)
    assert lines[0].startswith("optim.lrr: unknown key")
