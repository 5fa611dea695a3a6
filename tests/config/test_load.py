"""What a user may write in a config or on the command line, and the message of each mistake."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from lingua.checkpoint.resume import flat_config
from lingua.config.load import Foreign, flatten, load, read_saved, resume_classes, to_yaml
from lingua.config.meta_lingua import META_LINGUA
from lingua.config.schema import Announced, Free, Guarded
from lingua.errors import UserError

pytestmark = pytest.mark.quick


@dataclass
class Optim:
    lr: Announced[float] = 1e-3
    name: Guarded[Literal["adamw", "muon"]] = "adamw"
    clip: Announced[float | None] = 1.0
    warmup: Announced[int] = 10
    ratios: Announced[list[float]] = field(default_factory=lambda: [1.0])

    def validate(self) -> Iterator[tuple[str, str]]:
        if self.lr < 0:
            yield "lr", "must be at least 0"


@dataclass
class Stage:
    from_step: Guarded[int]
    sources: Guarded[dict[str, float]] = field(default_factory=dict)

    def validate(self) -> Iterator[tuple[str, str]]:
        if self.from_step < 0:
            yield "from_step", "must be at least 0"


@dataclass
class SourceFiles:
    files: Free[list[str]] = field(default_factory=list)

    def validate(self) -> Iterator[tuple[str, str]]:
        if "" in self.files:
            yield "files", "must not hold an empty text"


@dataclass
class Data:
    root_dir: Free[str] = "data"
    sources: Guarded[dict[str, float]] = field(default_factory=lambda: {"stdlib": 1.0})
    source_files: Free[dict[str, SourceFiles]] = field(default_factory=dict)
    stages: Guarded[list[Stage]] = field(default_factory=list)
    seq_len: Guarded[int] = 128

    def validate(self) -> Iterator[tuple[str, str]]:
        for name, weight in self.sources.items():
            if weight <= 0:
                yield f"sources.{name}", "must be above 0"


@dataclass
class Distributed:
    dp_replicate: Free[int | None] = 1
    dp_shard: Free[int | None] = None
    compile: Announced[bool] = False
    activation_checkpointing: Announced[Literal["none", "full", "selective"]] = "none"


@dataclass
class Model:
    dim: Guarded[int] = 64
    n_heads: Guarded[int | None] = None

    def validate(self) -> Iterator[tuple[str, str]]:
        if self.dim < 1:
            yield "dim", "must be at least 1"


@dataclass
class Every:
    every: Free[int] = 100
    keep: Free[int] = 1


@dataclass
class Checkpoint:
    dump: Every = field(default_factory=Every)
    eval: Every = field(default_factory=lambda: Every(every=500))


@dataclass
class Benchmarks:
    tasks: Free[list[str]] = field(default_factory=list)


@dataclass
class Wandb:
    project: Free[str]
    tags: Free[list[str]] = field(default_factory=list)


@dataclass
class Logging:
    freq: Free[int] = 10
    wandb: Free[Wandb | None] = None


@dataclass
class Config:
    name: Free[str] = "run"
    dump_dir: Free[str | None] = None
    steps: Announced[int] = 1000
    seed: Guarded[int] = 42
    optim: Optim = field(default_factory=Optim)
    data: Data = field(default_factory=Data)
    distributed: Distributed = field(default_factory=Distributed)
    model: Model = field(default_factory=Model)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    logging: Logging = field(default_factory=Logging)
    eval: Free[Benchmarks | None] = None

    def validate(self) -> Iterator[tuple[str, str]]:
        if self.optim.warmup > self.steps:
            yield "optim.warmup", f"must be at most steps = {self.steps}"


def config(*argv: str) -> Config:
    return load(Config, list(argv))[0]


def mistakes(*argv: str, foreign: Foreign | None = None) -> list[str]:
    """The lines of the error, without the heading that counts them."""
    with pytest.raises(UserError) as caught:
        load(Config, list(argv), foreign)
    lines = str(caught.value).split("\n  ")
    return lines if len(lines) == 1 else lines[1:]


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return f"config={path}"


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


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("steps=1.5", "steps = 1.5: must be a whole number"),
        ("steps=1e30", "steps = 1e30: must be a whole number"),
        ("seed=true", "seed = true: must be a whole number"),
        ("distributed.dp_shard=x", 'distributed.dp_shard = "x": must be a whole number, or null'),
        ("optim.lr=abc", 'optim.lr = "abc": must be a number'),
        ("optim.lr=.nan", "optim.lr = .nan: must be a number"),
        ("steps=" + 5000 * "9", "999...: must be a whole number"),
        ("seed=0x" + 5000 * "f", "fff...: must be a whole number"),
        ("seed=9223372036854775808", "seed = 9223372036854775808: must be a whole number"),
        ("name=a\0b", r"argument 'name=a\x00b': must be text of UTF-8 without NUL"),
        ("name=\udcff", r"argument 'name=\udcff': must be text of UTF-8 without NUL"),
        ("config=" + 300 * "x", "xxx: cannot be read: File name too long"),
        ("config=", "config=: must be a file"),
        (300 * "a." + "b=1", "a.a...: unknown key"),
        ("optim.lr=", "optim.lr = null: must be a number"),
        ("distributed.compile=1", "distributed.compile = 1: must be true or false"),
        ("name=null", "name = null: must be text"),
        ("optim.ratios=1", "optim.ratios = 1: must be a list of float such as [a, b]"),
        (
            "optim.name=adam",
            'optim.name = "adam": must be adamw or muon (did you mean "adamw"?)',
        ),
        ("optim=3", "optim = 3: must be a group of keys (lr, name, clip,"),
        ("optim=???", "optim: must be given (command line)"),
        ("name='!!!CHANGE_THIS!!!'", "name: must be given (command line)"),
        ("steps=" + 200 * "x", "xxx...: must be a whole number"),
        ("data.sources=[1]", "data.sources = [1]: must be a mapping of float such as {a: 1, b: 2}"),
        ("data.sources={a: x}", 'data.sources.a = "x": must be a number'),
        ("data.stages=3", "data.stages = 3: must be a list of Stage such as [a, b]"),
        ("data.stages=[{from_stp: 1}]", 'did you mean "data.stages[0].from_step"?'),
        ("data.stages=[{sources: {}}]", "data.stages[0].from_step: must be given"),
        ("optim.warmup=2_000", "optim.warmup = 2_000: must be at most steps = 1000"),
        ("steps=5", "optim.warmup = 10: must be at most steps = 5 (the default)"),
        ("logging.wandb.tags=[a]", "logging.wandb.project: must be given"),
    ],
)
def test_a_wrong_value_is_refused_by_name_with_what_is_allowed(argument, message):
    assert any(message in line for line in mistakes(argument))


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("stpes=1", 'did you mean "steps"?'),
        ("optim.lrr=1", 'did you mean "optim.lr"?'),
        ("lr=1", 'did you mean "optim.lr"?'),
        ("optin.lr=1", 'did you mean "optim.lr"?'),
        ("modle.dmi=1", 'did you mean "model.dim"?'),
        ("logging.zzz=1", "; logging has the keys freq, wandb"),
        ("steps.x=1", "steps.x: unknown key"),
    ],
)
def test_unknown_key_names_the_nearest_one(argument, hint):
    [line] = mistakes(argument)
    assert line.startswith(f"{argument.partition('=')[0]}: unknown key")
    assert hint in line


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
    with pytest.raises(UserError) as caught:
        config(path)
    lines = str(caught.value).splitlines()
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


# ---- references


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["name=run_${seed}"], "name", "run_42"),
        (["name=run_${steps}", "steps=1e3"], "name", "run_1000"),
        (["optim.lr=${seed}"], "optim.lr", 42.0),
        (["optim.warmup=${.lr}", "optim.lr=1"], "optim.warmup", 1),
        (["seed=${steps}", "steps=${optim.warmup}"], "seed", 10),
        (["data.sources={a: '${seed}', b: 1}"], "data.sources", {"a": 42.0, "b": 1.0}),
        (["data.sources.a=${seed}"], "data.sources", {"stdlib": 1.0, "a": 42.0}),
        (["checkpoint.eval=${checkpoint.dump}"], "checkpoint.eval.every", 100),
        (["checkpoint.eval=${checkpoint.dump}", "checkpoint.eval.keep=4"], "checkpoint.eval.keep",
         4),
        (["logging.wandb.project=${name}"], "logging.wandb.project", "run"),
        (["name=${oc.env:LINGUA_TEST}"], "name", "of the environment"),
        (["name=${oc.env:NOT_SET,a b}"], "name", "a b"),
        (["dump_dir=${oc.env:NOT_SET,null}"], "dump_dir", None),
        (["data.seq_len=${optim.ratios[0]}"], "data.seq_len", 1),
    ],
)  # fmt: skip
def test_a_reference_stands_for_the_value_of_another_key(monkeypatch, arguments, key, value):
    monkeypatch.setenv("LINGUA_TEST", "of the environment")
    made = config(*arguments)
    assert flatten(made)[key] == value
    assert made.checkpoint.dump == Every()  # what is referred to stays


def test_every_wrong_reference_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("DOLLAR", "${seed}")
    found = mistakes("name=${nope}", "seed=${name}", "data.root_dir=${", r"dump_dir=\${seed}",
                     "optim.warmup=${data.sources}", "eval=${gone}", "steps=${data.seq_len.x}",
                     "optim.lr=${optim.clip}", "optim.clip=${.lr}", "optim.name=${oc.env:NOT_SET}",
                     "data.seq_len=${oc.env:DOLLAR}")  # fmt: skip
    for start in (
        'name = "${nope}": there is no key "nope" (command line)',
        'seed = "${name}": there is no key "nope"',
        'data.root_dir = "${": must not contain ${ besides the references ',
        r'dump_dir = "\\${seed}": must not contain ${ besides',
        'optim.warmup = {"stdlib": 1.0}: must be a whole number (command line)',
        'eval = "${gone}": there is no key "gone"',
        'steps = "${data.seq_len.x}": there is no key "data.seq_len.x"',
        'optim.lr = "${optim.clip}": must not refer to itself',
        'optim.clip = "${.lr}": must not refer to itself',
        'optim.name = "${oc.env:NOT_SET}": the environment variable NOT_SET is not set',
        'data.seq_len = "${oc.env:DOLLAR}": must not contain ${ besides',
    ):
        assert [line for line in found if line.startswith(start)], start
    assert len(found) == 11


def test_references_that_would_grow_without_end_are_refused_at_once(tmp_path):
    sources = "data:\n  source_files:\n"
    for i in range(30):  # two to the power of 30 values
        sources += f"    a{i}: {{files: ['${{data.source_files.a{i + 1}.files}}', x]}}\n"
    [line] = mistakes(write(tmp_path / "c.yaml", sources))
    assert "must not refer to itself, nor through 20 other keys" in line
    long = mistakes("name=" + "${dump_dir}" * 50, "dump_dir=" + "${data.root_dir}" * 50,
                    "data.root_dir=" + "x" * 50, "steps=" + "${seed}" * 20_000)  # fmt: skip
    assert len(long) == 2
    assert "name" in long[0] and "must stand for at most 10,000 characters" in long[0]
    assert "steps" in long[1] and "must have at most 10,000 characters" in long[1]


def test_a_secret_of_the_environment_is_only_written_where_that_is_asked_for(monkeypatch):
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "wandb_api_key"):
        monkeypatch.setenv(name, "hf_secret")
        [line] = mistakes(f"name=${{oc.env:{name}}}")
        assert f"{name} looks like a secret, which config.yaml" in line and "hf_secret" not in line
        assert config(f"name=${{oc.env.secret:{name}}}").name == "hf_secret"
    for name in ("USER_NAME", "TOKENIZER", "MAX_TOKENS_", "KEYBOARD"):
        monkeypatch.setenv(name, "x")
        assert config(f"name=a ${{oc.env:{name}}}").name == "a x"


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


BOMB = "a: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"b{i}: &a{i} [{', '.join(9 * [f'*a{i - 1}'])}]\n" for i in range(1, 9)
)


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
        ("name: &a [*a]\n", "c.yaml:1: has more than 10,000 values or 50 levels, aliases included"),
        (BOMB, "has more than 10,000 values or 50 levels"),
        ("a: " + 400 * "[" + 400 * "]", "has more than 10,000 values or 50 levels"),
        ("a: " + "x" * 600_000, "c.yaml: has more than 524,288 bytes"),
        ('name: "a\\0b"\n', r"c.yaml:1: 'a\x00b': must be text of UTF-8 without NUL"),
        ('base: "a\\ud800b"\n', "must be text of UTF-8 without NUL"),
        (f"base: {300 * 'a'}\n", "aaa...: cannot be read: File name too long"),
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
    for i in range(30):
        write(tmp_path / f"{i}.yaml", f"base: {i + 1}.yaml\n")
    [line] = mistakes(f"config={tmp_path}/0.yaml")
    assert line.endswith("20.yaml:1: base: more than 20 files are laid over each other")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    [line] = mistakes(f"config={tmp_path}/latin.yaml")
    assert "is not UTF-8 text (byte 9)" in line
    twice = mistakes(f"config={tmp_path}/debug.yaml", f"config={tmp_path}/debug.yaml")
    assert "config is given twice" in twice[0]
    [line] = mistakes("debug.yaml")
    assert 'did you mean "config=debug.yaml"?' in line


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
    args, notices = load(Part, [path], META_LINGUA, partial=True)
    assert (args.data.seq_len, notices) == (8, [])
    with pytest.raises(UserError, match=r"^seed: unknown key \(command line\)$"):
        load(Part, [path, "seed=1"], META_LINGUA, partial=True)
    write(tmp_path / "c.yaml", "data: {seq_le: 8}\n")
    with pytest.raises(UserError, match=r'did you mean "data\.seq_len"'):
        load(Part, [path], META_LINGUA, partial=True)


def test_reading_a_config_imports_neither_torch_nor_omegaconf(tmp_path):
    path = write(tmp_path / "c.yaml", "name: x\n")
    program = (
        "import sys; from dataclasses import make_dataclass; from lingua.config.load import load; "
        f"load(make_dataclass('C', [('name', str)]), [{path!r}]); "
        "print([m for m in ('torch', 'omegaconf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


# ---- the config of a checkpoint


def test_a_saved_config_is_read_as_data(tmp_path):
    @dataclass
    class Use:
        name: str = "?"
        model: Model = field(default_factory=Model)
        data: Data = field(default_factory=Data)
        optim: Optim = field(default_factory=lambda: Optim(warmup=3))

    text = to_yaml(config("model.dim=8", "data.stages=[{from_step: 5}]"))
    text = text.replace("name: run", "name: ${oc.env:HOME}").replace("warmup: 10", "unknown: 1")
    write(tmp_path / "c.yaml", "base: gone.yaml\n" + text)
    got = read_saved(Use, tmp_path / "c.yaml")
    assert got.name == "${oc.env:HOME}"  # and the keys and groups that Use lacks are ignored
    assert (got.model, got.data.stages) == (Model(8), [Stage(5)])
    assert got.optim.warmup == 3


def test_values_of_a_foreign_config_stay_text(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    text = "base: /etc/passwd\nname: ${oc.env:HF_TOKEN}\noptim: {lr: '${oc.env:HF_TOKEN}'}\n"
    write(tmp_path / "c.yaml", text)
    literal = "${oc.env:HF_TOKEN}"
    keys = ["base", "name", "optim", "optim.lr", "name.x", "steps"]
    assert flat_config(tmp_path / "c.yaml", keys) == {
        "base": "/etc/passwd", "name": literal, "optim": {"lr": literal}, "optim.lr": literal,
    }  # fmt: skip


def test_mistakes_in_a_saved_config_name_file_line_and_key(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")

    @dataclass
    class Tokens:
        seq_len: int

    @dataclass
    class Use:
        data: Tokens
        model: Model = field(default_factory=Model)
        optim: Optim = field(default_factory=Optim)

    def refused(text: str) -> str:
        write(tmp_path / "c.yaml", text)
        with pytest.raises(UserError) as caught:
            read_saved(Use, tmp_path / "c.yaml")
        assert "somebody" not in str(caught.value)
        return str(caught.value).replace(str(tmp_path), "")

    data = "data: {seq_len: 8, other: 1}\n"
    assert refused(data + "model:\n  dmi: 8\n") == (
        'model.dmi: unknown key (did you mean "model.dim"?) (/c.yaml:3)'
    )
    assert refused("data: {seq_len: '${oc.env:HOME}'}\nmodel: {dim: x}\n").splitlines()[1:] == [
        '  data.seq_len = "${oc.env:HOME}": must be a whole number (/c.yaml:1)',
        '  model.dim = "x": must be a whole number (/c.yaml:2)',
    ]
    assert refused("data: {}\n") == "data.seq_len: must be given (/c.yaml)"
    assert refused("data: [\n").startswith("/c.yaml:2: is not valid YAML: ")
    # Of its groups, only the model is validated.
    wrong = data + "model: {dim: 0}\noptim: {lr: -1}\n"
    assert refused(wrong) == "model.dim = 0: must be at least 1 (/c.yaml:2)"
    with pytest.raises(UserError, match=r"gone\.yaml: cannot be read: No such file"):
        read_saved(Use, tmp_path / "gone.yaml")


# ---- keys of Meta Lingua's configs


def lingua(tmp_path: Path, text: str, *argv: str) -> Config:
    return load(Config, [write(tmp_path / "c.yaml", text), *argv], META_LINGUA)[0]


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
    with pytest.raises(UserError, match=r'fsdp_type = .*: must be "full_shard" or "no_shard"'):
        sizes("fsdp_type: hybrid")


def test_lingua_checkpointing_becomes_a_choice(tmp_path):
    for given, ours in (("true", "selective"), ("false", "none"), ("no", "none")):
        text = f"distributed: {{selective_activation_checkpointing: {given}}}\n"
        assert lingua(tmp_path, text).distributed.activation_checkpointing == ours


def test_lingua_seeds_must_agree(tmp_path):
    assert lingua(tmp_path, "seed: 7\nmodel: {seed: 7}\ndata: {seed: 7}\n").seed == 7
    with pytest.raises(UserError, match=r"data\.seed = 8: must equal seed = 7, or be left out"):
        lingua(tmp_path, "seed: 7\ndata: {seed: 8}\n")
    with pytest.raises(UserError, match=r"model\.seed = 8: must equal seed = 42"):
        lingua(tmp_path, "model: {seed: 8}\n")


def test_lingua_keys_that_would_change_the_run_are_refused(tmp_path):
    neutral = "detect_anomaly: false, float8_recipe: null, spawn_method: forkserver"
    assert lingua(tmp_path, f"distributed: {{{neutral}}}\n") == Config()
    assert lingua(tmp_path, "distributed: {float8_recipe: x}\n", "distributed.float8_recipe=null")
    with pytest.raises(UserError, match=r'float8_recipe = "rowwise": must be null'):
        lingua(tmp_path, "distributed: {float8_recipe: rowwise}\n")


def test_a_key_of_ours_comes_before_the_foreign_table():
    table = Foreign(ignored={"optim": "never", "steps": "never", "odd": "old"})
    got, notices = load(Config, ["steps=5", "odd.a=1", "odd.b=2", "optim.warmup=1"], table)
    assert (got.steps, got.optim.warmup) == (5, 1)
    assert notices == ["odd has no effect here: old (command line)"]
    lines = mistakes("optim.lrr=1", foreign=Foreign())
    assert lines[0].startswith("optim.lrr: unknown key")
