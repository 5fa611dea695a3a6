"""What apps/onefile/train.py takes of a config of apps/main, and what it refuses by name."""

import ast
import json
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import pytest

from apps.main.config import TrainArgs
from lingua.base.errors import UserError
from lingua.config.load import flatten, load
from tests.apps.onefile.conftest import FILE, module

pytestmark = pytest.mark.quick

MAX_LINES = 920
DEFAULTS = flatten(TrainArgs())
BASE = {"data.sources": "{one: 1}", "app": "apps.main", "name": "x", "device": "cpu"}
BASE |= {"model.n_heads": 4}
PLAIN = flatten(load(TrainArgs, [f"{key}={value}" for key, value in BASE.items()])[0])
# Another legal value of each key that is not a number or a switch.
OTHERS: dict[str, list[Any]] = {
    "name": ["other"],
    "app": ["apps.mtp"],
    "dump_dir": ["runs/other"],
    "device": ["auto"],
    "deterministic": ["true", "mesh"],
    "data.root_dir": ["elsewhere"],
    "data.cache_dir": ["cache"],
    "data.sources": ["{one: 2, two: 0.5}"],
    "data.source_files": ["{one: {files: [one.jsonl]}}"],
    "data.stages": ["[{from_step: 5, sources: {one: 1}}]"],
    "data.tokenizer.name": ["hf"],
    "data.tokenizer.path": ["tokenizer.json"],
    "data.chat": ["{template: chatml}"],
    "data.document_mask": ["ignore"],
    "data.on_bad_record": ["skip"],
    "data.on_no_targets": ["skip"],
    "model.rope_scaling": ["{factor: 2.0, original_seq_len: 16}"],
    "model.qk_norm": ["per_head"],
    "model.norm_placement": ["output"],
    "model.init_std_factor": ["zero", "dim_ratio", "global_depth", "current_depth"],
    "model.attn_impl": ["sdpa"],
    "optim.name": ["muon"],
    "optim.lr_scale": ["{norm: 2.0}"],
    "optim.muon.dtype": ["fp32"],
    "optim.scheduler": ["constant", "linear", "wsd", "inv_sqrt"],
    "optim.on_nonfinite": ["skip"],
    "distributed.gpu": ["h100"],
    "distributed.grad_sync": ["every"],
    "distributed.reshard": ["step"],
    "distributed.float8": ["tensorwise"],
    "distributed.model_dtype": ["fp32"],
    "distributed.activation_checkpointing": ["full"],
    "checkpoint.path": ["elsewhere"],
    "checkpoint.mirror": ["s3://bucket/runs"],
    "checkpoint.on_error": ["stop"],
    "checkpoint.verify": ["size"],
    "checkpoint.init_from": ["elsewhere"],
    "checkpoint.allow_change": ["[seed]"],
    "validation.sources": ["[two]"],
    "eval": ["{tasks: [one]}"],
    "logging.to": ["[tensorboard]"],
    "logging.wandb": ["{project: x}"],
    "logging.trackio": ["{project: x}"],
}
# Those without which a run is another one, or would not do what was asked: refused.
REFUSED = """
app data.stages data.n_views data.chat data.document_mask data.on_no_targets model.rope_scaling
model.sliding_window model.qkv_bias model.qk_norm model.norm_placement model.dropout optim.name
optim.lr_scale optim.cycle_length optim.cosine_theta distributed.dp_replicate
distributed.dp_shard distributed.tp_size distributed.cp_size distributed.float8 distributed.compile
distributed.activation_checkpointing checkpoint.eval.every checkpoint.eval.keep
checkpoint.keep_every checkpoint.keep_best checkpoint.path checkpoint.mirror
checkpoint.async_save
checkpoint.init_from checkpoint.continue_training_from_init checkpoint.allow_change
validation.sources samples.every eval logging.to logging.wandb logging.trackio profiling.run
"""
# Without a file, or another key that is refused.
IMPOSSIBLE = ("data.tokenizer.name", "data.tokenizer.bos", "data.tokenizer.eos", "data.chat")
MAPPING = ("data.source_files",)  # apps/main adds its defaults
IMPOSSIBLE += ("checkpoint.continue_training_from_init", "distributed.check_every")
IMPOSSIBLE += ("checkpoint.init_new",)


