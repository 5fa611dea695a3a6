"""What a user may write in a config or on the command line, and what a mistake is answered with."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from lingua.config.help import field_comments, help_text
from lingua.config.load import Foreign, flatten, load, resume_classes, to_yaml
from lingua.config.meta_lingua import META_LINGUA
from lingua.config.schema import Announced, Free, Guarded
from lingua.errors import UserError


@dataclass
class Optim:
    lr: Announced[float] = 1e-3  # peak learning rate
    # share of the peak
    # that remains at the end
    lr_min_ratio: Announced[float] = 0.1
    name: Guarded[Literal["adamw", "muon"]] = "adamw"
    clip: Announced[float | None] = 1.0  # largest norm of the gradient
    weight_decay: Announced[float] = 0.1
    warmup: Announced[int] = 10

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
class Tokenizer:
    name: Guarded[str] = "bytes"
    path: Guarded[str | None] = None


@dataclass
class Data:
    root_dir: Free[str] = "data"
    sources: Guarded[dict[str, float]] = field(default_factory=lambda: {"stdlib": 1.0})  # shares
    stages: Guarded[list[Stage]] = field(default_factory=list)
    seq_len: Guarded[int] = 128
    batch_size: Free[int] = 2
    n_views: Guarded[int] = 2
    add_bos: Guarded[bool] = True
    add_eos: Guarded[bool] = True
    tokenizer: Tokenizer = field(default_factory=Tokenizer)

    def validate(self) -> Iterator[tuple[str, str]]:
        for name, weight in self.sources.items():
            if weight <= 0:
                yield f"sources.{name}", "must be above 0"


@dataclass
class Distributed:
    dp_replicate: Free[int | None] = 1
    dp_shard: Free[int | None] = None
    tp_size: Free[int] = 1
    compile: Announced[bool] = False
    model_dtype: Announced[Literal["bf16", "fp32"]] = "bf16"
    matmul_allow_tf32: Announced[bool] = False
    activation_checkpointing: Announced[Literal["none", "full", "selective"]] = "none"


@dataclass
class Model:
    dim: Guarded[int] = 64
    n_layers: Guarded[int] = 2
    n_heads: Guarded[int | None] = None
    rope_theta: Guarded[float] = 10000.0


@dataclass
class Profiling:
    run: Free[bool] = False
    mem_warmup: Free[int] = 0
    mem_steps: Free[int] = 2
    profile_warmup: Free[int] = 10
    profile_steps: Free[int] = 2


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
    name: Free[str] = "run"  # of the run
    dump_dir: Free[str | None] = None
    steps: Announced[int] = 1000
    seed: Guarded[int] = 42
    grad_acc_steps: Free[int | None] = None
    optim: Optim = field(default_factory=Optim)  # the optimizer
    data: Data = field(default_factory=Data)
    distributed: Distributed = field(default_factory=Distributed)
    model: Model = field(default_factory=Model)
    profiling: Profiling = field(default_factory=Profiling)
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
        ("name=run_${seed}", "name", "run_42"),
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
        ("optim.lr=.nan", "optim.lr = .nan: must be a number, not nan"),
        ("optim.lr=", "optim.lr = null: must be a number"),
        ("distributed.compile=1", "distributed.compile = 1: must be true or false"),
        ("name=null", "name = null: must be text, not null"),
        (
            "optim.name=adam",
            'optim.name = "adam": must be adamw or muon (did you mean "adamw"?)',
        ),
        ("optim=3", "optim = 3: is a group of keys (lr, lr_min_ratio, name, clip,"),
        ("data.sources=[1]", "data.sources = [1]: must be a mapping of float such as {a: 1, b: 2}"),
        ("data.sources={a: x}", 'data.sources.a = "x": must be a number'),
        ("data.stages=3", "data.stages = 3: must be a list of Stage such as [a, b]"),
        ("data.stages=[{from_stp: 1}]", 'did you mean "data.stages[0].from_step"?'),
        ("data.stages=[{sources: {}}]", "data.stages[0].from_step: must be given"),
        ("data.stages=[{from_step: -1}]", "data.stages[0].from_step = -1: must be at least 0"),
        ("data.sources.a=-2", "data.sources.a = -2: must be above 0"),
        ("optim.lr=-1", "optim.lr = -1: must be at least 0"),
        ("optim.warmup=2_000", "optim.warmup = 2_000: must be at most steps = 1000"),
        ("name=${nope}", "name = \"${nope}\": Interpolation key 'nope' not found"),
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
    # `optim` itself is sound, so its ranges are judged although other groups have mistakes
    assert f"optim.lr = -1: must be at least 0 ({file}:5)" in lines
    assert "distributed.compile = 2: must be true or false (command line)" in lines
    assert any(line.startswith('argument "oops": must have the form key=value') for line in lines)
    assert any(line.startswith('argument "-x=1"') for line in lines)
    assert len(lines) == 6


def test_a_mistake_does_not_cause_a_second_false_one():
    # warmup 500 fits the steps meant; the default in place of the mistyped value must not judge it
    assert mistakes("steps=6OO", "optim.warmup=1500") == [
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


def test_the_later_word_on_an_optional_group_wins(tmp_path):
    path = write(tmp_path / "c.yaml", "logging: {wandb: {project: p, tags: [1e3, on]}}\n")
    assert config(path).logging.wandb == Wandb("p", ["1e3", "on"])
    assert config(path, "logging.wandb=null").logging.wandb is None
    null = write(tmp_path / "n.yaml", "logging: {wandb: null}\n")
    assert config(null, "logging.wandb.project=q").logging.wandb == Wandb("q")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2\n", "c.yaml:2: is not valid YAML: "),
        ("a: 1\n\tb: 2\n", "c.yaml:2: is not valid YAML: "),
        ("steps: 1\nseed: 1\nsteps: 2\n",
         'c.yaml:3: key "steps" is given twice; it already stands in line 1'),
        ("- 1\n", "c.yaml: must hold lines `key: value`, not [1]"),
        ("name: &a [*a]\n", "c.yaml:1: an anchor contains itself"),
        ("name: !tuple [1]\nsteps: !odd 3\n", "c.yaml:2: the YAML tag !odd is not supported"),
        ("base: gone.yaml\n", "c.yaml:1: base = "),
        ("base: [x]\n", "c.yaml:1: base = [\"x\"]: must be the path of a YAML file"),
        ("base: c.yaml\n", "the files lead in a circle"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named_with_its_line(tmp_path, text, message):
    assert any(message in line for line in mistakes(write(tmp_path / "c.yaml", text)))


def test_a_circle_of_bases_is_shown(tmp_path):
    path = write(tmp_path / "a.yaml", "base: b.yaml\n")
    write(tmp_path / "b.yaml", "seed: 1\nbase: ./a.yaml\n")
    [line] = mistakes(path)
    assert "b.yaml:2: base = ./a.yaml: the files lead in a circle:" in line


def test_files_that_cannot_be_read(tmp_path):
    write(tmp_path / "debug.yaml", "")
    [line] = mistakes(f"config={tmp_path}/debugg.yaml")
    assert line.endswith('cannot be read: No such file or directory (did you mean "debug.yaml"?)')
    [line] = mistakes(f"config={tmp_path}")
    assert "cannot be read: Is a directory" in line
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    [line] = mistakes(f"config={tmp_path}/latin.yaml")
    assert "is not UTF-8 text (byte 9)" in line
    assert mistakes("config=a.yaml", "config=b.yaml")[-1].startswith("config is given 2 times")
    [line] = mistakes("debug.yaml")
    assert 'did you mean "config=debug.yaml"?' in line


def test_an_empty_file_and_yaml_merge_keys_work(tmp_path):
    assert config(write(tmp_path / "e.yaml", "# nothing\n")) == Config()
    path = write(
        tmp_path / "m.yaml",
        "checkpoint:\n  dump: &d {every: 7, keep: 3}\n  eval:\n    <<: *d\n    keep: 4\n",
    )
    got = config(path).checkpoint
    assert (got.dump, got.eval) == (Every(7, 3), Every(7, 4))


def test_yaml_written_from_a_config_loads_as_the_same_config(tmp_path):
    first = config(
        "name=1e3", "optim.lr=1e-7", "optim.clip=null", "data.sources={a.b: 1, on: 2}",
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


def test_comments_beside_and_above_a_field_are_found():
    comments = field_comments(Optim)
    assert comments["lr"] == "peak learning rate"
    assert comments["lr_min_ratio"] == "share of the peak that remains at the end"
    assert "name" not in comments  # a comment of the field above or below is not its own

    @dataclass
    class Odd(Optim):
        tag: Free[str] = "# no comment"
        long: Free[dict[str, float]] = field(
            default_factory=dict,
        )  # behind the bracket
        # of two lines

        # not this one: a blank line is between

        last: Free[int] = 3

    odd = field_comments(Odd)
    assert odd["lr"] == "peak learning rate"
    assert odd["long"] == "behind the bracket"
    assert "tag" not in odd
    assert "last" not in odd


def test_a_class_without_source_has_help_without_comments():
    made = dataclass(type("Made", (), {"__annotations__": {"a": Free[int]}, "a": 1}))
    assert field_comments(made) == {}
    assert re.search(r"a +1 +free +int", help_text(made, 80))


@pytest.mark.parametrize("width", [60, 80, 140])
def test_help_lists_every_key_within_the_width(width):
    text = help_text(Config, width)
    lines = text.splitlines()
    for key in resume_classes(Config):
        if key not in ("logging.wandb", "eval"):  # groups: their keys are listed
            assert any(re.match(rf"  {re.escape(key)}\s", line) for line in lines), key
    assert max(map(len, lines)) <= width
    assert "optim: the optimizer" in lines
    assert re.search(r"optim\.lr +0\.001 +announced +float\n +peak learning rate\n", text)
    assert re.search(r"checkpoint\.eval\.every +500 +free +int", text)  # the default of this place
    assert re.search(r"logging\.wandb\.project +\(required\) +free +str", text)


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_is_printed_and_nothing_else_happens(flag, capsys):
    with pytest.raises(SystemExit) as caught:
        load(Config, ["config=missing.yaml", flag])
    assert caught.value.code == 0
    assert "optim.lr" in capsys.readouterr().out


# ---- Meta Lingua's configs

LINGUA_DEBUG = """\
dump_dir: !!!CHANGE_THIS!!!
name: "debug"
steps: 1000
probe_freq: null
seed: 777
optim:
    lr: 3e-4
    warmup: 200
    lr_min_ratio: 0.000001
    clip: 10.0
