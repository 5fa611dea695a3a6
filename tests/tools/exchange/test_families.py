"""Models of each family: what transformers computes with a folder of its own is what
is computed here, on a mesh too. A run that starts from a folder: its weights, if they are of its
model."""

import ctypes
import gc
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from apps.main.config import ModelArgs
from apps.main.hugging_face import from_config, llama
from apps.main.transformer import build_transformer, parallel_plan
from lingua.base.errors import UserError
from lingua.checkpoint.tensors import local_parts, tensors_of
from lingua.parallel.args import DistributedArgs
from lingua.parallel.init import canonical_name, init_parameters, ties_kept
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.parallelize import parallelize_model
from lingua.tools.exchange.hugging_face import INDEX, SINGLE, config_of_hf_folder, open_folder
from tests.apps.meshes import on_mesh
from tests.chats import write_tokenizer
from tests.checkpoint.test_checkpoint_load import bytes_read
from tests.mistakes import refused
from tests.tools.exchange.converted import SCALING, a_model, convert_to, same, save_here, tensors_in

# of DCP, where the tests read a checkpoint outside the ranks
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CPU = torch.device("cpu")
SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 53, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "eos_token_id": None}
K_NORM = "model.layers.1.self_attn.k_norm.weight"
SIZES |= {"pad_token_id": None, "bos_token_id": None}
WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
SCALED = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.0}
SCALED |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama, tied": ("Llama", {"rope_parameters": SCALED, "tie_word_embeddings": True}),
    "Mistral": ("Mistral", {"sliding_window": 7}),
    "Mistral without a window": ("Mistral", {"sliding_window": None}),
    "Qwen2": ("Qwen2", {}),
    "Qwen2, tied, with a window": ("Qwen2", WINDOW | {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3", WINDOW | {"rope_parameters": SCALED}),
    "OLMo 2": ("Olmo2", {"rope_parameters": SCALED}),
}


def save_family(folder: Path, name: str) -> Any:
    """A small model with random weights, norms and biases included, that transformers saved."""
    kind, changed = FAMILIES[name]
    torch.manual_seed(4)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | changed), initializer_range=0.2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.copy_(torch.rand_like(p) + 0.5)
    model.save_pretrained(folder)
    return model


def some_tokens() -> Tensor:
    return torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(1))


def compute_here(folders: list[Path], sizes: tuple[int, int, int]) -> list[dict[str, Tensor]]:
    """Logits, and the gradient of the sum of the losses by transformers' names, of each folder."""
    replicate, shard, tp = sizes
    parallel = DistributedArgs(replicate, shard, tp, model_dtype="fp32")
    mesh = start(CPU, detect_launch(), parallel)
    results = []
    for folder in folders:
        source, args, _ = open_folder(llama, folder)
        model = parallelize_model(build_transformer(args), mesh, parallel_plan(args, 16), parallel)
        init_parameters(model, 1, CPU)
        source.load(tensors_of(model), "model.")
        tokens, targets = some_tokens()[:, :-1], some_tokens()[None, :, 1:]
        with torch.no_grad():
            logits = model(tokens)
        results.append({"logits": logits.full_tensor() if tp > 1 else logits})
        model(tokens, targets).sums.sum().div(replicate * shard).backward()
        for name, p in model.named_parameters():
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            there = llama.tensors(args)[canonical_name(name)]
            results[-1][there.name] = there.reorder(grad, to_hf=True)
    return results


def compute_there(model: Any) -> dict[str, Tensor]:
    logits = model(some_tokens()[:, :-1]).logits
    targets = some_tokens()[:, 1:].flatten()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").backward()
    return {"logits": logits.detach()} | {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((1, 1, 1), marks=pytest.mark.soak),
        pytest.param((2, 1, 2), marks=pytest.mark.soak),
        pytest.param((1, 2, 2), marks=pytest.mark.soak),
        (1, 1, 2),
    ],
)
def test_a_family_computes_what_it_does_in_transformers_on_any_mesh(ranks, tmp_path, sizes):
    expected = [compute_there(save_family(tmp_path / name, name)) for name in FAMILIES]
    folders = [tmp_path / name for name in FAMILIES]
    folders.append(shutil.copytree(folders[-1], tmp_path / "other"))
    weights = load_file(folders[-1] / "model.safetensors")
    weights[K_NORM] = weights[K_NORM].roll(1)
    save_file(weights, folders[-1] / "model.safetensors")
    for *of_rank, other in ranks.run(math.prod(sizes), compute_here, folders, sizes):
        for name, found, there in zip(FAMILIES, of_rank, expected, strict=True):
            assert found.keys() == there.keys(), name
            torch.testing.assert_close(found["logits"], there["logits"], rtol=0, atol=1e-5)
            for key, grad in there.items():
                apart = (found[key] - grad).abs().max() / grad.abs().max()
                assert apart < 1e-5, (name, key, apart)
        assert (other["logits"] - expected[-1]["logits"]).abs().max() > 1e-3