def words(**changes: Any) -> list[str]:
    return [f"{key}={value}" for key, value in (BASE | changes).items()]


def others(key: str) -> dict[str, Any]:
    """Values of apps/main that are not its default: as they are written, and as it reads them."""
    default, tried = DEFAULTS.get(key), list(OTHERS.get(key, []))
    if isinstance(default, bool):
        tried = [str(not default).lower()]
    elif isinstance(default, int | float) or (default is None and not tried):
        tried = [3, 0.25, "null", 8, 512, 2]
    legal = dict[str, Any]()
    for value in map(str, tried):
        with suppress(UserError):
            resolved = flatten(load(TrainArgs, words(**{key: value}))[0])
            if resolved != PLAIN:
                legal[value] = resolved.get(key)
        if len(legal) == 2 and key not in OTHERS:
            break
    return legal


def read(*given: str, **changes: Any) -> Any:
    """The config as the file reads it, or what it refuses it with."""
    try:
        return module().read_config([*words(**changes), *given])
    except Exception as error:
        assert type(error).__name__ == "Mistake", f"{given}, {changes}: {error!r}"
        return str(error)


@pytest.mark.parametrize("key", DEFAULTS)
def test_each_key_of_apps_main_is_taken_or_refused_by_name(key):
    values = others(key)
    for value, expected in values.items():
        config = read(**{key: value})
        if isinstance(config, str):
            assert config.startswith((f"{key} = ", f"{key}.")), config
            assert key in REFUSED.split() or (key, value) == ("optim.scheduler", "inv_sqrt")
        else:
            assert key not in REFUSED.split() and (config[key] == expected or key in MAPPING)
    assert values or key in IMPOSSIBLE


def test_no_key_is_missing_and_none_is_of_the_file_alone():
    assert set(read()) == {*DEFAULTS, "seconds", "run"}
    resolved = json.loads(json.dumps(asdict(load(TrainArgs, words())[0])))
    assert isinstance(read(*(f"{k}={json.dumps(v)}" for k, v in resolved.items())), dict)


MISTAKES = """
optim.lrr=1 model.dim=wide model.dim=1.5 model.dim=0 steps=-1 optim.lr=fast optim.lr=.nan
data.add_bos=1 data.batch_size=0 data.seq_len=0 logging.freq=0 stop_at=x stop_at=1.5
optim.lr=[1] grad_acc_steps=0
grad_acc_steps=x data.global_batch_size=x model.n_kv_heads=x model.head_dim=[1] seconds=x seconds=0
model.ffn_dim_multiplier=x model.init_base_std=-1 distributed.threads=x validation.tokens=x
optim.clip=0 optim.scheduler=none device=tpu data.sources=one data.sources={} data.sources={"one":0}
data.sources={"one":"x"} data.sources={"one":-1} data.sources.one=1 model=5 nowhere.yaml optim
"""


def test_mistakes_are_named():
    for word in MISTAKES.split():
        message = read(word)
        assert isinstance(message, str) and word.partition("=")[0] in message, (word, message)


def test_what_may_be_null_or_0_in_apps_main_may_be_here():
    nulls = "stop_at grad_acc_steps data.global_batch_size model.head_dim model.n_kv_heads"
    nulls += " distributed.threads checkpoint.dump.every_minutes validation.tokens probe.every"
    for key in nulls.split():
        assert read(f"{key}=null")[key] is None
    assert read("model.n_heads=null", "model.head_dim=16")["model.n_heads"] is None
    for key in (
        "optim.warmup",
        "optim.weight_decay",
        "optim.lr_min_ratio",
        "checkpoint.dump.every",
        "validation.skip",
    ):
        assert read(f"{key}=0")[key] == 0


def test_more_than_one_process_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "one process" in read() and "apps/main" in read()


def test_it_is_short_and_imports_five_packages():
    text = FILE.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    imported = set()
    for node in ast.walk(ast.parse(text)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        imported |= {name.partition(".")[0] for name in names}
    assert imported - set(sys.stdlib_module_names) == {"numpy", "torch", "xxhash", "yaml"}
