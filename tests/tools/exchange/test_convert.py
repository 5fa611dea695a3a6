"""Models in and out of Hugging Face's form, against transformers itself."""

import io
import json
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from apps.main import app as main_app
from apps.main.config import ModelArgs
from apps.main.hugging_face import feed_forward_size, llama
from apps.mtp import app as mtp_app
from lingua.checkpoint.folder import read_checkpoint
from lingua.checkpoint.origin import open_source
from lingua.model.args import TransformerArgs
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import TokenizerArgs
from lingua.tools.exchange.hugging_face import HFTensor
from lingua.tools.inspect.checkpoint import summary
from tests.apps.test_model import CASES, initialised, model_args
from tests.chats import TEMPLATES, write_tokenizer
from tests.mistakes import refused
from tests.ranks import each_here
from tests.tokenizer import test_tokenizer as tokenizers
from tests.tools.exchange.converted import (
    SCALING,
    a_model,
    convert_here,
    convert_to,
    same,
    save_here,
    tensors_in,
)

# of DCP, where the tests read a checkpoint outside the ranks
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CPU = torch.device("cpu")
# tests/apps/test_model.py compares every case of CASES with transformers.
EXPRESSIBLE = {
    "grouped-query": CASES["grouped-query"],
    "all at once": {
        "dim": 36, "n_heads": 6, "n_kv_heads": 3, "head_dim": 10, "weight_tying": True,
        "rope_theta": 500000.0, "rope_scaling": SCALING, "norm_eps": 1e-3, "multiple_of": 7,
    },
}  # fmt: skip
# by the class that they are in transformers
OTHERS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"sliding_window": 9, "dim": 30, "head_dim": 6},
    "Qwen2ForCausalLM": {"qkv_bias": True, "sliding_window": 9, "weight_tying": True},
    "Qwen3ForCausalLM": {"qk_norm": "per_head", "n_kv_heads": 2, "head_dim": 10},
    "Olmo2ForCausalLM": {"qk_norm": "all_heads", "norm_placement": "output", "n_kv_heads": 2},
}
EXPRESSIBLE |= OTHERS