distributed:
    fsdp_type: full_shard
    compile: true
    model_dtype: bf16
    matmul_allow_tf32: false
    selective_activation_checkpointing: false
    tp_size: 1
model:
    dim: 1024
    n_layers: 8
    n_heads: 8
data:
    root_dir: !!!CHANGE_THIS!!!
    sources:
        fineweb_edu_10bt_shuffled: 100.0
    batch_size: 32
    prefetch_size: 64
    seq_len: 1024
    n_views: 2
    load_async: true
    tokenizer:
        name: bytes
profiling:
    run: true
checkpoint:
    dump:
        every: 100
        keep: 1
    eval:
        every: 100
        keep: 1
logging:
    freq: 10
eval:
    generator:
        max_tokens: 8192
        dtype: bf16
    harness:
        tasks:
            - hellaswag
            - task: nq_open
              num_fewshot: 5
"""

LINGUA_BIG = """\
dump_dir: !!!CHANGE_THIS!!!
name: large_lm
steps: 60_000
probe_freq: null
seed: 777
optim:
    lr: 3e-3
    weight_decay: 0.033
    warmup: 5000
    lr_min_ratio: 0.000001
    clip: 1.0
distributed:
    fsdp_type: full_shard
    compile: true
    model_dtype: bf16
    matmul_allow_tf32: false
    selective_activation_checkpointing: {selective}
    tp_size: 1
