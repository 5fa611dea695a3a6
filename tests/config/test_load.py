"""What a user may write in a config or on the command line, and the message of each mistake."""

import os
import re
from dataclasses import dataclass, field

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


# ---- values


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("steps=60_000", "steps", 60000),
        ("steps=1e3", "steps", 1000),
        ("steps=010", "steps", 10),
        ("seed=0x10", "seed", 16),
        ("optim.lr=3e-4", "optim.lr", 3e-4),
        ("optim.lr=1", "optim.lr", 1.0),
        ("optim.lr=.5", "optim.lr", 0.5),
        ("optim.clip=null", "optim.clip", None),
        ("optim.clip=.inf", "optim.clip", float("inf")),
        ("name=123", "name", "123"),
        ("name=1e3", "name", "1e3"),
        ("name=true", "name", "true"),
        ("name=2024-01-01", "name", "2024-01-01"),
        ("name=", "name", ""),
        ("name='null'", "name", "null"),
        ("name=a: b # c", "name", "a: b # c"),
        ("name=[x", "name", "[x"),
        ("name=k=v", "name", "k=v"),
        ("dump_dir=null", "dump_dir", None),
        ("optim.ratios=[1, 0.5]", "optim.ratios", [1.0, 0.5]),
        ("distributed.compile=true", "distributed.compile", True),
        ("optim.name=muon", "optim.name", "muon"),
        ("data.sources={a: 1, b: 2}", "data.sources", {"a": 1.0, "b": 2.0}),
        ("data.sources.dclm_1.0=3", "data.sources", {"stdlib": 1.0, "dclm_1.0": 3.0}),
        ("data.stages=[{from_step: 5, sources: {a: 1}}]", "data.stages",
         [{"from_step": 5, "sources": {"a": 1.0}}]),
    ],
)  # fmt: skip
def test_value_on_the_command_line_becomes_what_its_field_says(argument, key, value):
    result = flatten(config(argument))[key]
    assert result == value
    assert type(result) is type(value)


def test_a_default_of_a_derived_class_has_the_keys_of_that_class():
    @dataclass
    class Wide(Model):
        factor: Guarded[float] = 2.0

    @dataclass
    class Fork:
        model: Model = field(default_factory=Wide)

    assert load(Fork, ["model.factor=3"])[0].model == Wide(factor=3.0)


def test_same_values_mean_the_same_in_a_file(tmp_path):
    path = write(
        tmp_path / "c.yaml",
        "name: 1e3\nsteps: 60_000\noptim:\n  lr: 3e-4\n  clip: ~\ndata:\n  sources: {on: 1}\n"
        "distributed: {compile: yes}\nmodel:  # nothing set below\n",
    )
    got = flatten(config(path))
    assert (got["name"], got["steps"], got["optim.lr"], got["optim.clip"]) == (
        "1e3", 60000, 3e-4, None,
    )  # fmt: skip
    assert got["data.sources"] == {"on": 1.0}
    assert got["distributed.compile"] is True
    assert got["model.dim"] == 64


def test_all_mistakes_come_in_one_message(tmp_path):
    path = write(tmp_path / "c.yaml", "steps: many\nmodle:\n  dim: 1\noptim:\n  lr: -1\n")
    lines = mistakes(path, "distributed.compile=2", "oops", "-x=1")
    file = tmp_path / "c.yaml"
    assert f'steps = "many": must be a whole number ({file}:1)' in lines
    assert f'modle: unknown key (did you mean "model"?) ({file}:2)' in lines
    # `optim` itself has no mistake of a type, so it is validated although other groups have one
    assert f"optim.lr = -1: must be at least 0 ({file}:5)" in lines
    assert "distributed.compile = 2: must be true or false (command line)" in lines
    assert any(line.startswith('argument "oops": must have the form key=value') for line in lines)
    assert any(line.startswith('argument "-x=1": must have the form key=value') for line in lines)
    assert len(lines) == 6


def test_a_thousand_mistakes_are_counted_and_some_are_shown(tmp_path):
    path = write(tmp_path / "c.yaml", "".join(f"key{i}: 1\n" for i in range(200)))
    lines = refused(lambda: config(path)).splitlines()
    assert lines[0] == "200 mistakes in the configuration:"
    assert len(lines) == 52 and lines[-1] == "  ..."


def test_every_dataclass_is_validated_in_groups_lists_and_mappings():
    assert mistakes(
        "optim.lr=-1", "data.stages=[{from_step: 1}, {from_step: -1}]", "data.sources.a=-2",
        "data.source_files={a: {files: [x]}, b: {files: ['']}}", "steps=5",
    ) == [
        "optim.lr = -1: must be at least 0 (command line)",
        'data.source_files.b.files = [""]: must not hold an empty text (command line)',
        "data.stages[1].from_step = -1: must be at least 0 (command line)",
        "data.sources.a = -2: must be above 0 (command line)",
        "optim.warmup = 10: must be at most steps = 5 (the default)",
    ]  # fmt: skip


def test_a_mistake_does_not_cause_a_second_false_one():
    # warmup 1500 fits the steps meant; the default in place of the wrong value must not be checked
    assert mistakes("steps=6OO", "optim.warmup=1500") == [
        'steps = "6OO": must be a whole number (command line)'
    ]
    assert mistakes("stpes=6000", "optim.warmup=1500") == [
        'stpes: unknown key (did you mean "steps"?) (command line)'
    ]
    assert mistakes("steps=6OO", "seed=${steps}") == [
        'steps = "6OO": must be a whole number (command line)'
    ]


# ---- files


