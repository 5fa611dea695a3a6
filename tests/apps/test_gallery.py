"""apps/fastrnn and apps/mamba: their layers against the recurrences of the papers, one position
after the other in float64; apps/mtp: each head against a plain model of its own. Documents and
generation: tests/model/test_recurrent_block.py; runs on meshes: test_matrix.py and test_exact.py.
"""

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from apps import fastrnn, mamba, mtp
from apps.fastrnn.model import MIXERS
from apps.main.config import ModelArgs as PlainArgs
from apps.main.transformer import build_transformer
from apps.mamba.model import Mamba, ssd
from apps.mtp.model import ModelArgs, MultiToken, build_multi_token
from lingua.app import App
from lingua.data import IGNORE
from lingua.model.args import TransformerArgs
from lingua.model.scan import CHUNK, CausalConv, scan
from lingua.model.transformer import Context
from lingua.parallel.init import init_parameters
from lingua.parallel.plan import check_layout
from tests.apps.runs import arguments
from tests.mistakes import refused

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")
STARTS = torch.tensor([[0, 3, 40, 70, 70], [0, 1, 64, 65, 100]])  # of documents, in rows of 100
ARGS = TransformerArgs(dim=8, n_layers=1, n_heads=2)


def context() -> Context:
    return Context(ARGS, torch.zeros(2, 100, dtype=torch.int64), STARTS)


def close(found: Tensor, expected: Tensor, tolerance: float = 3e-6) -> bool:
    return float((found - expected).detach().norm() / expected.detach().norm()) < tolerance


@pytest.mark.parametrize("seq_len", [1, CHUNK - 1, CHUNK, CHUNK + 1, 33 * CHUNK + 5])
def test_a_scan_is_its_recurrence_and_has_its_gradients(seq_len):
    """Also over decays of which a product is too small for float32, and behind one of 0; `a` is
    one for all features of a head."""
    torch.manual_seed(1)
    a = torch.rand(2, seq_len, 3, 1, dtype=torch.float64) ** 4
    a[0, seq_len // 2], a[1, seq_len // 3 :: 7] = 0, 1e-30
    a, b = a.requires_grad_(), torch.randn(2, seq_len, 3, 5, dtype=torch.float64).requires_grad_()
    h, states = torch.zeros(2, 3, 5, dtype=torch.float64), []
    for t in range(seq_len):
        h = a[:, t] * h + b[:, t]
        states.append(h)
    expected = torch.stack(states, dim=1)
    upstream = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, (a, b), upstream)
    inputs = [t.detach().float().requires_grad_() for t in (a, b)]
    found = scan(*inputs)
    assert found.dtype == torch.float32 and close(found, expected)
    found = torch.autograd.grad(found, inputs, upstream.float())
    assert close(found[1], grads[1]) and (seq_len == 1 or close(found[0], grads[0]))


def test_a_convolution_is_that_of_torch_in_each_document():
    torch.manual_seed(1)
    conv, x = CausalConv(6), torch.randn(2, 100, 6)
    conv.taps.weight.data.normal_()
    conv.bias.weight.data.normal_()
    found = conv(x, context())
    for row, starts in enumerate(STARTS.tolist()):
        for begin, end in zip(starts, [*starts[1:], 100], strict=True):
            if begin < end:
                padded = F.pad(x[row, begin:end].T, (3, 0))
                out = F.conv1d(padded, conv.taps.weight, conv.bias.weight, groups=6)
                assert close(found[row, begin:end], out.T)


@pytest.mark.parametrize("kind", MIXERS)
def test_a_layer_is_the_recurrence_of_its_paper(kind):
    layer, x = MIXERS[kind](ARGS, 1.0), torch.randn(2, 100, 8)
    init_parameters(layer, 1, CPU)
    found = layer(x, context())
    layer.double()
    ctx, x = context(), x.double()
    u, h, states = layer.conv(layer.wx(x), ctx), torch.zeros(2, 8, dtype=torch.float64), []
    for t in range(100):
        h = torch.where(ctx.begins[:, t, None], 0.0, h)
        if kind == "mingru":
            z = torch.sigmoid(layer.wz(x[:, t]))
            h = (1 - z) * h + z * u[:, t]
        elif kind == "minlstm":
            f, i = torch.sigmoid(layer.wf(x[:, t])), torch.sigmoid(layer.wi(x[:, t]))
            h = f / (f + i) * h + i / (f + i) * u[:, t]
        else:
            gates = [torch.block_diag(*w.weight) for w in (layer.r, layer.i)]
            biases = [b.weight.flatten() for b in (layer.r_bias, layer.i_bias)]
            r, i = (torch.sigmoid(u[:, t] @ w + b) for w, b in zip(gates, biases, strict=True))
            a = torch.sigmoid(layer.decay.weight.flatten()) ** (8 * r)
            h = a * h + torch.sqrt(1 - a**2) * (i * u[:, t])
        states.append(h)
    read = torch.stack(states, dim=1)
    if kind == "hawk":
        assert ((decays := torch.sigmoid(layer.decay.weight) ** 8) >= 0.899).all()
        assert (decays <= 0.9991).all()
        read = read * F.gelu(layer.wg(x), approximate="tanh")
    assert close(found, layer.wo(read), 1e-5)


