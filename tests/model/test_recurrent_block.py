"""A block of another kind, as a fork writes it: a recurrence in place of attention, in every other
layer; and the models of apps/fastrnn, apps/mamba and apps/speedrun. They train on documents and
generate with the model and the programs as they are."""

from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from apps import fastrnn, mamba, mtp, speedrun
from apps.main.transformer import build
from lingua.app import Built
from lingua.data import IGNORE
from lingua.model.args import TransformerArgs
from lingua.model.attention import MIN_SEPARATED
from lingua.model.generate import Request, generate
from lingua.model.transformer import Attention, Context, TransformerBlock
from lingua.parallel.init import canonical_name, init_parameters
from lingua.parallel.tensors import whole
from tests.apps.meshes import on_mesh
from tests.forks import looped
from tests.forks.mingru import MinGRU
from tests.model.test_generation import BYTES, GREEDY, PROMPTS, step_by_step

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"dim": 24, "n_layers": 2, "n_heads": 4, "multiple_of": 8}
SIZES |= {"vocab_size": 261, "init_base_std": 0.3}
ARGS = looped.ModelArgs(**SIZES, n_kv_heads=2)
SPEEDRUN = speedrun.ModelArgs(
    **SIZES, n_kv_heads=2, ngrams=3, ngram_rows=50, smear=True, value_embeddings=True,
    residual_scales=True, activation="relu2", logit_cap=15.0,
)  # fmt: skip
Sizes = tuple[int, int, int]


def hybrid(args: TransformerArgs, depth: int) -> TransformerBlock:
    """Attention and the recurrence in turn, so that both kinds of cache are in one model."""
    return TransformerBlock(args, depth, attention=(Attention, MinGRU)[depth % 2])


STATES = mamba.MambaArgs(expand=2, head_dim=12, state_dim=5, n_groups=2)
MIXED = mamba.ModelArgs(**SIZES, n_kv_heads=2, layers=["mamba", "attention"], mamba=STATES)
# A looped model calls each block twice in a forward.
KINDS: dict[str, tuple[Any, TransformerArgs]] = {
    "hybrid": (partial(build, block=hybrid), ARGS),
    "looped hybrid": (partial(build, kind=looped.Looped, block=hybrid), ARGS),
    "looped": (looped.build, ARGS),
    "hawk": (fastrnn.build, fastrnn.ModelArgs(**SIZES, cell="hawk")),
    "mamba": (mamba.build, MIXED),
    "speedrun": (speedrun.app.build, SPEEDRUN),
    "several tokens": (mtp.build, mtp.ModelArgs(**SIZES | {"n_layers": 4}, sliding_window=7)),
    "mingru": (fastrnn.build, fastrnn.ModelArgs(**SIZES, cell="mingru")),
    "minlstm": (fastrnn.build, fastrnn.ModelArgs(**SIZES, cell="minlstm")),
}


def build_kind(kind: str) -> Built:
    build, model = KINDS[kind]
    args: Any = looped.TrainArgs()
    args.model, args.data.seq_len, args.data.n_views = model, 20, 1 + n_heads_of(kind)
    return build(args)


def n_heads_of(kind: str) -> int:
    return 3 if kind == "several tokens" else 1


def plain_model(kind: str = "hybrid") -> nn.Module:
    model = build_kind(kind).module
    init_parameters(model, 1, CPU)
    return model


def model_on_mesh(sizes: Sizes, kind: str = "hybrid") -> tuple[nn.Module, DeviceMesh]:
    built = build_kind(kind)
    return on_mesh(built.module, built.plan, sizes)


def lengths_of(kind: str) -> list[int]:
    """Of the documents in a row; in a long one each is computed by itself."""
    scale = MIN_SEPARATED // 20 + 1 if kind == "several tokens" else 1
    return [scale * n for n in (5, 1, 9, 2, 3)]