model:
    dim: 2048
    n_layers: 25
    n_heads: 16
    rope_theta: 10000.0
data:
    root_dir: !!!CHANGE_THIS!!!
    sources:
        dclm_baseline_1.0_shuffled: 100.0
    batch_size: 4
    prefetch_size: 1024
    seq_len: 4096
    n_views: 2
    load_async: true
    add_bos: true
    add_eos: true
    tokenizer:
        name: tiktoken
        path: !!!CHANGE_THIS!!!
profiling:
    run: true
    mem_warmup: 0
    mem_steps: 4
    profile_warmup: 100
    profile_steps: 4
checkpoint:
    dump:
        every: 2500
        keep: 3
    eval:
        every: 5000
        keep: -1
logging:
    freq: 1
async_eval_gpus: 8
eval:
    harness: null
    validation:
        max_steps: 1000
"""

PATHS = ["dump_dir=/runs/x", "data.root_dir=/data"]


def test_lingua_debug_config_loads_with_only_paths_overridden(tmp_path):
    path = write(tmp_path / "debug.yaml", LINGUA_DEBUG)
    got, notices = load(Config, [path, *PATHS], META_LINGUA)
    assert (got.seed, got.optim.lr, got.data.seq_len) == (777, 3e-4, 1024)
    assert got.distributed == Distributed(compile=True)
    assert [n.split()[0] for n in notices] == [
        "probe_freq", "data.prefetch_size", "data.load_async",
        "eval.generator", "eval.harness",
    ]  # fmt: skip
    assert notices[0].endswith(f"({tmp_path / 'debug.yaml'}:4)")


@pytest.mark.parametrize(("selective", "ours"), [("false", "none"), ("true", "selective")])
def test_lingua_1b_and_7b_configs_load_with_only_paths_overridden(tmp_path, selective, ours):
    path = write(tmp_path / "big.yaml", LINGUA_BIG.replace("{selective}", selective))
    got, notices = load(Config, [path, *PATHS, "data.tokenizer.path=/t.model"], META_LINGUA)
    assert got.data.sources == {"dclm_baseline_1.0_shuffled": 100.0}
    assert (got.steps, got.checkpoint.eval.keep) == (60000, -1)
    assert got.distributed.activation_checkpointing == ours
    assert len(notices) == 6
    assert got.eval is None


def test_a_path_left_to_be_changed_is_asked_for_by_name(tmp_path):
    path = write(tmp_path / "debug.yaml", LINGUA_DEBUG)
    lines = mistakes(path, foreign=META_LINGUA)
    file = tmp_path / "debug.yaml"
    assert lines == [
        f"dump_dir: must be given ({file}:1)",
        f"data.root_dir: must be given ({file}:23)",
    ]


def lingua(tmp_path: Path, text: str, *argv: str) -> Config:
    return load(Config, [write(tmp_path / "c.yaml", text), *argv], META_LINGUA)[0]


def test_lingua_fsdp_types_become_mesh_sizes(tmp_path):
    def sizes(text: str, *argv: str) -> tuple[Any, Any]:
        got = lingua(tmp_path, f"distributed: {{{text}}}\n", *argv).distributed
        return got.dp_replicate, got.dp_shard

    assert sizes("fsdp_type: full_shard") == (1, None)
    assert sizes("fsdp_type: no_shard") == (None, 1)
    assert sizes("fsdp_type: full_shard, dp_shard: 4, dp_replicate: 2") == (2, 4)
    assert sizes("fsdp_type: full_shard", "distributed.dp_shard=2") == (1, 2)
    assert sizes("fsdp_type: no_shard", "distributed.fsdp_type=full_shard") == (1, None)
    with pytest.raises(UserError, match=r"fsdp_type = .*: must be full_shard or no_shard"):
        sizes("fsdp_type: hybrid")


def test_lingua_seeds_must_agree(tmp_path):
    assert lingua(tmp_path, "seed: 7\nmodel: {seed: 7}\ndata: {seed: 7}\n").seed == 7
    with pytest.raises(UserError, match=r"data\.seed = 8: must equal seed = 7, or be left out"):
        lingua(tmp_path, "seed: 7\ndata: {seed: 8}\n")
    with pytest.raises(UserError, match=r"model\.seed = 8: must equal seed = 42"):
        lingua(tmp_path, "model: {seed: 8}\n")


def test_lingua_keys_that_would_change_the_run_are_refused(tmp_path):
    neutral = "detect_anomaly: false, float8_recipe: null, spawn_method: forkserver"
    assert lingua(tmp_path, f"distributed: {{{neutral}}}\n") == Config()
    with pytest.raises(UserError, match=r'float8_recipe = "rowwise": is not supported, only null'):
        lingua(tmp_path, "distributed: {float8_recipe: rowwise}\n")


def test_a_key_of_ours_comes_before_the_foreign_table():
    table = Foreign(ignored={"optim": "never", "steps": "never", "odd": "old"})
    got, notices = load(Config, ["steps=5", "odd.a=1", "odd.b=2", "optim.warmup=1"], table)
    assert (got.steps, got.optim.warmup) == (5, 1)
    assert notices == ["odd has no effect here: old (command line)"]
    lines = mistakes("optim.lrr=1", foreign=Foreign())
    assert lines[0].startswith("optim.lrr: unknown key")
