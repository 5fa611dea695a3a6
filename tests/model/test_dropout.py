"""Dropout's mask: by its formula in whole numbers, its rate, and what it depends on."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._inductor import metrics
from torch._inductor.utils import run_and_get_code

from apps.main.config import ModelArgs
from apps.main.transformer import build_transformer
from apps.mtp.model import ModelArgs as ManyArgs
from apps.mtp.model import build_multi_token
from lingua.base.hashing import hash_bits, key_of
from lingua.model.args import TransformerArgs
from lingua.model.transformer import Context, Dropout, kept_elements
from lingua.parallel.init import init_parameters
from tests.base.test_hashing import split_mix
from tests.forks.looped import Looped
from tests.forks.looped import ModelArgs as LoopedArgs

CPU = torch.device("cpu")
SMALL = TransformerArgs(dim=32, n_layers=2, n_heads=4, multiple_of=8, dropout=0.25)
ROWS, SEQ, DIM = 3, 40, 257  # of a mask: 30,840 elements


def kept(
    p: float = 0.25,
    site: str = "attention",
    block: str = "layers.0",
    step: int = 1,
    seed: int = 7,
    rows: Tensor | None = None,
    seq: int = SEQ,
) -> Tensor:
    """Which elements of B S E stay."""
    rows = torch.arange(ROWS) if rows is None else rows
    noise = hash_bits(key_of(seed, "noise", step), rows)
    ctx = Context(SMALL, torch.arange(seq)[None], noise=noise).at(block)
    return Dropout(p, site)(torch.ones(len(rows), seq, DIM), ctx.noise) != 0


@pytest.mark.parametrize(
    ("seed", "step", "block", "site"),
    [(7, 1, "layers.0", "attention"), (8, 2, "layers.1", "feed_forward")],
)
def test_an_element_is_kept_by_the_hash_of_where_it_is(seed, step, block, site):
    found = kept(0.25, site, block, step, seed, rows=torch.tensor([5, 2**40, -1]))
    for b, row in enumerate((5, 2**40, -1)):
        for s in (0, 1, SEQ - 1):
            key = split_mix(split_mix(key_of(seed, "noise", step), row), s)
            key = split_mix(key_of(site), split_mix(key_of(block), key))
            for e in range(DIM):
                # signed, the lowest quarter of all 64-bit numbers begins at -2^63
                assert found[b, s, e] == (not 2**63 <= split_mix(key, e) < 2**63 + 2**62)


def test_what_is_kept_is_scaled_so_that_the_mean_stays():
    x = torch.rand(ROWS, SEQ, DIM, generator=torch.Generator().manual_seed(1)).requires_grad_()
    noise = Context(SMALL, torch.arange(SEQ)[None], noise=torch.arange(ROWS)).noise
    out = Dropout(0.2, "attention")(x, noise)
    mask = out != 0
    torch.testing.assert_close(out[mask], x[mask] / 0.8)
    out.sum().backward()
    torch.testing.assert_close(x.grad, mask / 0.8)
    assert Dropout(0.2, "attention")(x.bfloat16(), noise).dtype == torch.bfloat16


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_the_rate_is_p(p):
    mask = kept(p, rows=torch.arange(30))
    n = mask.numel()
    assert abs((~mask).sum().item() - n * p) < 4 * math.sqrt(n * p * (1 - p))
    for axis in range(3):  # along each axis alone too
        m = n // mask.shape[axis]
        worst = (~mask).float().mean([a for a in range(3) if a != axis]).sub(p).abs().max().item()
        assert worst < 6 * math.sqrt(p * (1 - p) / m) + 1 / m


def agreement(one: Tensor, other: Tensor) -> float:
    """In standard deviations from what independent masks of p = 1/2 have; equal ones: 175."""
    n = one.numel()
    return ((one == other).sum().item() - n / 2) / math.sqrt(n / 4)


def test_compiled_it_has_the_same_bits():
    noise = Context(SMALL, torch.arange(SEQ)[None], noise=torch.arange(ROWS)).noise
    dropout, x = Dropout(0.25, "attention"), torch.rand(ROWS, SEQ, DIM)
    compiled = torch.compile(dropout, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, noise), dropout(x, noise))


@pytest.mark.soak  # a C++ compiler takes half a minute
def test_its_kernels_have_the_same_bits():
    """On the CPU an operator, on CUDA arithmetic in the kernel that uses it. The code of the latter
    for the CPU is right for features that fill its vector registers."""
    noise = Context(SMALL, torch.arange(SEQ)[None], noise=torch.arange(ROWS)).noise
    dropout, x = Dropout(0.25, "attention"), torch.rand(ROWS, SEQ, 64)
    compiled, [code] = run_and_get_code(torch.compile(dropout), x, noise)
    assert torch.equal(compiled, dropout(x, noise)) and "lingua.keep" in code

    def fused(x: Tensor, noise: Tensor) -> Tensor:
        keep = kept_elements(noise, dropout.site, x.shape[-1], dropout.limit)
        return torch.where(keep, x / (1 - dropout.p), 0.0)

    metrics.reset()
    compiled, [code] = run_and_get_code(torch.compile(fused), x, noise)
    assert torch.equal(compiled, dropout(x, noise))
    assert metrics.generated_kernel_count == 1 and "torch.bool" not in code


def test_without_noise_nothing_is_dropped():
    args = ModelArgs(dim=32, n_layers=2, n_heads=4, multiple_of=8, vocab_size=50)
    plain, dropping = (build_transformer(replace(args, dropout=p)) for p in (0.0, 0.3))
    for model in (plain, dropping):
        init_parameters(model, 1, CPU)
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(1))
    assert torch.equal(dropping(tokens), plain(tokens))
    noise = hash_bits(3, torch.arange(2))
    dropped = dropping(tokens, noise=noise)
    assert torch.equal(dropped, dropping(tokens, noise=noise))
    assert (dropped - plain(tokens)).abs().max() > 0.1


SIZES = {"dim": 32, "n_layers": 3, "n_heads": 4, "vocab_size": 50, "dropout": 0.5}


@pytest.mark.parametrize(
    ("model", "n_calls"),
    [
        (build_multi_token(ManyArgs(**SIZES, head_layers=2), n_heads=3), 1 + 3 * 2),
        (build_transformer(LoopedArgs(**SIZES, n_loops=3), Looped), 3 * 3),
    ],
    ids=["heads", "looped"],
)
def test_every_sublayer_of_every_call_of_a_block_is_a_site_of_its_own(model, n_calls):
    init_parameters(model, 1, CPU)
    masks = []
    for module in model.modules():
        if isinstance(module, Dropout):
            module.register_forward_hook(lambda m, args, out: masks.append(out != 0))
    tokens = torch.zeros(2, 40, dtype=torch.int64)
    for _ in range(2):  # a forward does not depend on those before it
        model(tokens, tokens.expand(3, -1, -1), noise=hash_bits(3, torch.arange(2)))
    assert all(torch.equal(*pair) for pair in zip(masks, masks[2 * n_calls :], strict=False))
    del masks[2 * n_calls :]
    assert len(masks) == 2 * n_calls
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert abs(agreement(one, other)) < 5