def recurrence(a: Tensor, h: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, begins: Tensor):
    """What `ssd` returns, by Dao and Gu, 2024, equation 1 with a scalar a for each head."""
    y, n_heads = [], x.shape[2] // b.shape[2]
    for t in range(x.shape[1]):
        here, read = (v[:, t].repeat_interleave(n_heads, 1) for v in (b, c))  # B H N
        h = (
            torch.where(begins[:, t, None, None, None], 0.0, h)
            * (dt[:, t] * a).exp()[..., None, None]
        )
        h = h + (dt[:, t, :, None] * x[:, t])[..., None] * here[:, :, None]
        y.append((h * read[:, :, None]).sum(-1))
    return torch.stack(y, dim=1), h


@pytest.mark.parametrize("seq_len", [1, 7, 64, 200])
def test_ssd_is_the_recurrence_of_the_paper_and_has_its_gradients(seq_len):
    torch.manual_seed(1)
    kind = {"dtype": torch.float64}
    inputs = [
        -16 * torch.rand(4, **kind), torch.randn(2, 4, 3, 5, **kind),
        torch.randn(2, seq_len, 4, 3, **kind), torch.rand(2, seq_len, 4, **kind) / 5,
        torch.randn(2, seq_len, 2, 5, **kind), torch.randn(2, seq_len, 2, 5, **kind),
    ]  # fmt: skip
    begins = torch.rand(2, seq_len) < 0.03
    outcomes = []
    for function, dtype in ((recurrence, torch.float64), (ssd, torch.float32)):
        given = [t.to(dtype).requires_grad_() for t in inputs]
        out = function(*given, begins)
        scalar = sum((t * torch.arange(t.numel()).view(t.shape).cos()).sum() for t in out)
        outcomes.append((*out, *torch.autograd.grad(scalar, given)))
    assert all(close(b, a, 1e-5) for a, b in zip(*outcomes, strict=True))


def test_steps_and_decays_begin_in_the_ranges_of_the_paper():
    args = mamba.ModelArgs(dim=256, mamba=mamba.MambaArgs(head_dim=4))
    layer = Mamba(args, 1.0, None)
    init_parameters(layer, 1, CPU)
    steps, decays = F.softplus(layer.dt_bias.weight), layer.log_a.weight.exp()
    for values, low, high in ((steps.log(), 1e-3, 1e-1), (decays, 1, 16)):
        low, high = torch.tensor([low, high]).log() if values is not decays else (low, high)
        assert low - 0.01 < values.min() and values.max() < high + 0.01
        assert values.std() > 0.8 * (high - low) / 12**0.5


GALLERY: dict[str, tuple[App, dict[str, Any]]] = {
    "hawk": (fastrnn.app, {"model.n_heads": 32}),
    "mingru": (fastrnn.app, {"model.n_heads": 32, "model.cell": "mingru"}),
    "mamba": (mamba.app, {"model.layers": "[mamba, attention]"}),
}