def packed_row(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets of each head and documents of one row of several documents."""
    lengths, n_heads = lengths_of(kind), n_heads_of(kind)
    n, chance = sum(lengths), torch.Generator().manual_seed(0)
    row = torch.randint(0, 256, (1, n + n_heads), generator=chance)
    targets = torch.stack([row[:, head + 1 : head + 1 + n] for head in range(n_heads)])
    for end in accumulate(lengths):  # what crosses into the next one
        for head in range(n_heads):
            targets[head, :, end - head - 1 : end] = IGNORE
    return row[:, :n], targets, torch.tensor([[0, *lengths[:-1]]]).cumsum(1)


Gradients = tuple[float, dict[str, Tensor]]


def gradients_here(kind: str, sizes: Sizes) -> tuple[Gradients, Gradients]:
    """The loss sum of the packed row and its whole gradients, with a document mask and without."""
    model, _ = model_on_mesh(sizes, kind)
    tokens, targets, documents = packed_row(kind)
    found = []
    for mask in (documents, None):
        model.zero_grad()
        sums = model(tokens, targets, mask).sums
        sums.sum().backward()
        grads = {canonical_name(n): whole(p.grad).clone() for n, p in model.named_parameters()}
        found.append((sums.sum().item(), grads))
    return found[0], found[1]


# Those of test_matrix.py run in one process; of the others it has only soak tests.
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        *((kind, (1, 1, 2)) for kind in ("hybrid", "speedrun")),
        *((kind, (1, 1, 1)) for kind in ("hawk", "mamba", "several tokens")),
    ],
)
def test_a_row_of_documents_is_each_document_alone(ranks, kind, sizes):
    model, expected = plain_model(kind), 0.0
    tokens, targets, _ = packed_row(kind)
    parts = (rows.split(lengths_of(kind), -1) for rows in (tokens, targets))
    for document, target in zip(*parts, strict=True):
        part = model(document, target).sums.sum()
        part.backward()
        expected += part.item()

    def worst(loss: float, grads: dict[str, Tensor]) -> float:
        """The largest difference, relative: of the loss and of each gradient."""
        pairs = [(grads[name], p.grad) for name, p in model.named_parameters()]
        return max(abs(loss / expected - 1), *(float((g - e).norm() / e.norm()) for g, e in pairs))

    for masked, unmasked in ranks.run(sizes[2], gradients_here, kind, sizes):
        assert worst(*masked) < 1e-5 and worst(*unmasked) > 1e-2


@pytest.mark.parametrize("kind", ["hawk", "mamba", "mingru", "minlstm"])
def test_no_document_has_any_effect_on_another(kind):
    """Not by rounding either: the gradient of a document's logits by the tokens of the one before
    it is 0, and other tokens there leave its logits as they are to the bit."""
    model = plain_model(kind)
    tokens, length = torch.arange(100)[None], 37  # more than a chunk
    for begins, isolated in ((torch.tensor([[0, length]]), True), (None, False)):
        logits = model(tokens, documents=begins)[:, length:]
        model.zero_grad()
        logits.square().sum().backward()
        grad = model.get_submodule("tok_embeddings").weight.grad
        assert (grad[length:100] != 0).any(1).all()
        assert (grad[:length] == 0).all() == isolated
        with torch.no_grad():
            others = torch.where(tokens < length, tokens + 150, tokens)
            assert torch.equal(model(others, documents=begins)[:, length:], logits) == isolated


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["hawk", "mamba"])
def test_a_layer_is_one_graph_to_the_compiler(kind):
    layer = plain_model(kind).get_submodule("layers.0.attention")
    tokens, _, documents = packed_row(kind)
    ctx, x = Context(ARGS, tokens, documents), torch.randn(1, 20, 24, requires_grad=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    expected, found = layer(x, ctx), compiled(x, ctx)
    assert torch.equal(found, expected)
    grads = [torch.autograd.grad(y.square().sum(), layer.parameters()) for y in (found, expected)]
    torch.testing.assert_close(*grads)


N_TOKENS = (4, 5, 12, 12)  # that each prompt asks for


def generate_here(sizes: Sizes, kind: str) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities; a batch of three prompts, then one by itself."""
    model, mesh = model_on_mesh(sizes, kind)
    settings = [replace(GREEDY, max_gen_tokens=n) for n in N_TOKENS]
    requests = [Request(*pair) for pair in zip(PROMPTS, settings, strict=True)]
    found = generate(model, requests, BYTES, mesh, batch_size=3)
    return [(completion.tokens, completion.logprobs) for completion in found]


def is_soak(sizes: Sizes, kind: str) -> bool:
    often = ("looped hybrid", "mamba", "speedrun") if sizes[2] == 2 else tuple(KINDS)[:-2]
    return kind not in often


CASES = [(sizes, kind) for sizes in ((1, 1, 1), (1, 1, 2)) for kind in KINDS]


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [pytest.param(*case, marks=[pytest.mark.soak] * is_soak(*case)) for case in CASES],
)
def test_generating_with_the_cache_is_recomputing_the_text_for_every_token(ranks, sizes, kind):
    """In a batch the shorter prompts begin with padding; with tp ranks, columns that are run again
    continue from the state before them."""
    model = plain_model(kind)
    expected = [step_by_step(model, *pair) for pair in zip(PROMPTS, N_TOKENS, strict=True)]
    assert all(len(set(tokens)) > 1 for tokens, _ in expected)  # one token would show nothing

    for found in ranks.run(sizes[2], generate_here, sizes, kind):
        for (tokens, logprobs), (likeliest, theirs) in zip(found, expected, strict=True):
            assert tokens == likeliest and logprobs == pytest.approx(theirs, abs=3e-5, rel=0)
