"""The implementations of attention against explicit softmax attention: what each sees, layout,
scale, grouped heads and gradients. Kernels that run on CUDA alone are replaced, under torch's and
xformers' own dispatchers, by that formula; tests/ghost has which of them run, and their memory."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lingua.model.args import AttnImpl, TransformerArgs
from lingua.model.attend import Mask, attend
from lingua.model.attention import MIN_SEPARATED, build_mask, choose_attention
from lingua.model.masks import SeparateDocuments
from lingua.model.transformer import Context, TransformerBlock
from lingua.parallel.selective import selective_contexts

pytestmark = pytest.mark.quick

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
B, S, D, WINDOW = 3, 24, 8, 5
Impl = AttnImpl | Literal["one by one"]  # which long rows have


@pytest.mark.parametrize(
    ("device", "dtype", "masked", "head_dim", "expected"),
    [
        (CPU, torch.float32, True, 64, "sdpa"),
        (CPU, torch.bfloat16, False, 64, "sdpa"),
        (CUDA, torch.bfloat16, False, 64, "sdpa"),
        (CUDA, torch.bfloat16, True, 20, "flex_attention"),
        (CUDA, torch.bfloat16, True, 264, "flex_attention"),
        (CUDA, torch.float32, True, 64, "flex_attention"),
    ],
)
def test_auto_takes_one_that_serves(device, dtype, masked, head_dim, expected):
    impl, why = choose_attention("auto", head_dim, device, dtype, masked)
    assert impl == expected and why


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.11.0+cu130", "flex_attention"), ("2.12.0", "varlen"), ("2.15.0+cu132", "varlen")],
)
def test_grouped_heads_of_varlen_need_torch_2_12(monkeypatch, version, expected):
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    impl, why = choose_attention("auto", 64, CUDA, torch.bfloat16, masked=True)
    assert impl == expected and ("varlen needs torch 2.12" in why) == (version < "2.12")


def random_documents(seed: int) -> Tensor:
    """Where documents begin in B rows; the first row is one document, the last has the most."""
    chance = torch.Generator().manual_seed(seed)
    documents = torch.full((B, 7), S)
    documents[:, 0] = 0
    for row, n in enumerate((0, 3, 6)):
        starts = torch.randperm(S - 1, generator=chance)[:n] + 1
        documents[row, 1 : n + 1] = starts.sort().values
    return documents


def visible(documents: Tensor | None, window: int | None) -> Tensor:
    """bool B S S, one query and key at a time."""
    seen = torch.zeros(B, S, S, dtype=torch.bool)
    for b in range(B):
        begins = {0} if documents is None else set(documents[b].tolist())
        for query in range(S):
            key = query
            while key >= 0 and (window is None or query - key < window):
                seen[b, query, key] = True
                if key in begins:
                    break
                key -= 1
    return seen


def inputs(n_kv_heads: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a gradient, B H S D as views of B S H D, which is how projections give them."""
    chance = torch.Generator().manual_seed(seed)
    heads = (4, n_kv_heads, n_kv_heads, 4)
    made = (torch.randn(B, S, n, D, generator=chance).transpose(1, 2) for n in heads)
    q, k, v, grad = made
    return q, k, v, grad


