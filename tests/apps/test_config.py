"""The app's configuration as a whole: its keys and defaults, our configs, and Meta Lingua's."""

from pathlib import Path

import pytest

from apps.main.config import TrainArgs
from lingua.config.load import flatten, load, resume_classes, to_yaml
from lingua.config.meta_lingua import META_LINGUA
from lingua.errors import UserError

CONFIGS = Path("apps/main/configs")
PATHS = {"dump_dir": "", "root_dir": "data."}  # that Meta Lingua's configs leave to the user

# Shapes and values of Meta Lingua's public debug.yaml, llama_1B.yaml and llama_7B.yaml.
LINGUA_DEBUG = """
dump_dir: !!!CHANGE_THIS!!!
name: "debug"
steps: 1000
probe_freq: 100
seed: 777
optim:
    lr: 3e-4
    weight_decay: 0.033
    warmup: 2000
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
      wikipedia_en: 80.0
      arxiv: 20.0
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
    generator: {max_tokens: 8192, dtype: bf16, temperature: 1.0, top_p: 0.95}
    harness: {tasks: [hellaswag, {task: nq_open, num_fewshot: 5}, piqa]}
    validation: {max_steps: 100}
"""
LINGUA_1B = """
dump_dir: !!!CHANGE_THIS!!!
name: large_lm
steps: 60_000
probe_freq: null
seed: 777
optim: {lr: 3e-3, weight_decay: 0.033, warmup: 5000, lr_min_ratio: 0.000001, clip: 1.0}
distributed:
    fsdp_type: full_shard
    compile: true
    model_dtype: bf16
    matmul_allow_tf32: false
    selective_activation_checkpointing: false
    tp_size: 1
model: {dim: 2048, n_layers: 25, n_heads: 16}
data:
    root_dir: !!!CHANGE_THIS!!!
    sources: {dclm_baseline_1.0: 100.0}
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
profiling: {run: true, mem_warmup: 0, mem_steps: 4, profile_warmup: 100, profile_steps: 4}
checkpoint: {dump: {every: 2500, keep: 3}, eval: {every: 5000, keep: -1}}
logging: {freq: 1}
async_eval_gpus: 8
eval: {harness: {tasks: [piqa]}, validation: {max_steps: 1000}, generator: {dtype: bf16}}
"""
LINGUA_7B = LINGUA_1B.replace("dim: 2048, n_layers: 25, n_heads: 16", "dim: 4096, n_layers: 32")
LINGUA_7B = LINGUA_7B.replace("n_layers: 32}", "n_layers: 32, n_heads: 32, rope_theta: 100_000}")


def test_every_key_has_a_resume_class() -> None:
    classes = resume_classes(TrainArgs)
    assert {key for key, value in classes.items() if value is None} == set()
    assert set(flatten(TrainArgs())) <= set(classes)


@pytest.mark.parametrize(
    ("key", "default", "resume"),
    [
        ("seed", 42, "guarded"),
        ("device", "auto", "free"),
        ("optim.name", "adamw", "guarded"),
        ("optim.lr_min_ratio", 0.1, "announced"),
        ("data.n_views", 2, "guarded"),
        ("data.global_batch_size", None, "guarded"),
        ("data.on_bad_record", "stop", "announced"),
        ("data.batch_size", 2, "free"),
        ("distributed.dp_replicate", 1, "free"),
        ("distributed.dp_shard", None, "free"),
        ("distributed.grad_sync", "last", "free"),
        ("distributed.model_dtype", "bf16", "announced"),
        ("model.vocab_size", -1, "guarded"),
        ("model.attn_impl", "sdpa", "announced"),
        ("checkpoint.allow_change", [], "free"),
        ("validation.every", 0, "free"),
    ],
)
def test_keys_that_users_rely_on(key: str, default: object, resume: str) -> None:
    assert flatten(TrainArgs())[key] == default
    assert resume_classes(TrainArgs)[key] == resume


@pytest.mark.parametrize("text", [LINGUA_DEBUG, LINGUA_1B, LINGUA_7B])
def test_meta_linguas_configs_load_with_only_paths_overridden(text: str, tmp_path: Path) -> None:
    path = tmp_path / "lingua.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load(TrainArgs, [f"config={path}"], META_LINGUA)
    lines = text.splitlines()
    line = {key: 1 + next(i for i, line in enumerate(lines) if key in line) for key in PATHS}
    for key, group in PATHS.items():
        assert f"{group}{key}: must be given ({path}:{line[key]})" in str(caught.value)

    ranks = tmp_path / "tokenizer.model"
    ranks.write_text("YQ== 0\n")
    paths = [f"dump_dir={tmp_path}/run", f"data.root_dir={tmp_path}"]
    if "tiktoken" in text:
        paths.append(f"data.tokenizer.path={ranks}")
    args, notices = load(TrainArgs, [f"config={path}", *paths], META_LINGUA)
    assert args.distributed.dp_shard is None and args.distributed.dp_replicate == 1
    assert args.distributed.activation_checkpointing == "none"
    assert (args.seed, args.data.n_views) == (777, 2)
    assert args.optim.lr in (3e-4, 3e-3)
    ignored = ("data.prefetch_size", "data.load_async", "probe_freq", "eval")
    assert all(any(line.startswith(key) for line in notices) for key in ignored), notices
    assert args.eval is None


def test_sections_of_meta_linguas_evaluation_may_be_null_and_our_keys_stand_beside_them() -> None:
    given = ["eval={harness: null, generator: null, tasks: [piqa]}", "model.n_heads=4"]
    args, notices = load(TrainArgs, [*given, "data.sources={a: 1}"], META_LINGUA)
    assert args.eval.tasks == ["piqa"] and [n.split()[0] for n in notices] == [
        "eval.harness", "eval.generator",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["debug", "llama_1B", "llama_7B"])
def test_our_configs_load_and_survive_a_round_trip(name: str, tmp_path: Path) -> None:
    ranks = tmp_path / "tokenizer.model"
    ranks.write_text("YQ== 0\n")
    extra = [] if name == "debug" else [f"data.tokenizer.path={ranks}"]
    args, notices = load(TrainArgs, [f"config={CONFIGS / name}.yaml", *extra], META_LINGUA)
    assert notices == []
    written = tmp_path / "config.yaml"
    written.write_text(to_yaml(args))
    again, _ = load(TrainArgs, [f"config={written}"], META_LINGUA)
    assert again == args
