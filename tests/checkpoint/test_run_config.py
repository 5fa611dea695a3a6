"""Keys that a run leaves open are those of the model that it starts from."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from apps.main import app as main_app
from apps.main.hugging_face import llama
from apps.sft import app as sft
from lingua.base.errors import UserError
from lingua.checkpoint.run_config import load_run
from lingua.checkpoint.save import save
from lingua.config.load import load, to_yaml
from lingua.parallel.alone import one_process
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import TokenizerArgs
from lingua.tools.commands.data_prepare import PrepareArgs
from tests.chats import TEMPLATES, write_tokenizer
from tests.mistakes import refused
from tests.tokenizer import test_tokenizer as tokenizers

pytestmark = pytest.mark.quick


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of transformers, without its weights: a config does not need them."""
    path = tmp_path / "llama"
    write_tokenizer(path, TEMPLATES["chatml"])
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config = {"model_type": "llama", "vocab_size": 777, "hidden_size": 24, "num_hidden_layers": 3,
              "intermediate_size": 58, "num_attention_heads": 4, "num_key_value_heads": 2,
              "rope_parameters": rope}  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def words(tmp_path: Path, origin: object, *more: str) -> list[str]:
    text = f"app: apps.sft\ndata: {{sources: {{talk: 1}}}}\ncheckpoint: {{init_from: {origin}}}\n"
    (tmp_path / "tune.yaml").write_text(text)
    return [f"config={tmp_path}/tune.yaml", f"dump_dir={tmp_path}/run", *more]


def test_three_keys_tune_a_model_of_transformers(folder, tmp_path):
    argv = words(tmp_path, folder, "model.dropout=0.1")
    args, notices = load_run(sft, argv)
    assert notices == [f"data.tokenizer.name = hf: taken from {folder / 'config.json'}"]
    expected, _ = llama.from_config(json.loads((folder / "config.json").read_text()), "")
    expected.dropout = 0.1
    assert args.model == expected and (args.model.dim, args.model.rope_scaling.factor) == (24, 8.0)
    tokenizer = args.data.tokenizer
    assert (tokenizer.name, tokenizer.path) == ("hf", str(folder / "tokenizer.json"))
    assert args.data.seq_len == sft.config().data.seq_len

    # What prepares the text, and the file of the run itself, mean the same.
    part, _ = load_run(sft, argv, part=PrepareArgs(data=sft.config().data))
    assert part.data == args.data and part.data.chat is not None
    (tmp_path / "config.yaml").write_text(to_yaml(args))
    whole = [f"config={tmp_path}/config.yaml"]
    (folder / "config.json").rename(folder / "other.json")
    assert load(sft.config, whole)[0] == load_run(sft, whole)[0] == args
    with pytest.raises(UserError, match=f"init_from: {folder} has no whole checkpoint: must be"):
        load_run(sft, argv)
    (tmp_path / "run").mkdir()  # of a run that has started with it
    (tmp_path / "config.yaml").rename(tmp_path / "run" / "config.yaml")
    assert load_run(sft, argv)[0] == args


def test_what_is_given_comes_before_what_the_folder_has(folder, tmp_path):
    argv = ["model.dim=48", "model.rope_scaling=null", "data.tokenizer.name=bytes"]
    args, _ = load_run(sft, words(tmp_path, folder, *argv))
    assert (args.model.dim, args.model.n_layers, args.model.rope_scaling) == (48, 3, None)
    assert (args.data.tokenizer.name, args.data.tokenizer.path) == ("bytes", None)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer.json .* data.tokenizer names"):
        load_run(sft, words(tmp_path, folder))
    assert load_run(sft, words(tmp_path, folder, "data.tokenizer.name=bytes"))[0].model.dim == 24
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "bert"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r'config.json: model_type = "bert": must be'):
        load_run(sft, words(tmp_path, folder))


def test_a_checkpoint_gives_its_model_and_tokenizer_too(folder, tmp_path):
    args, _ = load_run(sft, words(tmp_path, folder, "model.dropout=0.1", "data.add_eos=false"))
    with one_process():
        state: dict[str, Any] = {"progress": {"step": 3}}
        checkpoint = save(tmp_path / "first" / "checkpoints", 3, {}, state, to_yaml(args))
    for origin in (checkpoint, tmp_path / "first"):
        for key in ("init_from", "init_ckpt_path"):
            found, _ = load_run(main_app, ["data.sources.a=1", f"checkpoint.{key}={origin}"])
            args.model.dropout = 0.0  # a matter of training
            assert found.checkpoint.init_from == str(origin)
            assert found.model == args.model and found.data.tokenizer == args.data.tokenizer
            assert (found.data.add_eos, found.data.chat) == (False, None)


def test_a_default_tokenizer_beside_weights_that_name_none_is_announced(tmp_path):
    torch.save({"model": {}}, weights := tmp_path / "weights.pth")
    argv = ["data.sources.a=1", "model.n_heads=4", f"checkpoint.init_from={weights}"]
    args, notices = load_run(main_app, argv)
    assert args.data.tokenizer == TokenizerArgs("bytes")
    default = f"taken from the defaults, since {weights} names none"
    assert notices == [f"data.tokenizer.name = bytes: {default}"]
    assert load_run(main_app, [*argv, "data.tokenizer.name=bytes"])[1] == []


def test_a_tokenizers_file_without_a_name_is_read_as_what_it_is(tmp_path):
    llama3 = shutil.copy(tokenizers.write_ranks(tmp_path / "ranks"), tmp_path / "llama3.model")
    files = {
        "sp": [tokenizers.write_sentencepiece(tmp_path / "t.model", model_type="bpe")],
        "tiktoken": [tmp_path / "ranks", llama3],
        "hf": [write_tokenizer(tmp_path / "folder"), tmp_path / "folder" / "tokenizer.json"],
    }
    for kind, paths in files.items():
        for path in paths:
            argv = ["data.sources.a=1", f"data.tokenizer.path={path}", "model.n_heads=4"]
            args, notices = load_run(main_app, argv)
            assert args.data.tokenizer == TokenizerArgs(kind, str(path))
            assert build_tokenizer(args.data.tokenizer).decode([70])
            assert notices == [f"data.tokenizer.name = {kind}: taken from {path}"]
            part, _ = load_run(main_app, argv, part=PrepareArgs(data=main_app.config().data))
            assert part.data == args.data
    named = load_run(main_app, [*argv, "data.tokenizer.name=bytes"])  # as configs of earlier runs
    unread = (
        f"data.tokenizer.path = {path}: has no effect, since data.tokenizer.name = bytes reads "
    )
    assert (named[0].data.tokenizer.name, named[1]) == ("bytes", [f"{unread}no file"])
    absent = load_run(main_app, [*argv, "data.tokenizer.path=null"])
    assert (absent[0].data.tokenizer, absent[1]) == (TokenizerArgs("bytes"), [])
    (tmp_path / "text").write_text("some words\n")
    for path, why in (("text", "its content shows none"), ("gone", "which does not exist")):
        argv[1] = f"data.tokenizer.path={tmp_path / path}"
        need = "data.tokenizer.name: must be one of sp, tiktoken, hf"
        refused(lambda: load_run(main_app, argv), need, tmp_path / path, why)