@pytest.mark.quick
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_its_own_meaning_of_keys_that_a_config_json_lacks(tmp_path, name):
    """As transformers' class for its config reads them."""
    kind, _ = FAMILIES[name]
    required = {k: v for k, v in SIZES.items() if k.startswith(("vocab", "hidden", "interm"))}
    required |= {"num_hidden_layers": 2, "num_attention_heads": 32, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(required | {"model_type": kind.lower()}))
    there = transformers.AutoConfig.from_pretrained(tmp_path)
    args, seq_len = from_config(required | {"model_type": kind.lower()}, "config.json")
    head_dim = getattr(there, "head_dim", None) or 2
    assert args.heads() == (32, there.num_key_value_heads, head_dim)
    assert args.sliding_window == getattr(there, "sliding_window", None)
    assert (seq_len, args.norm_eps) == (there.max_position_embeddings, there.rms_norm_eps)
    assert args.rope_theta == there.rope_parameters["rope_theta"]
    assert args.weight_tying == there.tie_word_embeddings


# Values that a key of config.json may have, where not another one of the same type.
CHANGES: dict[str, list[Any]] = {
    "hidden_act": ["gelu", "swish"],
    "rms_norm_eps": [0.1],
    "initializer_range": [0.5],
    "rope_theta": [50.0],
    "partial_rotary_factor": [0.5],
    "attention_dropout": [0.1],
    "sliding_window": [3, None],
    "max_window_layers": [1, 2],
    "num_key_value_heads": [4, None],
    "head_dim": [20, None],
    "layer_types": [["sliding_attention"] * 2, ["full_attention", "sliding_attention"]],
    "rope_scaling": [
        SCALED,
        {"rope_type": "linear", "factor": 3.0},
        {"type": "dynamic", "factor": 3.0},
        {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 16},
        {"rope_theta": 50.0, "rope_type": "default"},
        {},
        None,
    ],
    "quantization_config": [{"quant_method": "fp8"}],
    "dtype": ["bfloat16"],
}
CHANGES["rope_parameters"] = [
    *CHANGES["rope_scaling"],
    {"rope_theta": 50.0, "rope_type": "default", "partial_rotary_factor": 0.5},
    {"full_attention": SCALED, "sliding_attention": SCALED},
]
# Their meaning needs other code than a forward: training, or where a model begins.
NOT_IN_LOGITS = {"attention_dropout": "must be 0.0"}


