"""Keys of Meta Lingua's configs, which have another name here or none."""

from functools import partial

import pytest

from lingua.config.foreign import Foreign
from lingua.config.load import load, meta_lingua
from tests.config.example import Config, Distributed, mistakes, write
from tests.mistakes import refused

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("text", "words", "meant"),
    [
        ("fsdp_type: full_shard", "", Distributed(1, None)),
        ("fsdp_type: no_shard", "", Distributed(None, 1)),
        ("fsdp_type: full_shard, dp_shard: 4, dp_replicate: 2", "", Distributed(2, 4)),
        ("dp_shard: 4, dp_replicate: 2, fsdp_type: full_shard", "", Distributed(2, 4)),
        ("fsdp_type: full_shard", "distributed.dp_shard=2", Distributed(1, 2)),
        ("dp_shard: 2", "distributed.fsdp_type=full_shard", Distributed(1, 2)),  # ours comes first
        ("fsdp_type: no_shard", "distributed.fsdp_type=full_shard", Distributed(1, None)),
        *(
            (f"selective_activation_checkpointing: {given}", "", Distributed(1, None, False, ours))
            for given, ours in (("true", "selective"), ("false", "none"), ("no", "none"))
        ),
        # what changes nothing
        ("detect_anomaly: false, float8_recipe: null, spawn_method: forkserver", "", Distributed()),
        ("float8_recipe: x", "distributed.float8_recipe=null", Distributed()),
    ],
)
def test_keys_of_lingua_mean_what_they_do_there(tmp_path, text, words, meant):
    seeds = "seed: 7\nmodel: {seed: 7}\ndata: {seed: 7}\n"  # must agree
    path = write(tmp_path / "c.yaml", f"{seeds}distributed: {{{text}}}\n")
    got = load(Config, [path, *words.split()], meta_lingua)[0]
    assert got == Config(seed=7, distributed=meant)


def test_another_name_of_a_key_means_the_same_in_any_layer(tmp_path):
    table = partial(Foreign, alias_of={"data.old_steps": "steps"})
    path = write(tmp_path / "c.yaml", "data: {old_steps: 70}\n")
    for words in ([path], [path, "steps=70"], ["steps=70", "data.old_steps=null"]):
        assert load(Config, words, table)[0].steps == 70
    refused(lambda: load(Config, [path, "steps=80"], table), "old_steps = 70", "steps = 80")


def test_a_key_of_ours_comes_before_the_foreign_table():
    ignored = {"optim": "never", "steps": "never", "odd": "old"}
    words = ["steps=5", "odd.a=1", "odd.b=2", "optim.warmup=1"]
    got, notices = load(Config, words, lambda: Foreign(ignored))
    assert (got.steps, got.optim.warmup) == (5, 1)
    assert notices == ["odd has no effect here: old (command line)"]
    assert mistakes("optim.lrr=1", foreign=Foreign)[0].startswith("optim.lrr: unknown key")
