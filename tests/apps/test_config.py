"""The app's configuration as a whole: its keys and defaults, our configs, and Meta Lingua's."""

from base64 import b64encode
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from apps.main import app
from apps.main.config import TrainArgs
from apps.main.transformer import build
from lingua.app import choose_app
from lingua.base.errors import UserError
from lingua.config.load import flatten, load, meta_lingua, resume_classes, to_yaml
from lingua.config.meta_lingua import META_LINGUA
from lingua.parallel.alone import one_process
from lingua.run.start import check, check_run
from tests.apps.plain import build_plain
from tests.apps.runs import SMALL, write_sources
from tests.mistakes import refused

pytestmark = pytest.mark.quick

CONFIGS = Path(__file__).parents[2] / "apps/main/configs"
PUBLISHED = Path(__file__).parent / "meta_lingua"  # its configs as of commit 437d680


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def test_every_key_has_a_resume_class():
    classes = resume_classes(TrainArgs)
    assert {key for key, value in classes.items() if value is None} == set()
    assert set(flatten(TrainArgs())) <= set(classes)


KEYS = """
    seed 42 guarded                      device auto free
    optim.name adamw guarded             optim.lr_min_ratio 0.1 announced
    data.n_views 2 guarded               data.global_batch_size None guarded
    data.on_bad_record stop announced    data.batch_size 2 free
    distributed.dp_replicate 1 free      distributed.dp_shard None free
    distributed.grad_sync None free      distributed.model_dtype bf16 announced
    model.vocab_size -1 guarded          model.attn_impl auto announced
    checkpoint.allow_change [] free      logging.freq 10 free
    validation.every 0 free
"""


def test_keys_that_users_rely_on():
    words = KEYS.split()
    for key, default, resume in zip(words[::3], words[1::3], words[2::3], strict=True):
        assert (str(flatten(TrainArgs())[key]), resume_classes(TrainArgs)[key]) == (default, resume)


@pytest.mark.parametrize(
    ("name", "parameters", "tokens"),  # of Llama 3.2's 3B and Llama 3's 8B, as their makers count
    [
        ("llama_1B", 1_809_946_624, 63e9),
        ("llama_3B", 3_212_749_824, 105e9),
        ("llama_7B", 7_526_944_768, 210e9),
        ("llama_8B", 8_030_261_248, 210e9),
    ],
)
def test_configs_for_real_hardware_have_the_size_that_they_state(name, parameters, tokens):
    own = "model.vocab_size=128256", "data.tokenizer={name: bytes, path: null}"
    args, _ = load(TrainArgs, [f"config={CONFIGS / name}.yaml", *own])
    assert sum(p.numel() for p in build(args).module.parameters()) == parameters
    assert args.distributed.compile
    assert args.steps * args.data.step_rows * args.data.seq_len == pytest.approx(tokens, rel=0.01)
    about = (CONFIGS / f"{name}.yaml").read_text().replace("\n# ", " ")
    assert f"{tokens / 1e9:.0f} billion tokens" in about


@pytest.mark.parametrize("name", ["debug", "llama_1B", "llama_7B"])
def test_meta_linguas_published_configs_are_accepted_with_every_key(name, tmp_path):
    ranks = tmp_path / "tokenizer.model"
    ranks.write_bytes(b"".join(b"%s %d\n" % (b64encode(bytes([i])), i) for i in range(256)))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dclm_baseline_1.0.jsonl").write_text('{"text": "one"}\n' * 10)
    paths = {"dump_dir": f"{tmp_path}/run", "data.root_dir": f"{tmp_path}/data"}
    if name != "debug":  # which has bytes for tokens
        paths["data.tokenizer.path"] = str(ranks)
    words = [f"config={PUBLISHED / name}.yaml", *(f"{k}={v}" for k, v in paths.items())]
    args, notices = check(words, 8)  # all that a run checks before it prepares its data

    ours, ignored = flatten(args), {line.split()[0] for line in notices}
    given = dict(leaves(OmegaConf.to_container(OmegaConf.load(PUBLISHED / f"{name}.yaml"))))
    for key, value in given.items():
        if key == "data.sources.dclm_baseline_1.0":
            assert ours["data.sources"] == {"dclm_baseline_1.0": value}
        elif key in ours and key not in paths:
            assert ours[key] == value, key
        elif key not in paths and key not in META_LINGUA.translated | META_LINGUA.alias_of:
            assert any(f"{key}.".startswith(f"{group}.") for group in ignored), key
    assert (args.distributed.dp_shard, args.distributed.activation_checkpointing) == (None, "none")
    assert args.eval is None