def changes(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in dict.fromkeys([*config, *CHANGES]):
        value = config.get(key)
        if key in CHANGES:
            others = CHANGES[key]
        elif isinstance(value, bool):
            others = [not value]
        elif isinstance(value, int | float):
            others = [2 * value + 1]
        else:  # names of the model and of its classes
            others = []
        yield from ((key, other) for other in others if other != value or key not in config)


def logits_here(folder: Path) -> Tensor:
    source, args, _ = open_folder(llama, folder)
    model = build_transformer(args)
    with ties_kept(model):
        model.to_empty(device="cpu")
    whole = source.whole(source.tensors)
    tensors = {name.removeprefix("model."): t.float() for name, t in whole.items()}
    missing, unknown = model.load_state_dict(tensors, strict=False)
    assert not unknown and missing == ["output.weight"] * args.weight_tying
    with torch.no_grad():
        return model(some_tokens()[:, :-1])


@pytest.mark.parametrize("name", FAMILIES)
def test_each_key_of_a_config_json_is_read_as_transformers_reads_it_or_refused(tmp_path, name):
    save_family(tmp_path, name)
    original = json.loads((tmp_path / "config.json").read_text())
    outcomes: dict[str, set[str]] = {}
    for key, value in changes(original):
        (tmp_path / "config.json").write_text(json.dumps(original | {key: value}))
        try:
            ours: Tensor | str = logits_here(tmp_path)
        except UserError as error:
            ours = str(error)
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
            with torch.no_grad():
                theirs = model(some_tokens()[:, :-1]).logits
        except Exception:  # of any type: it takes no such value
            theirs = None
        if key in NOT_IN_LOGITS:
            assert isinstance(ours, str) and f"{key} = {value}: {NOT_IN_LOGITS[key]}" in ours
        elif isinstance(ours, str):
            outcomes.setdefault("refused", set()).add(key)
            assert ours.startswith(str(tmp_path)), ours
        elif theirs is not None:  # else it is no model of theirs, and what it computes is open
            outcomes.setdefault("read", set()).add(key)
            same = (ours - theirs).abs().max() < 1e-5
            assert same, f"{key} = {value}: {(ours - theirs).abs().max()} apart"
    assert {"rms_norm_eps", "rope_scaling"} <= outcomes["read"]
    assert {"hidden_act", "hidden_size", "rope_parameters"} <= outcomes["refused"]


def test_a_head_that_a_flag_ties_is_read_where_it_is_a_copy_and_refused_where_not(tmp_path):
    save_family(tmp_path, "Llama, tied")
    weights = load_file(tmp_path / SINGLE)
    expected, embeddings = logits_here(tmp_path), weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": embeddings.clone()}, tmp_path / SINGLE)
    assert torch.equal(logits_here(tmp_path), expected)
    save_file(weights | {"lm_head.weight": embeddings.roll(1)}, tmp_path / SINGLE)
    said = refused(lambda: open_folder(llama, tmp_path))
    assert "lm_head.weight is not model.embed_tokens.weight" in said
    assert "tie_word_embeddings = false" in said


@pytest.mark.quick
def test_a_tokenizer_whose_library_fails_at_no_text_is_refused_by_its_file(tmp_path):
    config = llama.to_config(a_model(), 64)
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = write_tokenizer(tmp_path) / "tokenizer.json"
    assert config_of_hf_folder(None, tmp_path, "tokenizer_path")["data"]["add_bos"] is False
    post = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
    post["single"] = [{"SpecialToken": {"id": "<s>", "type_id": 0}}]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": post}))
    refused(lambda: config_of_hf_folder(None, tmp_path, "tokenizer_path"), file)


def test_of_a_single_file_and_an_index_the_file_is_read_as_by_transformers(tmp_path):
    model = save_family(tmp_path, "Qwen2")
    model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert (tmp_path / "shards" / INDEX).exists()
    weights = load_file(tmp_path / SINGLE)
    save_file({n: t + 0.01 for n, t in weights.items()}, tmp_path / "shards" / SINGLE)
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "shards")
    with torch.no_grad():
        expected = there(some_tokens()[:, :-1]).logits
    torch.testing.assert_close(logits_here(tmp_path / "shards"), expected, rtol=0, atol=1e-5)
    assert (logits_here(tmp_path) - expected).abs().max() > 0.01


def begin_here(folder: Path, args: ModelArgs, sizes: tuple[int, int, int]) -> Any:
    """The model's tensors whole, bytes of what this rank holds of them, and bytes it read."""
    plan = parallel_plan(args, 16)
    model, _ = on_mesh(build_transformer(args), plan, sizes, model_dtype="bf16")
    source, _, _ = open_folder(llama, folder)
    parts = local_parts(tensors_of(model))
    # Another thread of the process reads a few bytes now and then.
    n_read = min(bytes_read(lambda: source.read_parts(parts)) for _ in range(3))
    found, held = {}, 0
    for name, p in model.named_parameters():
        split = isinstance(p, DTensor)
        held += (p.to_local() if split else p).nbytes
        found[canonical_name(name)] = (p.full_tensor() if split else p).detach().clone()
    return found, held, n_read


@pytest.mark.parametrize(("sizes", "tied"), [((1, 3, 1), False), ((1, 2, 2), True)])
def test_every_topology_has_its_weights_and_reads_what_it_holds(ranks, tmp_path, sizes, tied):
    args = a_model(dim=36, n_heads=4, n_kv_heads=2, head_dim=10, multiple_of=7, weight_tying=tied)
    ranks.run(1, save_here, tmp_path / "ours", args, {})
    folder = convert_to(ranks, tmp_path / "ours", tmp_path / "theirs", "shard_gb=3e-5")
    expected = tensors_in(tmp_path / "ours" / "0000000003")
    for found, held, n_read in ranks.run(math.prod(sizes), begin_here, folder, args, sizes):
        assert same(found, expected)
        assert n_read == held