def test_base_is_laid_under_and_lines_are_those_of_each_file(tmp_path):
    write(tmp_path / "common" / "root.yaml", "steps: 5\nseed: 1\noptim: {lr: 0.5, warmup: 1}\n")
    write(tmp_path / "common" / "mid.yaml", "base: root.yaml\nseed: 2\noptim:\n  lr: 0.25\n")
    path = write(tmp_path / "runs" / "top.yaml", "base: ../common/mid.yaml\nname: top\n")
    got = config(path, "optim.clip=2")
    assert (got.name, got.steps, got.seed) == ("top", 5, 2)
    assert (got.optim.lr, got.optim.warmup, got.optim.clip) == (0.25, 1, 2.0)
    write(tmp_path / "common" / "root.yaml", "steps: 5\nseeed: 1\n")
    [line] = mistakes(path)
    assert re.search(r'seeed: unknown key \(did you mean "seed"\?\) \(.*root\.yaml:2\)', line)


def test_a_mapping_replaces_the_one_below_it(tmp_path):
    write(tmp_path / "base.yaml", "data: {sources: {a: 1, b: 1}}\n")
    path = write(tmp_path / "c.yaml", "base: base.yaml\ndata:\n  sources:\n    c: 2\n")
    assert config(path).data.sources == {"c": 2.0}  # neither the base's nor the default
    assert config(path, "data.sources={d: 1}").data.sources == {"d": 1.0}
    assert config(path, "data.sources.d=1").data.sources == {"c": 2.0, "d": 1.0}
    assert config(path, "data.sources.c=3").data.sources == {"c": 3.0}
    given = ("data.sources.a=1", "data.sources={b: 1}", "data.sources.a=2")
    assert config(*given).data.sources == {"b": 1.0, "a": 2.0}


def test_the_later_word_on_an_optional_group_wins(tmp_path):
    path = write(tmp_path / "c.yaml", "logging: {wandb: {project: p, tags: [1e3, on]}}\n")
    assert config(path).logging.wandb == Wandb("p", ["1e3", "on"])
    assert config(path, "logging.wandb=null").logging.wandb is None
    null = write(tmp_path / "n.yaml", "base: c.yaml\nlogging: {wandb: null}\n")
    assert config(null).logging.wandb is None
    assert config(null, "logging.wandb.project=q").logging.wandb == Wandb("q")
    assert config("eval={}").eval == Benchmarks()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2\n", "c.yaml:2: is not valid YAML: "),
        ("a: 1\n\tb: 2\n", "c.yaml:2: is not valid YAML: "),
        ("steps: 1\nseed: 1\nsteps: 2\n",
         'c.yaml:3: key "steps" is given twice; first at '),
        ("- 1\n", "c.yaml: must hold lines `key: value`, not [1]"),
        ("seed: 1\nname: !!!CHANGE_THIS!!!\n", "name: must be given ("),
        ("seed: 1\nname: !!!CHANGE_THIS!!!\n", "c.yaml:2)"),
        ("name: &a [*a]\n", "c.yaml:1: has more than 50 levels, aliases included"),
        ("a: " + 400 * "[" + 400 * "]", "c.yaml:1: has more than 50 levels"),
        ("a: " + 1000 * "[" + 1000 * "]", "c.yaml: has more than 50 levels"),
        ('name: "a\\0b"\n', r"c.yaml:1: 'a\x00b': must be text of UTF-8 without NUL"),
        ('base: "a\\ud800b"\n', "must be text of UTF-8 without NUL"),
        (f"base: {300 * 'a'}\n", ": cannot be read: File name too long"),
        ("steps: !odd 3\n", "c.yaml:1: the YAML tag !odd is not supported"),
        ("name: !!python/name:os.system\n", "os.system is not supported"),
        ("? [1]\n: 2\n", "c.yaml:1: a key must be a word"),
        ("base: gone.yaml\n", "c.yaml:1: base = "),
        ("base: [x]\n", "c.yaml:1: base = [\"x\"]: must be the path of a YAML file"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named_with_its_line(tmp_path, text, message):
    assert any(message in line for line in mistakes(write(tmp_path / "c.yaml", text)))


def test_a_circle_of_bases_is_shown(tmp_path):
    path = write(tmp_path / "a.yaml", "base: b.yaml\n")
    write(tmp_path / "b.yaml", "seed: 1\nbase: ./a.yaml\n")
    [line] = mistakes(path)
    assert "b.yaml:2: base = ./a.yaml: the files form a circle:" in line


def test_files_that_cannot_be_read(tmp_path):
    write(tmp_path / "debug.yaml", "")
    [line] = mistakes(f"config={tmp_path}/debugg.yaml")
    assert line.endswith('cannot be read: No such file or directory (did you mean "debug.yaml"?)')
    (tmp_path / "folder.yaml").mkdir()
    [line] = mistakes(f"config={tmp_path}/folder.yaml")
    assert line.endswith("folder.yaml: must be a file")
    os.mkfifo(tmp_path / "fifo")
    [line] = mistakes(f"config={tmp_path}/fifo")
    assert line.endswith("fifo: must be a file")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    [line] = mistakes(f"config={tmp_path}/latin.yaml")
    assert "is not UTF-8 text (byte 9)" in line


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
    assert classes["optim.lr"] == "announced"
    assert classes["data.sources"] == "guarded"
    assert classes["checkpoint.dump.keep"] == "free"
    for made in (config(), config("logging.wandb.project=p")):
        assert set(flatten(made)) <= set(classes)
    assert None not in classes.values()

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
    assert refused(seed) == "seed: unknown key (command line)"
    write(tmp_path / "c.yaml", "data: {seq_le: 8}\n")
    refused(lambda: load(Part, [path], meta_lingua, partial=True), 'did you mean "data.seq_len"')