def explicit(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Softmax attention over the keys seen (... S L) and its gradients by q, k and v, as formulas
    (Dao, 2023, section 2.1). All are ... H S D."""
    n, scale = q.shape[-3] // k.shape[-3], q.shape[-1] ** -0.5
    wide_k, wide_v = (t.repeat_interleave(n, -3) for t in (k, v))
    scores = (q @ wide_k.mT * scale).masked_fill(~seen.unsqueeze(-3), -torch.inf)
    p = scores.softmax(-1)
    d_p = grad @ wide_v.mT
    d_s = p * (d_p - (d_p * p).sum(-1, keepdim=True)) * scale
    of_heads = (d_s.mT @ q, p.mT @ grad)
    d_k, d_v = (t.unflatten(-3, (-1, n)).sum(-3) for t in of_heads)
    return p @ wide_v, d_s @ wide_k, d_k, d_v


def with_gradients(q: Tensor, k: Tensor, v: Tensor, mask: Mask, grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = attend(*leaves, mask)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def mask_of(impl: Impl, documents: Tensor | None, window: int | None) -> Mask:
    """The mask that a forward makes for documents and a window."""
    if impl == "one by one":
        first = torch.where(visible(documents, window), torch.arange(S), S).amin(-1)
        return SeparateDocuments(documents, first, window)
    if impl == "sdpa":
        args = TransformerArgs(dim=32, n_heads=4, sliding_window=window)
        return Context(args, torch.arange(S)[None], documents).set_mask(args, torch.float32)
    place = torch.arange(S)
    starts = None
    if documents is not None:
        rows = documents.tolist()
        starts = torch.tensor([[max(d for d in row if d <= at) for at in range(S)] for row in rows])
    return build_mask(impl, place, place, starts, documents, window)


def test_long_rows_on_a_cpu_have_no_dense_mask():
    args = TransformerArgs(dim=32, n_heads=4)
    for seq_len, expected in ((MIN_SEPARATED, SeparateDocuments), (MIN_SEPARATED - 1, Tensor)):
        documents = torch.tensor([[0, 7, seq_len], [0, 1, 2]])
        ctx = Context(args, torch.arange(seq_len)[None], documents)
        assert isinstance(ctx.set_mask(args, torch.float32), expected)
    assert Context(args, ctx.tokens).set_mask(args, torch.float32) is None


def of_packed(bounds: Tensor, left: int) -> Tensor:
    """bool N N: what sequences with these bounds see, `left` positions back (-1: all)."""
    at = torch.arange(int(bounds[-1]))
    own = torch.searchsorted(bounds, at, right=True)
    back = at[:, None] - at
    return (own[:, None] == own) & (back >= 0) & ((back <= left) if left >= 0 else True)


@pytest.fixture
def flash_on_the_cpu() -> Iterator[list[int]]:
    """torch's flash kernels of packed sequences as formulas. Gives the longest length of each call
    of the forward kernel."""
    calls: list[int] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
        bounds, keys, longest = rest[0], rest[1], rest[2]
        assert bounds.dtype == torch.int32 and torch.equal(bounds, keys)
        assert options["window_size_right"] == 0 and options.get("scale") is None
        assert longest >= bounds.diff().max()
        calls.append(longest)
        seen = of_packed(bounds, options["window_size_left"])
        out, *_ = explicit(*(t.transpose(0, 1) for t in (q, k, v)), seen, q.transpose(0, 1))
        unused = torch.zeros(2, dtype=torch.uint64)
        return out.transpose(0, 1).contiguous(), q.new_zeros(q.shape[:2]).T, unused, unused, unused

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
        seen = of_packed(rest[2], options["window_size_left"])
        _, *found = explicit(*(t.transpose(0, 1) for t in (q, k, v)), seen, grad.transpose(0, 1))
        return tuple(t.transpose(0, 1).contiguous() for t in found)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield calls


def block_with(mask: Callable[[int], Mask]) -> tuple[TransformerBlock, Callable[[int], Tensor]]:
    """A block, and what one step of it returns, for documents by their seed."""
    torch.manual_seed(0)
    args = TransformerArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=8)
    block = TransformerBlock(args, 0)
    for module in block.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    x = torch.randn(B, S, 32)

    def step(seed: int) -> Tensor:
        ctx = Context(args, torch.arange(S)[None], random_documents(seed))
        ctx.mask = mask(seed)
        out = block(x, ctx)
        block.zero_grad()
        out.square().sum().backward()
        return out.detach()

    return block, step


@pytest.mark.parametrize("kind", ["varlen", "one by one"])
def test_compiled_blocks_keep_one_graph_over_documents(flash_on_the_cpu, kind):
    """The number of documents differs from one micro-batch to the next."""

    def mask(seed: int) -> Mask:
        documents = random_documents(seed)[:, : 7 - seed % 3].contiguous()
        return mask_of(kind, documents, None if kind == "varlen" else WINDOW)

    _, step = block_with(mask)
    expected = [step(seed) for seed in range(4)]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    block, step = block_with(mask)
    block.compile(backend="aot_eager")
    for seed, out in enumerate(expected):
        torch.testing.assert_close(step(seed), out, rtol=1e-5, atol=1e-6)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("impl", ["varlen", "one by one"])
def test_checkpointing_changes_no_gradient_and_selective_keeps_results(flash_on_the_cpu, impl):
    documents = random_documents(1)
    mask = mask_of(impl, documents, None)
    *qkv, grad = inputs(2)
    expected = explicit(*qkv, visible(documents, None), grad)[1:]
    keep = {"context_fn": selective_contexts}
    for options, calls in (({}, 2), (keep, 1)):
        flash_on_the_cpu.clear()
        leaves = [t.detach().requires_grad_() for t in qkv]
        out = checkpoint(attend, *leaves, mask, use_reentrant=False, **options)
        for found, theirs in zip(torch.autograd.grad(out, leaves, grad), expected, strict=True):
            torch.testing.assert_close(found, theirs, rtol=1e-5, atol=2e-6)
        assert len(flash_on_the_cpu) == calls * (impl == "varlen")


def test_compiled_flex_attention_keeps_one_graph_over_documents():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        q, k, v, grad = inputs(2)
        documents = random_documents(seed)
        found = compiled(q, k, v, mask_of("flex_attention", documents, WINDOW))
        expected, *_ = explicit(q, k, v, visible(documents, WINDOW), grad)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("seq_len", [1, 128, 700, 1024])
def test_blocks_are_those_that_torch_finds(seq_len):
    from torch.nn.attention.flex_attention import create_block_mask

    place = torch.arange(seq_len)
    chance = torch.Generator().manual_seed(seq_len)
    for length, window in product((None, 3, 90, 333), (None, 1, 128, 200, 300)):
        starts = None
        if length is not None:  # tokens of a document, on average
            begins = torch.rand(2, seq_len, generator=chance) < 1 / length
            starts = torch.where(begins, place, 0).cummax(dim=1).values
        ours = build_mask("flex_attention", place, place, starts, None, window).mask
        rows = None if starts is None else 2
        theirs = create_block_mask(ours.mask_mod, rows, None, seq_len, seq_len, "cpu")
        assert torch.equal(ours.to_dense(), theirs.to_dense())
        # Those that are seen as a whole, for which the kernel asks nothing.
        for found, expected in zip(full(ours), full(theirs), strict=True):
            assert torch.equal(found, expected)


def full(mask: Any) -> Iterator[Tensor]:
    """The indices of the full blocks, row by row of blocks."""
    counts, indices = mask.full_kv_num_blocks, mask.full_kv_indices
    for count, row in zip(counts.flatten(), indices.flatten(0, 2), strict=True):
        yield row[:count].sort().values


def by_xformers(inp: Any, op: Any) -> Tensor:
    """The formula on the bias as xformers materializes it: of 1 N H D, and the same layout back."""
    from xformers.ops.fmha import attn_bias

    inp.validate_inputs()
    assert inp.scale is None and inp.p == 0
    bias, n = inp.attn_bias, inp.query.shape[1]
    lengths = bias.q_seqinfo.seqstart.diff().tolist()
    own = attn_bias.BlockDiagonalCausalMask.from_seqlens(lengths, device=CPU)
    if isinstance(bias, attn_bias.BlockDiagonalCausalLocalAttentionMask):
        own = own.make_local_attention(bias._window_size)
    q, k, v = (t.transpose(1, 2) for t in (inp.query, inp.key, inp.value))
    scores = q @ k.mT * q.shape[-1] ** -0.5 + own.materialize((n, n))
    return (scores.softmax(-1) @ v).transpose(1, 2)


# the documents, or none; the window; heads of keys and values
CASES = [(None, None, 4), (None, WINDOW, 1), (0, None, 1), (0, WINDOW, 2), (1, 1, 4), (1, S, 2)]
IMPLS = ("sdpa", "one by one", "flex_attention", "varlen", "fmha")


@pytest.mark.parametrize(
    ("impl", "seed", "window", "n_kv_heads"),
    [(i, *c) for i in IMPLS for c in CASES if i != "one by one" or c[0] is not None],
)
def test_it_is_explicit(monkeypatch, flash_on_the_cpu, impl, seed, window, n_kv_heads):
    """Of flex_attention the forward: torch has no backward of it on a CPU."""
    if impl == "fmha":
        pytest.importorskip("xformers.ops")
        monkeypatch.setattr("xformers.ops.fmha._memory_efficient_attention", by_xformers)
    documents = None if seed is None else random_documents(seed)
    *qkv, grad = inputs(n_kv_heads)
    mask = mask_of(impl, documents, window)
    if impl == "flex_attention":
        with torch.compiler.set_stance("force_eager"):
            found = (attend(*qkv, mask),)
    else:
        found = with_gradients(*qkv, mask, grad)
    expected = explicit(*qkv, visible(documents, window), grad)
    for ours, theirs in zip(found, expected[: len(found)], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
    control = explicit(*qkv, visible(random_documents(9), 3), grad)
    assert (found[0] - control[0]).abs().max() > 1e-2
    assert flash_on_the_cpu == [S] * (impl == "varlen")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_xformers_refuses_our_calls_for_the_device_alone(monkeypatch, window, dtype):
    pytest.importorskip("xformers.ops")
    from xformers.ops import fmha

    seen: list[Any] = []

    def note(inp: Any, op: Any) -> Tensor:
        seen.append(inp)
        return inp.query

    monkeypatch.setattr(fmha, "_memory_efficient_attention", note)
    q, k, v = (torch.randn(2, 256, n, 64, dtype=dtype).transpose(1, 2) for n in (8, 2, 2))
    documents = torch.tensor([[0, 100], [0, 256]])
    place = torch.arange(256)
    attend(q, k, v, build_mask("fmha", place, place, None, documents, window))
    families = (fmha.flash, fmha.cutlass) if dtype == torch.bfloat16 else (fmha.cutlass,)
    for family in families:
        for operator in (family.FwOp, family.BwOp):
            for reason in operator.not_supported_reasons(seen[0]):
                assert reason.startswith(("device=cpu", "operator wasn't built", "bf16 is only"))