def logits_there(folder: Path, tokens: Tensor, kind: str = "LlamaForCausalLM") -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert type(model).__name__ == kind
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("case", EXPRESSIBLE)
def test_an_exported_model_is_the_same_and_comes_back_bit_for_bit(ranks, tmp_path, case):
    args = a_model(**EXPRESSIBLE[case])
    ranks.run(1, save_here, tmp_path / "ours", args, {})
    out = convert_to(ranks, tmp_path / "ours", tmp_path / "theirs")
    tokens = torch.randint(0, 259, (3, 60), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours = initialised(args)(tokens)
    there = logits_there(out, tokens, case if case in OTHERS else "LlamaForCausalLM")
    torch.testing.assert_close(there, ours, rtol=0, atol=1e-5)
    back = convert_to(ranks, out, tmp_path / "back", "tokenizer.name=bytes")
    assert OmegaConf.load(back / "0000000000" / "config.yaml").app == "apps.main"
    expected = tensors_in(tmp_path / "ours" / "0000000003")
    assert same(tensors_in(back / "0000000000"), expected)
    if case == "grouped-query":  # what both comparisons would notice
        name = "model.layers.1.self_attn.k_proj.weight"
        file = out / "model.safetensors"
        tensors = load_file(file)
        tensors[name] = tensors[name].roll(1, 0)
        save_file(tensors, file, metadata={"format": "pt"})
        assert (logits_there(out, tokens) - ours).abs().max() > 1e-3
        other = convert_to(ranks, out, tmp_path / "other", "tokenizer.name=bytes")
        assert not same(tensors_in(other / "0000000000"), expected)


W2 = "layers.1.feed_forward.w2.weight"


def other_tensors(args: ModelArgs) -> dict[str, HFTensor]:
    """As no family of transformers has them: other names, and every second row first."""
    tensors = {name: replace(t, name=f"other.{name}") for name, t in llama.tensors(args).items()}
    return tensors | {W2: replace(tensors[W2], row_order=(1, 0))}


# app=tests.tools.exchange.test_convert: an app whose models have another form.
app = replace(main_app, path=__name__, hugging_face=lambda: replace(llama, tensors=other_tensors))


def test_another_app_has_another_form(ranks, tmp_path):
    model = a_model()
    ranks.run(1, save_here, tmp_path / "ours", model, {})
    named = f"app={__name__}"
    out = convert_to(ranks, tmp_path / "ours", tmp_path / "theirs", named)
    ours, theirs = tensors_in(tmp_path / "ours" / "0000000003"), tensors_in(out)
    assert theirs.keys() == {f"other.{name}" for name in ours}
    assert torch.equal(theirs[f"other.{W2}"][::2], ours[W2][1::2])
    assert not torch.equal(ours[W2][::2], ours[W2][1::2])
    back = convert_to(ranks, out, tmp_path / "back", named, "tokenizer.name=bytes") / "0000000000"
    assert same(tensors_in(back), ours)
    assert OmegaConf.load(back / "config.yaml").app == __name__
    shown = summary(read_checkpoint(back)[0])
    assert list(shown["tensors"]) == ["model"] and "progress" not in shown
    cases = {"folder": [f"source={out}"], "checkpoint": [f"source={back}"]}
    cases |= {"mtp folder": [f"source={out}", "app=apps.mtp"]}
    cases |= {"mtp checkpoint": [f"source={tmp_path / 'ours'}", "app=apps.mtp"]}
    arguments = {case: [*words, f"out={tmp_path / 'x'}"] for case, words in cases.items()}
    [said] = ranks.run(1, each_here, convert_here, arguments)
    assert "model.embed_tokens.weight: (259, 32) in config.json" in said["folder"]
    assert f"app = {__name__}" in said["checkpoint"] and "To trust it" in said["checkpoint"]
    for case, source in (("mtp folder", out), ("mtp checkpoint", tmp_path / "ours/0000000003")):
        assert f"{source}: apps.mtp has no form in transformers" in said[case]
    from_folder = partial(open_source, "checkpoint.init_from", out, mtp_app, "size")
    refused(from_folder, "init_from", out, "apps.mtp has no form")


def test_a_model_larger_than_a_shard_is_split_and_has_the_dtype_that_is_asked_for(ranks, tmp_path):
    ranks.run(1, save_here, tmp_path / "ours", a_model(), {})
    exact = tensors_in(tmp_path / "ours" / "0000000003")
    whole = convert_to(ranks, tmp_path / "ours", tmp_path / "whole")
    split = convert_to(ranks, tmp_path / "ours", tmp_path / "split", "shard_gb=3e-5")
    index = json.loads((split / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in split.glob("*.safetensors"))
    assert len(files) > 2 and files == sorted(set(index["weight_map"].values()))
    one_tensor = 259 * 32 * 4  # which alone is larger
    assert all((split / name).stat().st_size < one_tensor + 5_000 for name in files)
    assert same(tensors_in(split), tensors_in(whole))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_in(whole).values())
    tokens = torch.arange(40)[None]
    assert torch.equal(logits_there(split, tokens), logits_there(whole, tokens))
    back = convert_to(ranks, split, tmp_path / "back", "tokenizer.name=bytes") / "0000000000"
    assert same(tensors_in(back), exact)
    out = convert_to(ranks, tmp_path / "ours", tmp_path / "theirs", "dtype=bfloat16")
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    back = convert_to(ranks, out, tmp_path / "rounded", "tokenizer.name=bytes") / "0000000000"
    assert same(tensors_in(back), {name: t.bfloat16() for name, t in exact.items()})


def a_llama(**changed: Any) -> LlamaConfig:
    sizes = {"vocab_size": 259, "hidden_size": 48, "intermediate_size": 53, "head_dim": 8}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return LlamaConfig(**(sizes | heads | {"max_position_embeddings": 512} | changed))


def test_any_size_of_feed_forward_can_be_written():
    for dim in (1, 22, 128, 4096):
        for hidden in (1, 2, 53, 255, 341, 342, 10001, 16384, 99991):
            multiplier, multiple = feed_forward_size(dim, hidden)
            args = TransformerArgs(dim=dim, ffn_dim_multiplier=multiplier, multiple_of=multiple)
            assert args.hidden_dim() == hidden


@pytest.mark.parametrize("kind", ["byte level", "metaspace", "sp"])
def test_a_tokenizer_travels_with_its_model_both_ways(ranks, tmp_path, kind):
    name, path = "hf", tmp_path / "some.json"
    if kind == "sp":
        name, path = "sp", tmp_path / "some.model"
        tokenizers.write_sentencepiece(path, model_type="bpe")
    else:
        (tokenizers.write_byte_level if kind == "byte level" else tokenizers.write_metaspace)(path)
    ours = build_tokenizer(TokenizerArgs(name, str(path)))
    model = model_args(vocab_size=ours.vocab_size + 3)
    config = {"tokenizer": {"name": name, "path": str(path)}}
    ranks.run(1, save_here, tmp_path / "ours", model, config)
    out = convert_to(ranks, tmp_path / "ours", tmp_path / "theirs")
    there = AutoTokenizer.from_pretrained(out)
    assert (there.bos_token_id, there.eos_token_id) == (ours.bos_id, ours.eos_id)
    texts = (t for t in tokenizers.TEXTS if "<" not in t and t.isprintable())
    # transformers' LlamaTokenizer lets the space that a text begins with be the one put before it
    for text in (t for t in texts if kind != "sp" or t[:1] != " "):
        ids = there.encode(text, add_special_tokens=False)
        assert ids == ours.encode(text).tolist(), text
    path.unlink()  # what comes back has a copy of its own
    back = convert_to(ranks, out, tmp_path / "back")
    shutil.rmtree(out)
    data = OmegaConf.load(back / "0000000000" / "config.yaml").data
    again = build_tokenizer(TokenizerArgs(**data.tokenizer))
    assert again.fingerprint() == ours.fingerprint()
    assert data.add_bos


FORMLESS = {
    "bytes": None,
    "unigram": {"hard_vocab_limit": False},
    "no space before a text": {"model_type": "bpe", "add_dummy_prefix": False},
    "characters made others": {"model_type": "bpe", "normalization_rule_name": "nmt_nfkc"},
    "spaces made one": {"model_type": "bpe", "remove_extra_whitespaces": True},
}


@pytest.mark.parametrize("kind", FORMLESS)
def test_a_tokenizer_that_transformers_has_no_form_for_is_not_written(ranks, tmp_path, kind):
    config = {}
    if (options := FORMLESS[kind]) is not None:
        path = tokenizers.write_sentencepiece(tmp_path / "some.model", **options)
        config = {"tokenizer": {"name": "sp", "path": path}}
    ranks.run(1, save_here, tmp_path / "ours", model_args(vocab_size=600), config)
    out = convert_to(ranks, tmp_path / "ours", tmp_path / "theirs")
    names = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert {p.name for p in out.iterdir()} == names


BASE_GENERATION = {"eos_token_id": [1, 3], "pad_token_id": 0, "do_sample": True, "top_p": 0.9}
TALK = [{"role": "user", "content": "zoo"}, {"role": "assistant", "content": "this and that"}]


def write_base(folder: Path) -> ModelArgs:
    """A model of transformers as they are published; returns it as ours."""
    write_tokenizer(folder, None, pad_token="<s>", auto_map={"AutoTokenizer": ["x.Y", None]})
    (folder / "chat_template.jinja").write_text(TEMPLATES["chatml"])
    LlamaForCausalLM(a_llama(vocab_size=300, bos_token_id=0)).save_pretrained(folder)
    for name, changed in {
        "config.json": {"initializer_range": 0.05, "auto_map": {"AutoModel": "x.Y"}},
        "generation_config.json": BASE_GENERATION,
    }.items():
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    for name in ("LICENSE.txt", "USE_POLICY.md", "README.md", "modeling.py"):
        (folder / name).write_text(f"{name} of the base")
    return llama.from_config(json.loads((folder / "config.json").read_text()), "")[0]


def opened_there(folder: Path) -> tuple[Any, Any]:
    """(model, tokenizer) as transformers loads them."""
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def printed_here(*arguments: str) -> str:
    with redirect_stdout(io.StringIO()) as said:
        assert not convert_here(*arguments)
    return said.getvalue()


def force(tokens: Tensor, scores: Tensor, end: int) -> Tensor:
    """Scores that draw `end` as the fifth token, and no token that ends a text before."""
    scores = scores.index_fill(1, torch.tensor([1, 3, 4]), -torch.inf)
    return scores.index_fill(1, torch.tensor([end]), 1e4) if tokens.shape[1] == 4 else scores


def test_what_a_base_has_and_training_did_not_change_is_carried_over(ranks, tmp_path):
    base = tmp_path / "base"
    args = write_base(base)
    model, tokenizer = opened_there(base)
    convert_to(ranks, base, tmp_path / "plain")  # without training
    (tmp_path / "t.jinja").write_text(TEMPLATES["llama3"])
    trained = {"init_from": str(base), "tokenizer": {"name": "hf", "path": str(base)}}
    chat = {"chat": {"template": str(tmp_path / "t.jinja")}, "sources": {"talks": 1.0}}
    ranks.run(1, save_here, tmp_path / "sft/checkpoints", args, trained | {"data": chat})
    ranks.run(1, save_here, tmp_path / "dpo", args, trained | {"init_from": str(tmp_path / "sft")})
    metrics = '{"step": 2, "loss": 1.25}\n{"step": 4, "loss": 9.0}'
    (tmp_path / "sft/metrics.jsonl").write_text(metrics)
    cases = {"plain": ("chatml", [1, 3]), "sft": ("llama3", [1, 4, 3]), "dpo": ("chatml", [1, 3])}
    for case, (template, ends) in cases.items():
        out = convert_to(ranks, tmp_path / case, tmp_path / f"{case}-hf")
        again, tokenizer_there = opened_there(out)
        before, after = model.config.to_dict(), again.config.to_dict()
        differing = {key for key in before if before[key] != after.get(key)}
        assert differing <= {"eos_token_id", "auto_map", "_name_or_path"}, case
        assert after["eos_token_id"] == ends and after["initializer_range"] == 0.05
        settings = again.generation_config
        assert (settings.eos_token_id, settings.pad_token_id, settings.top_p) == (ends, 0, 0.9)
        options = {"tokenize": False, "chat_template": TEMPLATES[template]}
        text = tokenizer.apply_chat_template(TALK, **options)
        assert tokenizer_there.apply_chat_template(TALK, tokenize=False) == text
        for end in ends:
            ids = torch.tensor([[5, 6]])
            new = again.generate(ids, max_new_tokens=9, logits_processor=[partial(force, end=end)])
            assert new[0, 4:].tolist() == [end]
        assert (out / "LICENSE.txt").read_text() == "LICENSE.txt of the base"
        card = (out / "README.md").read_text()
        assert "Base: base" in card and "README.md, modeling.py, auto_map of config.json" in card
        assert not any("auto_map" in file.read_text() for file in out.glob("*config.json"))
        assert str(tmp_path) not in card
    card = (tmp_path / "sft-hf/README.md").read_text()
    assert "Training loss: 1.25 nats per token, at step 2" in card and "talks 1" in card
    words = f"source={tmp_path / 'sft'}", f"out={tmp_path / 'again'}"
    [said] = ranks.run(1, printed_here, *words)  # a stranger's config may name any file
    assert f"with its tokenizer and chat template of {tmp_path / 't.jinja'};" in said


def test_the_bos_of_a_base_whose_tokenizer_names_none_is_kept(ranks, tmp_path):
    """As of Qwen2.5: bos_token_id is in config.json, and bos_token of the tokenizer is null."""
    base = tmp_path / "base"
    write_base(base)
    write_tokenizer(base, None, bos_token=None)
    for name, token in (("config.json", 2), ("generation_config.json", None)):
        content = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps(content | {"bos_token_id": token}))
    convert_to(ranks, base, tmp_path / "trained")
    out = convert_to(ranks, tmp_path / "trained", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.bos_token_id == model.generation_config.bos_token_id == 2
    assert "bos_token_id" not in (out / "README.md").read_text().split("```")[0]


def test_a_base_with_another_tokenizer_gives_no_ids(ranks, tmp_path):
    args = write_base(tmp_path / "base")
    other = write_tokenizer(tmp_path / "other", TEMPLATES["plain"], bos_token=None)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text + "\n")
    config = {"init_from": str(tmp_path / "base"), "tokenizer": {"name": "hf", "path": str(other)}}
    ranks.run(1, save_here, tmp_path / "ours", args, config)
    out = convert_to(ranks, tmp_path / "ours", tmp_path / "theirs")
    model, tokenizer = opened_there(out)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 1
    assert model.generation_config.top_p != 0.9
    assert model.config.bos_token_id is None
    assert "bos_token_id of config.json" in (out / "README.md").read_text()
    assert "zoo" in tokenizer.apply_chat_template(TALK, tokenize=False)
    assert model.config.max_position_embeddings == 512 and model.config.initializer_range == 0.05


