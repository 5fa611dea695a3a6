"""The building blocks against formulas written out: attention by loops over positions, rotary
embedding as complex numbers, sizes as published, FLOPs as torch counts them."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from apps.main.transformer import ModelArgs, Transformer
from lingua.attention import attend
from lingua.transformer import (
    Attention,
    Context,
    RopeScaling,
    TransformerArgs,
    flops_per_token,
    rotary_frequencies,
    rotate,
)

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")
SMALL = TransformerArgs(dim=32, n_layers=2, n_heads=4, multiple_of=8)


def explicit_attention(q, k, v, window: int):
    """Softmax attention in float64, one query at a time. q: B H S D; k, v: B H' S D."""
    out = torch.empty(q.shape, dtype=torch.float64)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        kv_head = h * k.shape[1] // q.shape[1]  # consecutive query heads share one
        seen = range(max(0, i - window + 1), i + 1)  # itself and window - 1 before it
        scores = [float(q[b, h, i].double() @ k[b, kv_head, j].double()) for j in seen]
        weights = torch.tensor(scores, dtype=torch.float64).div(q.shape[-1] ** 0.5).softmax(0)
        out[b, h, i] = sum(
            w * v[b, kv_head, j].double() for w, j in zip(weights, seen, strict=True)
        )
    return out


# ---------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 8, 9, 100])
def test_a_token_sees_itself_and_at_most_window_minus_one_before(n_kv_heads, window):
    torch.manual_seed(0)
    q = torch.randn(2, 4, 9, 6)
    k, v = torch.randn(2, 2, n_kv_heads, 9, 6)
    mask = Context(replace(SMALL, sliding_window=window), 9, CPU).mask
    expected = explicit_attention(q, k, v, window or 9)
    torch.testing.assert_close(attend(q, k, v, mask).double(), expected, rtol=1e-5, atol=1e-6)
    last = attend(q[:, :, -1:], k, v, None if mask is None else mask[-1:])  # as while generating
    torch.testing.assert_close(last.double(), expected[:, :, -1:], rtol=1e-5, atol=1e-6)
    if window == 5:  # the tolerance tells windows apart that differ by one
        off = explicit_attention(q, k, v, window + 1)
        assert (off - expected).abs().max() > 1e-2


def test_a_window_that_hides_nothing_costs_no_mask():
    assert Context(replace(SMALL, sliding_window=9), 9, CPU).mask is None
    assert Context(replace(SMALL, sliding_window=8), 9, CPU).mask is not None


def test_attention_is_causal():
    torch.manual_seed(0)
    attention = Attention(SMALL, 1.0)
    x = torch.randn(1, 8, 32)
    changed = x.clone()
    changed[:, 5:] += 1.0
    for window in (None, 3):
        ctx = Context(replace(SMALL, sliding_window=window), 8, CPU)
        before, after = attention(x, ctx), attention(changed, ctx)
        assert torch.equal(before[:, :5], after[:, :5])
        assert not torch.allclose(before[:, 5], after[:, 5])


# ----------------------------------------------------------------------------------- rotation


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_pairs_of_neighbours_turn_as_complex_numbers(theta):
    """Meta's formula: view (2i, 2i+1) as a complex number, times exp(i * position * frequency)."""
    torch.manual_seed(0)
    args = replace(SMALL, head_dim=10, rope_theta=theta)
    x = torch.randn(2, 50, 3, 10)
    ctx = Context(args, 50, CPU)
    frequency = theta ** (-torch.arange(0, 10, 2, dtype=torch.float64) / 10)
    angle = torch.outer(torch.arange(50, dtype=torch.float64), frequency)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    expected = torch.view_as_real(torch.view_as_complex(x.double().view(2, 50, 3, 5, 2)) * turn)
    result = rotate(x, ctx.cos, ctx.sin)
    torch.testing.assert_close(result.double(), expected.flatten(-2), rtol=0, atol=5e-5)
    assert torch.equal(result[:, 0], x[:, 0])  # position 0 is not turned