def test_the_config_of_a_run_of_meta_lingua_is_accepted(tmp_path):
    (tmp_path / "wiki.jsonl").write_text('{"text": "one"}\n' * 10)
    where = [f"dump_dir={tmp_path}/run", f"data.root_dir={tmp_path}", "checkpoint.path=null"]
    args, _ = check([f"config={PUBLISHED}/resolved.yaml", *where], 2)
    assert (args.data.sources, args.optim.lr, args.model.dim) == ({"wiki": 80.0}, 0.01, 22)


@pytest.mark.parametrize("path", sorted(map(str, Path("apps").glob("*/configs/*.yaml"))))
def test_our_configs_leave_nothing_to_the_number_of_ranks_and_survive_a_round_trip(path, tmp_path):
    ranks = tmp_path / "tokenizer.model"
    ranks.write_text("YQ== 0\n")
    words = [f"config={path}"]
    if "debug" not in path or path.startswith(("apps/sft", "apps/dpo", "apps/lora")):
        words += [f"data.tokenizer.path={ranks}"]
    cls = choose_app(words).config
    args, notices = load(cls, words, meta_lingua)
    assert notices == []
    assert args.data.global_batch_size is not None
    written = tmp_path / "config.yaml"
    written.write_text(to_yaml(args))
    again, _ = load(cls, [f"config={written}"], meta_lingua)
    assert again == args


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.document_mask=ignore", "data.document_mask = ignore: must be none.* documents"),
        ("model.dropout=0.1", "model.dropout = 0.1: must be 0.0, since .* does not take noise"),
    ],
)
def test_what_a_models_forward_does_not_take_is_refused_at_the_start(tmp_path, setting, message):
    (tmp_path / "one.txt").write_text("a text")
    argv = [f"data.root_dir={tmp_path}", "data.sources={one: 1}", f"dump_dir={tmp_path / 'run'}"]
    argv += ["data.global_batch_size=2", "model.n_heads=4", "device=cpu"]
    plain = replace(app, build=build_plain)
    for words in (argv, [*argv, setting]):
        args = load(TrainArgs, words)[0]
        with one_process():
            check_run(app, deepcopy(args), (1, 1, 1), "cpu")
            if words is argv:
                check_run(plain, args, (1, 1, 1), "cpu")
            else:
                with pytest.raises(UserError, match=message):
                    check_run(plain, args, (1, 1, 1), "cpu")


FORKS = (
    "adafactor", "looped", "mingru", "moe", "modular", "optimizer", "probe", "soap", "synthetic"
)  # fmt: skip


@pytest.mark.parametrize("fork", FORKS)
def test_a_launcher_validates_a_fork(tmp_path, fork):
    write_sources(tmp_path)
    settings = SMALL | {"data.root_dir": tmp_path, "dump_dir": tmp_path / "run"}
    if import_module(f"tests.forks.{fork}").app.data is not None:  # its rows are no text
        settings |= {"data.sources": "{}"}
    argv = [f"app=tests.forks.{fork}", *(f"{key}={value}" for key, value in settings.items())]
    assert check(argv, 2)[0].app == f"tests.forks.{fork}"
    refused(lambda: check([*argv, "distributed.tp_size=3"], 3), "distributed.tp_size = 3")
