"""What a user may write in a config or on the command line. Most mistakes are in
tests/mistakes.txt."""

import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lingua.config.load import flatten, load, meta_lingua, resume_classes, to_yaml
from lingua.config.schema import Guarded
from tests.config.example import (
    Benchmarks,
    Config,
    Data,
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


# ---- values


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


# ---- files


def test_base_is_laid_under_and_lines_are_those_of_each_file(tmp_path):
    write(tmp_path / "common" / "root.yaml", "steps: 5\nseed: 1\noptim: {lr: 0.5, warmup: 1}\n")
    write(tmp_path / "common" / "mid.yaml", "base: root.yaml\nseed: 2\noptim:\n  lr: 0.25\n")
    path = write(tmp_path / "runs" / "top.yaml", "base: ../common/mid.yaml\nname: top\n")
    got = config(path, "optim.clip=2")
    assert (got.name, got.steps, got.seed) == ("top", 5, 2)
    assert (got.optim.lr, got.optim.warmup, got.optim.clip) == (0.25, 1, 2.0)
    write(tmp_path / "common" / "root.yaml", "steps: 5\nseeed: 1\n")
    refused(lambda: config(path), 'seeed: unknown key (did you mean "seed"?)', "root.yaml:2)")


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


def test_files_that_cannot_be_read(tmp_path):
    circle = write(tmp_path / "a.yaml", "base: b.yaml\n")
    write(tmp_path / "b.yaml", "seed: 1\nbase: ./a.yaml\n")
    refused(lambda: config(circle), "b.yaml:2: base = ./a.yaml", "circle")
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    for name, *names in (
        ("folde.yaml", "No such file", 'did you mean "folder.yaml"?'),
        ("folder.yaml", "must be a file"),
        ("fifo", "must be a file"),
        ("latin.yaml", "UTF-8", "byte 9"),
    ):
        refused(lambda name=name: config(f"config={tmp_path}/{name}"), name, *names)


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


# ---- what is known of the keys


def test_every_flat_key_has_its_resume_class():
    classes = resume_classes(Config)
    expected = {"optim.lr": "announced", "data.sources": "guarded", "checkpoint.dump.keep": "free"}
    assert classes.items() >= expected.items() and None not in classes.values()
    for made in (config(), config("logging.wandb.project=p")):
        assert set(flatten(made)) <= set(classes)

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