def test_frequencies_are_those_of_transformers_scaled_as_in_llama_3_too():
    """Of Llama 3.1 and 3.2, which keep the high frequencies, divide the low ones, and blend."""
    theirs = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0}
    theirs |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(
        hidden_size=2048,
        num_attention_heads=32,
        head_dim=64,
        max_position_embeddings=131072,
        rope_parameters=theirs | {"original_max_position_embeddings": 8192},
    )
    scaling = RopeScaling(factor=32.0, original_seq_len=8192)
    args = TransformerArgs(dim=2048, n_heads=32, rope_theta=500000.0, rope_scaling=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    torch.testing.assert_close(rotary_frequencies(args, CPU), scaled, rtol=2e-7, atol=0)
    plain, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    assert torch.equal(rotary_frequencies(replace(args, rope_scaling=None), CPU), plain)
    ratio = scaled / plain
    assert (ratio == 1).any() and (ratio == 1 / 32).any() and ((ratio < 1) & (ratio > 0.04)).any()


def test_scores_depend_on_the_distance_alone():
    torch.manual_seed(0)
    ctx = Context(replace(SMALL, head_dim=8), 40, CPU)
    q, k = (torch.randn(8).expand(1, 40, 1, 8) for _ in range(2))
    scores = rotate(q, ctx.cos, ctx.sin)[0, :, 0] @ rotate(k, ctx.cos, ctx.sin)[0, :, 0].T
    for distance in (0, 1, 17):
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=1e-4)
    assert (scores.diagonal(-1)[0] - scores[0, 0]).abs() > 1e-2


def test_bfloat16_is_turned_in_float32():
    x = torch.randn(1, 2000, 1, 8).bfloat16()
    ctx = Context(replace(SMALL, head_dim=8), 2000, CPU)
    assert ctx.cos.dtype == ctx.sin.dtype == torch.float32
    result = rotate(x, ctx.cos, ctx.sin)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, rotate(x.float(), ctx.cos, ctx.sin).bfloat16())


# ------------------------------------------------------------------------------ sizes and FLOPs


@pytest.mark.parametrize(
    ("dim", "multiple_of", "multiplier", "hidden"),
    [
        (2048, 256, None, 5632),  # Meta Lingua's 1B, TinyLlama
        (4096, 256, None, 11008),  # Llama 7B
        (5120, 256, None, 13824),  # Llama 13B
        (6656, 256, None, 17920),  # Llama 33B
        (8192, 256, None, 22016),  # Llama 65B
        (8192, 4096, 1.3, 28672),  # Llama 2 and 3 70B
        (4096, 1024, 1.3, 14336),  # Llama 3 8B
        (2048, 256, 1.5, 8192),  # Llama 3.2 1B
        (3072, 256, 1.0, 8192),  # Llama 3.2 3B
        (3, 1, None, 8),
        (3, 7, 0.3, 7),
    ],
)
def test_the_feed_forward_has_the_published_size(dim, multiple_of, multiplier, hidden):
    args = TransformerArgs(dim=dim, multiple_of=multiple_of, ffn_dim_multiplier=multiplier)
    assert args.hidden_dim() == hidden


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {"n_heads": 4},
        {"n_heads": 4, "n_kv_heads": 2},
        {"n_heads": 3, "n_kv_heads": 1, "head_dim": 6},
        {"n_heads": 4, "sliding_window": 1},
        {"n_heads": 4, "sliding_window": 7},
        {"n_heads": 4, "sliding_window": 999, "n_kv_heads": 1},
    ],
)
def test_flops_are_what_torch_counts_for_forward_and_backward(sizes, tied):
    args = ModelArgs(dim=24, n_layers=3, vocab_size=50, multiple_of=8, weight_tying=tied, **sizes)
    model = Transformer(args)
    rows, seq_len = 2, 19
    tokens = torch.randint(0, 50, (rows, seq_len))
    # The math kernel is made of matrix products, which torch counts; those of attention are bmm.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens[None]).sums.sum().backward()
    counts = {op.__name__.split(".")[0]: n for op, n in counter.get_flop_counts()["Global"].items()}
    assert set(counts) == {"mm", "bmm"}
    back = torch.arange(seq_len)[:, None] - torch.arange(seq_len)
    seen = (back >= 0) & (back < (args.sliding_window or seq_len))
    # That kernel multiplies every query with every key; only the visible ones are of use.
    needed = counts["mm"] + counts["bmm"] * seen.double().mean().item()
    assert flops_per_token(args, 50, seq_len) == pytest.approx(needed / (rows * seq_len), rel=1e-12)


