"""The model of apps/main against transformers' Llama and Mistral on the same weights, and against
the deviations its initialisation promises. Published parameter counts: test_config.py."""

import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from apps.main.config import ModelArgs
from apps.main.hugging_face import llama
from apps.main.transformer import Transformer, build_transformer, parallel_plan
from lingua.data import IGNORE
from lingua.parallel.init import init_parameters
from tests.apps.meshes import on_mesh

CPU = torch.device("cpu")
SEQ = 17
CLOSE = 1e-5  # of logits, losses and gradients
CASES = {
    "multi-head": {},
    "grouped-query": {"n_kv_heads": 2},
    "multi-query": {"n_kv_heads": 1},
    "tied": {"weight_tying": True},
    "rope_theta": {"rope_theta": 500.0},
    "norm_eps": {"norm_eps": 0.1},
    "odd sizes": {"dim": 42, "n_heads": 3, "vocab_size": 37, "multiple_of": 5, "n_layers": 3},
    "head_dim not dim / n_heads": {"dim": 36, "n_heads": 6, "head_dim": 10, "n_kv_heads": 3},
    "narrow heads": {"n_heads": 2, "head_dim": 6},
    "ffn_dim_multiplier": {"ffn_dim_multiplier": 1.3},
    # of Mistral
    **{f"window {n}": {"sliding_window": n, "n_kv_heads": 2} for n in (2, 5, SEQ - 1, SEQ, 100)},
}


def model_args(**changed) -> ModelArgs:
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 61, "multiple_of": 8}
    return ModelArgs(**(sizes | changed))


def initialised(args: ModelArgs, seed: int = 1) -> Transformer:
    model = build_transformer(args)
    init_parameters(model, seed, CPU)
    with torch.no_grad():  # norms all ones and biases all zeros would hide what is left out
        for name, p in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                p.copy_(torch.linspace(0.5, 1.5, len(p)))
    return model


def reference(model: Transformer, reordered: bool = True) -> nn.Module:
    """transformers' model with the weights of ours, in its order of rotary features or in ours."""
    config = llama.to_config(model.args, SEQ)
    kind = getattr(transformers, config["architectures"][0])
    other = kind._from_config(kind.config_class(**config), attn_implementation="eager")
    parameters = dict(other.named_parameters())
    with torch.no_grad():
        for name, t in llama.tensors(model.args).items():
            p = model.get_parameter(name)
            parameters.pop(t.name).copy_(t.reorder(p, to_hf=True) if reordered else p)
    assert not parameters, f"not set: {parameters.keys()}"
    return other


