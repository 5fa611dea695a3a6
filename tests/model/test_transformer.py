"""The building blocks against formulas written out: rotary embedding as complex numbers, FLOPs as
torch counts them. Attention: test_attention.py."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from apps.main.config import ModelArgs
from apps.main.transformer import Transformer
from lingua.model.args import RopeScaling, TransformerArgs
from lingua.model.transformer import Context, RMSNorm, flops_per_token, rotary_frequencies, rotate

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")
SMALL = TransformerArgs(dim=32, n_layers=2, n_heads=4, multiple_of=8)


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
    found = rotary_frequencies(args, CPU, args.heads()[2])
    torch.testing.assert_close(found, scaled, rtol=2e-7, atol=0)
    plain, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    unscaled = rotary_frequencies(replace(args, rope_scaling=None), CPU, args.heads()[2])
    assert torch.equal(unscaled, plain)
    ratio = scaled / plain
    assert (ratio == 1).any() and (ratio == 1 / 32).any() and ((ratio < 1) & (ratio > 0.04)).any()


def test_bfloat16_is_turned_in_float32():
    x = torch.randn(1, 2000, 1, 8).bfloat16()
    ctx = Context(replace(SMALL, head_dim=8), torch.arange(2000)[None])
    assert ctx.cos.dtype == ctx.sin.dtype == torch.float32
    result = rotate(x, ctx.cos, ctx.sin)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, rotate(x.float(), ctx.cos, ctx.sin).bfloat16())


def normalised_and_turned(norm: torch.nn.RMSNorm, x: Tensor, ctx: Context) -> Tensor:
    return rotate(norm(x).unflatten(-1, (4, 8)), ctx.cos, ctx.sin)


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("compiled", [False, True])
def test_norm_and_rotation_and_their_gradients_are_those_of_float64(dtype, close, compiled):
    """Compiled in one graph, without a warning."""
    torch.manual_seed(0)
    x, norm = torch.randn(2, 50, 32), RMSNorm(32, eps=0.1)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    upstream, ctx = torch.randn(2, 50, 4, 8), Context(SMALL, torch.arange(50)[None])

    wide, weight = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    frequencies = rotary_frequencies(SMALL, CPU, SMALL.heads()[2])
    angle = torch.outer(torch.arange(50.0), frequencies).double()
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    scaled = wide / (wide.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight
    expected = torch.view_as_real(torch.view_as_complex(scaled.view(2, 50, 4, 4, 2)) * turn)
    gradients = torch.autograd.grad(expected.flatten(-2), (wide, weight), upstream.double())

    x, norm = x.to(dtype).requires_grad_(), norm.to(dtype)
    work = normalised_and_turned
    if compiled:
        work = torch.compile(work, fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings(action="error"):
        out = work(norm, x, ctx)
        found = torch.autograd.grad(out, (x, norm.weight), upstream.to(dtype))
    for part, exact in zip((out, *found), (expected.flatten(-2), *gradients), strict=True):
        assert part.dtype == dtype
        assert (part - exact).abs().max() < close * exact.abs().max()
        assert (1.05 * part - exact).abs().max() > close * exact.abs().max()


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
