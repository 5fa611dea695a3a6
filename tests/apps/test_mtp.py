"""apps/mtp: each head against a plain model of its own. Its runs on meshes: test_matrix.py."""

from dataclasses import asdict, replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from apps.main.transformer import ModelArgs as PlainArgs
from apps.main.transformer import build_transformer
from apps.mtp import TrainArgs, build
from apps.mtp.model import ModelArgs, MultiToken, build_multi_token
from lingua.data import IGNORE
from lingua.parallel.init import init_parameters

CPU = torch.device("cpu")
SMALL = ModelArgs(dim=24, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=50, multiple_of=8)
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
        SMALL,
        replace(SMALL, head_layers=2),
        replace(SMALL, head_layers=3),  # no trunk: the heads share the embedding alone
        replace(SMALL, weight_tying=True, sliding_window=4),
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
    model = multi_token(SMALL)
    tokens, _ = tokens_and_targets()
    plain, _ = plain_model_of(model, 0)
    assert torch.equal(model(tokens), plain(tokens))
    del model.extra_heads[:]
    assert {n for n, _ in model.named_parameters()} == {n for n, _ in plain.named_parameters()}


def test_flops_are_what_torch_counts():
    args = TrainArgs(model=replace(SMALL, head_layers=2))
    args.data.n_views, args.data.seq_len = HEADS + 1, SEQ
    built = build(args)
    model = built.module.to_empty(device="cpu")
    tokens, targets = tokens_and_targets()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, targets)[0].sum().backward()
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    attention = counts.pop("aten.bmm")
    (products,) = counts.values()
    needed = products + attention * (SEQ + 1) / (2 * SEQ)  # of the keys it sees a query needs half
    assert built.flops_per_token == pytest.approx(needed / (ROWS * SEQ), rel=1e-12)
