"""Models of other families than Llama: what transformers computes with a folder of its own is what
is computed here, on a mesh too."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from apps.main.hugging_face import from_config, llama
from apps.main.transformer import build_transformer, parallel_plan
from lingua.checkpoint.tensors import tensors_of
from lingua.parallel.init import canonical_name, init_parameters
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.mesh import DistributedArgs
from lingua.parallel.parallelize import parallelize_model
from lingua.tools.exchange.hugging_face import open_folder

CPU = torch.device("cpu")
SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 53, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "eos_token_id": None}
K_NORM = "model.layers.1.self_attn.k_norm.weight"
SIZES |= {"pad_token_id": None, "bos_token_id": None}
WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
SCALED = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.0}
SCALED |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
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