def tokens_and_targets(args: ModelArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the next ones as targets, some of which do not count; the last has no next."""
    tokens = torch.randint(0, args.vocab_size, (3, SEQ), generator=torch.Generator().manual_seed(5))
    targets = torch.full_like(tokens, IGNORE)
    targets[:, :-1] = tokens[:, 1:]
    targets[0, 3:7] = targets[2, 0] = IGNORE
    return tokens, targets


def compare(model: Transformer, other: nn.Module) -> dict[str, float]:
    """Largest differences, relative to the largest value: of logits, loss and each gradient."""
    tokens, targets = tokens_and_targets(model.args)
    sums, counts, *_ = model(tokens, targets[None])
    (sums / counts).sum().backward()
    # transformers shifts the labels itself and takes the mean over those that are not -100
    labels = torch.cat((torch.full_like(tokens[:, :1], IGNORE), targets[:, :-1]), 1)
    expected = other(input_ids=tokens, labels=labels)
    expected.loss.backward()

    def apart(a: torch.Tensor, b: torch.Tensor) -> float:
        return ((a - b).abs().max() / b.abs().max()).item()

    grads = {name: p.grad for name, p in other.named_parameters()}
    tensors = llama.tensors(model.args)
    differences = {"logits": apart(model(tokens), expected.logits)}
    differences["loss"] = apart(sums / counts, expected.loss)
    for name, p in model.named_parameters():
        t = tensors[name]
        differences[name] = apart(t.reorder(p.grad, to_hf=True), grads[t.name])
    return differences


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_equal_those_of_transformers(case):
    model = initialised(model_args(**CASES[case]))
    differences = compare(model, reference(model))
    assert len(differences) == 2 + len(list(model.parameters()))
    assert max(differences.values()) < CLOSE, differences


@pytest.mark.parametrize(
    "control", ["rotary layout", "rope_theta", "norm_eps", "window", "a norm's weight", "kv heads"]
)
def test_the_comparison_sees_a_mistake(control):
    model = initialised(model_args(n_kv_heads=2, sliding_window=6 if control == "window" else None))
    other = reference(model, reordered=control != "rotary layout")
    if control == "rope_theta":
        model.args.rope_theta *= 1.01
    elif control == "norm_eps":
        model.norm.eps *= 100
    elif control == "window":
        model.args.sliding_window = 7
    elif control == "a norm's weight":
        with torch.no_grad():
            model.layers[1].ffn_norm.weight[3] += 0.01
    elif control == "kv heads":  # head h attends with kv head h % 2 in place of h // 2
        for layer in model.layers:
            for w in (layer.attention.wq, layer.attention.wo):
                w.weight.data = w.weight.detach().clone()
            order = torch.tensor([0, 2, 1, 3])
            wq = layer.attention.wq.weight.data.unflatten(0, (4, 8))
            layer.attention.wq.weight.data = wq[order].flatten(0, 1)
            wo = layer.attention.wo.weight.data.unflatten(1, (4, 8))
            layer.attention.wo.weight.data = wo[:, order].flatten(1, 2)
    differences = compare(model, other)
    assert differences["logits"] > 10 * CLOSE, differences


CUT_OFF = 0.98658  # deviation of a standard normal that is cut off at three deviations

FACTORS = {  # of the depth, with three blocks
    "disabled": lambda depth: 1.0,
    "global_depth": lambda depth: math.sqrt(2 * 4),
    "current_depth": lambda depth: math.sqrt(2 * (depth + 1)),
    "dim_ratio": lambda depth: 128 / 4096,
}


@pytest.mark.parametrize("base", [None, 0.05])
@pytest.mark.parametrize("factor", [*FACTORS, "zero"])
def test_every_weight_has_the_deviation_that_the_options_say(factor, base):
    args = ModelArgs(
        dim=128, n_layers=3, n_heads=4, head_dim=16, vocab_size=200, multiple_of=8,
        init_std_factor=factor, init_base_std=base,
    )  # fmt: skip
    model = build_transformer(args)
    init_parameters(model, 3, CPU)
    hidden = args.hidden_dim()
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(p, torch.ones(128)), name
            continue
        inputs = {"wo": 64, "w2": hidden}.get(name.split(".")[-2], 128)
        std = base or inputs**-0.5
        if name.endswith(("wo.weight", "w2.weight")):
            if factor == "zero":
                assert not p.any(), name
                continue
            std /= FACTORS[factor](int(name.split(".")[1]))
        spread = p.numel() ** -0.5
        assert p.std().item() == pytest.approx(CUT_OFF * std, rel=4 * spread), name
        assert abs(p.mean().item()) < 5 * std * spread, name
        # of 8,192 draws at least, some come close to the cut and none beyond
        assert 2.7 * std < p.abs().max().item() <= 3 * std * (1 + 1e-6), name


def loss_of(model: nn.Module) -> torch.Tensor:
    tokens, targets = tokens_and_targets(model_args())
    return model(tokens, targets[None]).sums


def parallelised_bf16() -> float:
    """The loss sum under FSDP's mixed precision, on one rank."""
    args = model_args()
    plan = parallel_plan(args, SEQ)
    model, _ = on_mesh(build_transformer(args), plan, (1, 1, 1), model_dtype="bf16")
    return loss_of(model).item()


def test_in_bfloat16_the_loss_is_float32_and_mixed_precision_changes_nothing_else(ranks):
    """FSDP computes in bfloat16 just what the plain model cast to it does: the rotary angles, which
    no parameter holds, stay float32 in both."""
    model = build_transformer(model_args())
    init_parameters(model, 1, CPU)
    in_float32 = loss_of(model)
    model.bfloat16()
    tokens, targets = tokens_and_targets(model.args)
    logits, sums = model(tokens), loss_of(model)
    assert logits.dtype == torch.bfloat16 and sums.dtype == torch.float32
    exact = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="sum")
    assert sums.item() == pytest.approx(exact.item(), rel=1e-6)
    assert sums.item() == pytest.approx(in_float32.item(), rel=0.01)
    assert ranks.run(1, parallelised_bf16) == [sums.item()]