def peak_bytes() -> int:
    """The most memory of this process since its peak began again, mapped files included."""
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def growth_here(folder: Path) -> tuple[int, int, int]:
    """Bytes: by which memory grows while this rank loads its part, what it holds of the model, and
    by which memory grows where it then loads all of the folder."""
    mesh = start(CPU, detect_launch(), parallel := DistributedArgs(model_dtype="fp32"))
    source, args, _ = open_folder(llama, folder)
    model = parallelize_model(build_transformer(args), mesh, parallel_plan(args, 16), parallel)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have freed would be taken again
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = peak_bytes()
    model.to_empty(device="cpu")
    source.load(tensors_of(model), "model.")
    grown = peak_bytes() - before
    held = sum(part.out.nbytes for part in local_parts(tensors_of(model)))
    everything = source.whole(source.tensors)
    return grown, held, peak_bytes() - before - grown if everything else 0


def test_a_rank_loads_with_the_memory_of_its_part_and_no_more_than_one_tensor(ranks, tmp_path):
    """Of 137 MB in bfloat16, to be held in float32."""
    args = replace(a_model(dim=1024, n_heads=8, n_layers=4, multiple_of=256), vocab_size=8192)
    (tmp_path / "config.json").write_text(json.dumps(llama.to_config(args, 16)))
    tensors = llama.tensors(args).values()
    save_file({t.name: torch.randn(t.shape).bfloat16() for t in tensors}, tmp_path / SINGLE)
    one_tensor = 2 * max(math.prod(t.shape) for t in tensors)
    for grown, held, of_all in ranks.run(2, growth_here, tmp_path):
        assert held <= grown < held + one_tensor
        assert of_all > 5 * one_tensor  # the count notices more


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"dim": 48}, "model.dim = 48: must be 32"),
    ({"multiple_of": 64}, "which give a hidden size = 128: must be 88"),
    ({"rope_theta": 5e5}, "model.rope_theta = 500000.0: must be 10000.0"),
    ({"qk_norm": "per_head"}, "model.qk_norm = per_head: must be null"),
    ({"weight_tying": True}, "model.weight_tying = True: must be False"),
    ({"rope_scaling": SCALING}, "model.rope_scaling = RopeScaling(factor=4.0"),
]


def test_a_run_whose_model_is_another_is_refused_by_key_and_a_wrong_folder_by_file(ranks, tmp_path):
    ranks.run(1, save_here, tmp_path / "ours", a_model(), {})
    folder = convert_to(ranks, tmp_path / "ours", tmp_path / "theirs", "shard_gb=3e-5")
    source, _, _ = open_folder(llama, folder)
    source.check_model(a_model(), [])
    for changed, said in OTHERS:
        check = partial(source.check_model, a_model(**changed))
        refused(partial(check, []), "is not that of", said, folder)
        if "rope_theta" in changed:  # the same tensors: that can be meant
            check(["model.rope_theta"])
    # So is a folder whose files are not what it says, by its file.
    refusal = partial(refused, lambda: open_folder(llama, folder))
    index = json.loads((folder / INDEX).read_text())
    name, file = next(iter(index["weight_map"].items()))
    other = index | {"weight_map": index["weight_map"] | {name: "none.safetensors"}}
    (folder / INDEX).write_text(json.dumps(other))
    assert refusal().startswith(f"{folder / INDEX}: refers to the file none.safetensors, which ")
    (folder / INDEX).write_text(json.dumps(index))
    weights = load_file(folder / file)
    save_file({n: t[:-1] for n, t in weights.items()}, folder / file)
    assert f"{name}: (259, 32) in config.json, (258, 32) in the folder" in refusal()
    save_file({n: t.to(torch.float8_e4m3fn) for n, t in weights.items()}, folder / file)
    assert refusal().startswith(f"{folder / file}: {name} is F8_E4M3: must be of F64, F32, F16")
    save_file(weights, folder / file)
    (folder / file).write_bytes((folder / file).read_bytes()[:-1])
    assert refusal().startswith(f"{folder / file}: cannot be read as safetensors")