def test_what_cannot_be_converted_is_refused_by_name(ranks, tmp_path):
    models = {  # that transformers cannot express
        "window": (a_model(**OTHERS["Olmo2ForCausalLM"], sliding_window=9), {}),
        "norms": (a_model(qkv_bias=True, norm_placement="output"), {}),
        "fork": (a_model(), {"head_layers": 1}),
        "tensors": (a_model(), {"n_layers": 1}),
        "vocabulary": (model_args(vocab_size=100), {}),
    }
    for case, (model, config) in models.items():
        ranks.run(1, save_here, tmp_path / case, model, config)
    good = tmp_path / "good"
    LlamaForCausalLM(a_llama()).save_pretrained(good)
    config = shutil.copytree(good, tmp_path / "vocab_size") / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 259', '"vocab_size": 260'))
    pickled = shutil.copytree(good, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")

    needs = {
        "window": "model.sliding_window = 9: olmo2 in transformers has no",
        "norms": "model.qkv_bias = true, model.qk_norm = null, model.norm_pl",
        "fork": "model.head_layers: unknown key",
        "tensors": "layers.1.attention.wq.weight: in the checkpoint, not in trans",
        "vocabulary": "bytes tokenizer (which has no file) has 258 tokens",
        "vocab_size": "embed_tokens.weight: (260, 48) in config.json, (259, 48) in the",
        "pickled": "only safetensors are read",
        "good": "has no tokenizer.json or tokenizer.model",
    }
    cases = {case: [f"source={tmp_path / case}", f"out={tmp_path / 'out'}"] for case in needs}
    cases["file"] = [f"source={good}", f"out={good / 'config.json'}/x", "tokenizer.name=bytes"]
    needs["file"] = f"could not be saved into {good / 'config.json'}"
    [said] = ranks.run(1, each_here, convert_here, cases)
    for case, need in needs.items():
        assert need in said[case], (case, said[case])
        assert case in models or str(tmp_path) in said[case]
    assert not list(tmp_path.glob("out*"))  # nothing was begun