# ------------------------------------------------------------------------------------- refused


def test_the_defaults_and_sizes_that_fit_are_legal():
    for args in (
        SMALL,
        TransformerArgs(n_heads=8),
        TransformerArgs(head_dim=64),
        TransformerArgs(dim=50, n_heads=3, head_dim=14, n_kv_heads=1),
        replace(SMALL, sliding_window=1, ffn_dim_multiplier=0.02, init_base_std=0.02),
    ):
        assert list(args.validate()) == []


def test_a_scaling_of_frequencies_that_makes_no_sense_is_refused_by_name():
    for changed, key in (
        ({"factor": 0.5}, "factor"),
        ({"original_seq_len": 0}, "original_seq_len"),
        ({"low_freq_factor": 4.0}, "low_freq_factor"),
        ({"high_freq_factor": math.inf}, "low_freq_factor"),
    ):
        assert [name for name, _ in replace(RopeScaling(), **changed).validate()] == [key]
    assert list(RopeScaling().validate()) == []


@pytest.mark.parametrize(
    ("changed", "key", "need"),
    [
        ({"dim": 0}, "dim", "at least 1"),
        ({"n_layers": -1}, "n_layers", "at least 1"),
        ({"n_heads": 0}, "n_heads", "at least 1"),
        ({"n_kv_heads": 0}, "n_kv_heads", "at least 1"),
        ({"head_dim": 0}, "head_dim", "at least 1"),
        ({"multiple_of": 0}, "multiple_of", "at least 1"),
        ({"norm_eps": 0.0}, "norm_eps", "above 0"),
        ({"rope_theta": math.inf}, "rope_theta", "finite"),
        ({"init_base_std": -0.02}, "init_base_std", "above 0"),
        ({"ffn_dim_multiplier": -1.0}, "ffn_dim_multiplier", "must give 1 to 16,777,216 hidden"),
        ({"ffn_dim_multiplier": 1e-6}, "ffn_dim_multiplier", "must give 1 to 16,777,216 hidden"),
        ({"ffn_dim_multiplier": math.inf}, "ffn_dim_multiplier", "hidden features"),
        ({"dim": 1 << 30}, "dim", "at most 16,777,216"),
        ({"n_layers": 10**8}, "n_layers", "at most 4,096"),
        ({"n_heads": 2**20, "head_dim": 2**20}, "head_dim", "at most 16,777,216"),
        ({"sliding_window": 0}, "sliding_window", "at least 1"),
        ({"n_heads": None}, "n_heads", "must be given when model.head_dim is null"),
        ({"n_heads": None, "head_dim": 6}, "head_dim", "must divide model.dim = 32"),
        ({"n_heads": 5}, "n_heads", "must divide model.dim = 32"),
        ({"n_heads": 32}, "n_heads", "heads of 1 features: rotary embedding needs pairs"),
        ({"head_dim": 7}, "head_dim", "heads of 7 features: rotary embedding needs pairs"),
        ({"n_kv_heads": 3}, "n_kv_heads", "must divide model.n_heads = 4"),
        ({"n_kv_heads": 8}, "n_kv_heads", "must divide model.n_heads = 4"),
    ],
)
def test_what_attention_cannot_do_is_refused_by_name(changed, key, need):
    validate = list(replace(SMALL, **changed).validate())
    assert [k for k, _ in validate] == [key], validate
    assert need in validate[0][1]