@pytest.mark.parametrize("name", GALLERY)
def test_flops_are_those_of_the_products_that_torch_counts(name):
    """Three times those of a forward; but of pairs in a chunk, and of attention, which are causal,
    torch counts all, and it counts no elementwise arithmetic."""
    app, settings = GALLERY[name]
    sizes = {"model.dim": 256, "model.head_dim": 8, "model.n_layers": 2, "data.seq_len": 256}
    alone = {"model.n_kv_heads": "null", "model.ffn_dim_multiplier": "null"}
    args = arguments(sizes | alone | settings, app)
    built = app.build(args)
    tokens = torch.zeros(1, 256, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        built.module(tokens)
    assert 3 * counter.get_total_flops() / 256 == pytest.approx(built.flops_per_token, rel=0.1)


def test_groups_that_tensor_parallelism_does_not_divide_are_refused():
    """What else these models lack: tests/mistakes.txt."""
    states = {"model.mamba.head_dim": 11}
    built = mamba.app.build(arguments(states, mamba.app))
    refused(
        lambda: check_layout(built.module, built.plan, 2), "tp_size = 2", "model.mamba.n_groups"
    )


# ----------------------------------------------------------------------------- several tokens

HEADED = ModelArgs(dim=24, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=50, multiple_of=8)
ROWS, SEQ, HEADS = 2, 11, 3


def multi_token(args: ModelArgs, n_heads: int = HEADS) -> MultiToken:
    model = build_multi_token(args, n_heads)
    init_parameters(model, 1, CPU)
    return model


def tokens_and_targets(n_heads: int = HEADS) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as the loader cuts them: view v + 1 is the input moved on by v + 1 tokens."""
    row = torch.randint(0, 50, (ROWS, SEQ + n_heads), generator=torch.Generator().manual_seed(3))
    targets = torch.stack([row[:, v + 1 : v + 1 + SEQ] for v in range(n_heads)])
    targets[0, 0, 2] = targets[-1, 1, -1] = IGNORE
    return row[:, :SEQ], targets


def plain_model_of(model: MultiToken, head: int):
    """apps.main's model that has the trunk and the blocks of one head as its layers, and the name
    that each of its parameters has in `model`."""
    args = model.args
    trunk = args.n_layers - args.head_layers
    fields = {k: v for k, v in asdict(args).items() if k != "head_layers"}
    plain = build_transformer(PlainArgs(**fields)).to_empty(device="cpu")
    if args.weight_tying:
        plain.output.weight = plain.tok_embeddings.weight
    names = {}
    for name, _ in plain.named_parameters():
        names[name] = name
        if head and name.startswith("layers.") and int(name.split(".")[1]) >= trunk:
            _, depth, rest = name.split(".", 2)
            names[name] = f"extra_heads.{head - 1}.{int(depth) - trunk}.{rest}"
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in plain.named_parameters():
            p.copy_(own[names[name]])
    return plain, names


@pytest.mark.parametrize(
    "args",
    [
        HEADED,
        replace(HEADED, head_layers=2),
        replace(HEADED, head_layers=3),  # no trunk: the heads share the embedding alone
        replace(HEADED, weight_tying=True, sliding_window=4),
    ],
)
def test_each_head_is_a_plain_model_trained_on_its_own_tokens(args):
    model = multi_token(args)
    tokens, targets = tokens_and_targets()
    sums, counts, *_ = model(tokens, targets)
    sums.sum().backward()
    assert counts.tolist() == [21, 22, 21]
    grads = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for head in range(HEADS):
        plain, names = plain_model_of(model, head)
        expected, count, *_ = plain(tokens, targets[head : head + 1])
        assert count.item() == counts[head].item()
        torch.testing.assert_close(sums[head], expected[0], rtol=1e-6, atol=0)
        expected.sum().backward()
        for name, p in plain.named_parameters():
            grads[names[name]] += p.grad
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-4, atol=1e-5, msg=name)
    assert len({round(s.item(), 3) for s in sums}) == HEADS  # the heads differ


def test_the_next_token_needs_no_further_head():
    model = multi_token(HEADED)
    tokens, _ = tokens_and_targets()
    plain, _ = plain_model_of(model, 0)
    assert torch.equal(model(tokens), plain(tokens))
    del model.extra_heads[:]
    assert {n for n, _ in model.named_parameters()} == {n for n, _ in plain.named_parameters()}


def test_flops_are_what_torch_counts():
    args = mtp.TrainArgs(model=replace(HEADED, head_layers=2))
    args.data.n_views, args.data.seq_len = HEADS + 1, SEQ
    built = mtp.build(args)
    model = built.module.to_empty(device="cpu")
    tokens, targets = tokens_and_targets()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, targets)[0].sum().backward()
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    attention = counts.pop("aten.bmm")
    (products,) = counts.values()
    needed = products + attention * (SEQ + 1) / (2 * SEQ)  # of the keys it sees a query needs half
    assert built.flops_per_token == pytest.approx(needed / (ROWS * SEQ), rel=1e-12)
