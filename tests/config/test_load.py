"""What a user may write in a config or on the command line. Most mistakes are in
tests/mistakes.txt."""

import re
import shlex
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from lingua.config.foreign import Foreign
from lingua.config.load import flatten, load, meta_lingua, resume_classes, to_yaml
from lingua.config.saved import load_saved
from lingua.config.schema import Guarded
from tests.config.example import (
    Benchmarks,
    Config,
    Data,
    Distributed,
    Every,
    Model,
    Wandb,
    config,
    mistakes,
    write,
)
from tests.mistakes import refused

pytestmark = pytest.mark.quick

LINES = Path(__file__).with_name("values.txt").read_text().splitlines()
VALUES = [re.split("  +", line) for line in LINES if line[0] != "#"]


@pytest.mark.parametrize(("words", "key", "value"), VALUES)
def test_words_on_the_command_line_become_what_their_fields_say(monkeypatch, words, key, value):
    monkeypatch.setenv("LINGUA_TEST", "of the environment")
    made = config(*shlex.split(words))
    assert repr(flatten(made)[key]) == value
    assert made.checkpoint.dump == Every()  # what is referred to stays


def test_a_default_of_a_derived_class_has_the_keys_of_that_class():
    @dataclass
    class Wide(Model):
        factor: Guarded[float] = 2.0

    @dataclass
    class Fork:
        model: Model = field(default_factory=Wide)

    assert load(Fork, ["model.factor=3"])[0].model == Wide(factor=3.0)


def test_same_values_mean_the_same_in_a_file(tmp_path):
    text = "name: 1e3\nsteps: 60_000\noptim:\n  lr: 3e-4\n  clip: ~\ndata:\n  sources: {on: 1}\n"
    text += "distributed: {compile: yes}\nmodel:  # nothing set below\n"
    got = flatten(config(write(tmp_path / "c.yaml", text)))
    expected = {"name": "1e3", "steps": 60000, "optim.lr": 3e-4, "optim.clip": None}
    expected |= {"data.sources": {"on": 1.0}, "distributed.compile": True, "model.dim": 64}
    assert {key: got[key] for key in expected} == expected


def test_all_mistakes_come_in_one_message(tmp_path):
    path = write(tmp_path / "c.yaml", "steps: many\nmodle:\n  dim: 1\noptim:\n  lr: -1\n")
    lines = mistakes(path, "distributed.compile=2", "oops", "-x=1")
    file = tmp_path / "c.yaml"
    for names in (
        ('steps = "many"', "whole number", f"({file}:1)"),
        ("modle", 'did you mean "model"?', f"({file}:2)"),
        # `optim` itself has no mistake of a type, so it is validated although other groups have
        ("optim.lr = -1", "at least 0", f"({file}:5)"),
        ("distributed.compile = 2", "true or false", "command line"),
        ('argument "oops"', "key=value"),
        ('argument "-x=1"', "key=value"),
    ):
        assert [line for line in lines if all(name in line for name in names)], names
    assert len(lines) == 6
    path = write(tmp_path / "c.yaml", "".join(f"key{i}: 1\n" for i in range(200)))
    lines = refused(lambda: config(path)).splitlines()
    assert lines[0].startswith("200 mistakes") and (len(lines), lines[-1]) == (52, "  ...")
    keys = ["optim.lr", "data.stages[0].from_step", "data.sources.a", "optim.warmup"]
    stages = "data.stages=[{from_step: -1}]"
    lines = mistakes("optim.lr=-1", stages, "data.sources.a=-2", "steps=5")
    assert [line.partition(" = ")[0] for line in lines] == keys  # of groups, lists and mappings


@pytest.mark.parametrize(
    ("words", "key"),
    [
        # warmup fits the steps meant; the default in place of the wrong value must not be checked
        (["steps=6OO", "optim.warmup=1500"], 'steps = "6OO": '),
        (["stpes=6000", "optim.warmup=1500"], "stpes: "),
        (["steps=6OO", "seed=${steps}"], 'steps = "6OO": '),
    ],
)
def test_a_mistake_does_not_cause_a_second_false_one(words, key):
    [line] = mistakes(*words)
    assert line.startswith(key)


def test_a_secret_of_the_environment_is_only_written_where_that_is_asked_for(monkeypatch):
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "wandb_api_key"):
        monkeypatch.setenv(name, "hf_secret")
        [line] = mistakes(f"name=${{oc.env:{name}}}")
        assert f"{name} looks like a secret" in line and "hf_secret" not in line
        assert config(f"name=${{oc.env.secret:{name}}}").name == "hf_secret"
    for name in ("USER_NAME", "TOKENIZER", "MAX_TOKENS_", "KEYBOARD"):
        monkeypatch.setenv(name, "x")
        assert config(f"name=a ${{oc.env:{name}}}").name == "a x"
    monkeypatch.setenv("DOLLAR", "${seed}")  # a value is no reference
    assert "must not contain ${" in mistakes("data.seq_len=${oc.env:DOLLAR}")[0]


def test_base_is_laid_under_and_lines_are_those_of_each_file(tmp_path):
    write(tmp_path / "common" / "root.yaml", "steps: 5\nseed: 1\noptim: {lr: 0.5, warmup: 1}\n")
    write(tmp_path / "common" / "mid.yaml", "base: root.yaml\nseed: 2\noptim:\n  lr: 0.25\n")
    path = write(tmp_path / "runs" / "top.yaml", "base: ../common/mid.yaml\nname: top\n")
    got = config(path, "optim.clip=2")
    assert (got.name, got.steps, got.seed) == ("top", 5, 2)
    assert (got.optim.lr, got.optim.warmup, got.optim.clip) == (0.25, 1, 2.0)
    write(tmp_path / "common" / "root.yaml", "steps: 5\nseeed: 1\n")
    refused(lambda: config(path), 'seeed: unknown key (did you mean "seed"?)', "root.yaml:2)")
    write(tmp_path / "common" / "root.yaml", "seed: 1\nbase: ./mid.yaml\n")
    refused(lambda: config(path), "root.yaml:2: base = ./mid.yaml", "circle")


KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2\n-----END OPENSSH PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (KEY, ": must hold lines"),
        (KEY.replace("hunter2", 30 * "hunter2"), ": must hold lines"),
        ("hunter2\n", ": must hold lines"),
        ("- hunter2\n", ": must hold lines"),
        ("10:00 login as hunter2: refused\n", ":1: is no key of a config"),
        ("[hunter2]\nkey = 1\n", ":2:1: is not valid YAML"),
        ("a: *hunter2\n", ":1:4: is not valid YAML: found undefined alias ..."),
        ("a: &hunter2 1\nb: &hunter2 2\n", ":2:4: is not valid YAML"),
        ("a: !<hunter2> 1\n", ':1: the YAML tag ... is not supported'),
        ("hunter2: 1\nhunter2: 2\n", ":2: key ... is given twice"),
        ('"hunter2\\n": 1\n"hunter2\\n": 2\n', ":2: key ... is given twice"),
        ('a: "hunter2 \\0"\n', ":1: ...: must be text"),
        ("a: [hunter2\n", ":2:1: is not valid YAML"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_config_is_not_quoted_where_another_config_names_it(
    tmp_path, content, named
):
    own = write(tmp_path / "private", content)
    if "BEGIN" in content:
        refused(lambda: config(own), "BEGIN OPENSSH")  # the user's own file is
    path = write(tmp_path / "theirs.yaml", "base: private\n")
    message = refused(lambda: config(path), f"{tmp_path / 'private'}{named}")
    assert "hunter2" not in message and "BEGIN" not in message
    message = refused(lambda: load_saved(Config, tmp_path / "private"), f"private{named}")
    assert "hunter2" not in message and "BEGIN" not in message


def test_a_mapping_replaces_the_one_below_it(tmp_path):
    write(tmp_path / "base.yaml", "data: {sources: {a: 1, b: 1}}\n")
    path = write(tmp_path / "c.yaml", "base: base.yaml\ndata:\n  sources:\n    c: 2\n")
    for words, sources in (
        ([], {"c": 2.0}),  # neither the base's nor the default
        (["data.sources={d: 1}"], {"d": 1.0}),
        (["data.sources.d=1"], {"c": 2.0, "d": 1.0}),
        (["data.sources.c=3"], {"c": 3.0}),
        (["data.sources.a=1", "data.sources={b: 1}", "data.sources.a=2"], {"b": 1.0, "a": 2.0}),
    ):
        assert config(path, *words).data.sources == sources


def test_the_later_word_on_an_optional_group_wins(tmp_path):
    path = write(tmp_path / "c.yaml", "logging: {wandb: {project: p, tags: [1e3, on]}}\n")
    assert config(path).logging.wandb == Wandb("p", ["1e3", "on"])
    assert config(path, "logging.wandb=null").logging.wandb is None
    null = write(tmp_path / "n.yaml", "base: c.yaml\nlogging: {wandb: null}\n")
    assert config(null).logging.wandb is None
    assert config(null, "logging.wandb.project=q").logging.wandb == Wandb("q")
    assert config("eval={}").eval == Benchmarks()


def test_an_empty_file_and_aliases_work(tmp_path):
    assert config(write(tmp_path / "e.yaml", "# nothing\n")) == Config()
    assert config(write(tmp_path / "b.yaml", "\ufeffsteps: 30\n")).steps == 30  # a byte-order mark
    path = write(tmp_path / "m.yaml", "checkpoint:\n  dump: &d {every: 7, keep: 3}\n  eval: *d\n")
    got = config(path).checkpoint
    assert got.dump == got.eval == Every(7, 3)


def test_yaml_written_from_a_config_loads_as_the_same_config(tmp_path):
    first = config(
        "name=1e3", "optim.lr=1e-7", "optim.clip=null", "data.sources={a.b: 1, on: 2}",
        "optim.ratios=[0, 1]", "data.source_files={a: {files: [x]}}",
        "data.stages=[{from_step: 5, sources: {a: 1}}]", "logging.wandb.project=0x1",
        "dump_dir=/a b/é: #c",
    )  # fmt: skip
    assert config(write(tmp_path / "c.yaml", to_yaml(first))) == first


def test_a_key_without_a_resume_class_is_found():
    """That no key is without one: tests/apps/test_config.py."""

    @dataclass
    class Forgotten:
        a: int = 1

    assert resume_classes(Forgotten) == {"a": None}


def test_a_part_of_a_configuration_ignores_the_other_groups_of_a_file(tmp_path):
    @dataclass
    class Part:
        data: Data = field(default_factory=Data)

    path = write(tmp_path / "c.yaml", "seed: 1\nmodle: 2\ndata: {seq_len: 8, seed: 1}\n")
    args, notices = load(Part, [path], meta_lingua, partial=True)
    assert (args.data.seq_len, notices) == (8, [])
    seed = lambda: load(Part, [path, "seed=1"], meta_lingua, partial=True)  # noqa: E731
    refused(seed, "seed: unknown key (command line)")
    write(tmp_path / "c.yaml", "data: {seq_le: 8}\n")
    refused(lambda: load(Part, [path], meta_lingua, partial=True), 'did you mean "data.seq_len"')


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
