"""A block of another kind, as a fork writes it: a recurrence in place of attention, in every other
layer. It trains on documents and generates with the model and the programs as they are."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel

from apps.main.transformer import ModelArgs, Transformer, build_transformer, parallel_plan
from lingua.data import IGNORE
from lingua.dtensor import whole
from lingua.inference.generate import Request, generate
from lingua.init import canonical_name, init_parameters
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.mesh import DistributedArgs
from lingua.parallel.parallelize import ParallelPlan, parallelize_model
from lingua.transformer import Attention, Context, TransformerArgs, TransformerBlock
from tests.inference.test_generation import BYTES, GREEDY, PROMPTS, step_by_step

CPU = torch.device("cpu")
ARGS = ModelArgs(
    dim=24, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=8, vocab_size=261, init_base_std=0.3
)
Sizes = tuple[int, int, int]
MakeBlock = Callable[[ModelArgs, int], nn.Module]


def scan(keep: Tensor, new: Tensor) -> Tensor:
    """h_t = keep_t h_{t-1} + new_t with h_{-1} = 0, B S E, in log2(S) steps (Hillis and Steele,
    1986): after each, element t covers twice as many positions up to t."""
    covered = 1
    while covered < new.shape[1]:
        before = (0, 0, covered, -covered)  # moves by `covered` positions, zeros come in
        new = new + keep * F.pad(new, before)
        keep = keep * F.pad(keep, before)
        covered *= 2
    return new


class MinGRU(nn.Module):
    """minGRU (Feng et al., 2024): h_t = (1 - z_t) h_{t-1} + z_t c_t, where z and the candidate c
    depend on the input alone; h is zero before a document."""

    def __init__(self, args: TransformerArgs, out_factor: float, resets: bool = True) -> None:
        super().__init__()
        self.resets = resets
        self.wz = nn.Linear(args.dim, args.dim, bias=False)
        self.wc = nn.Linear(args.dim, args.dim, bias=False)
        self.wo = nn.Linear(args.dim, args.dim, bias=False)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:  # B S E -> B S E
        z = self.wz(x).sigmoid()
        keep, new = 1 - z, z * self.wc(x)
        if ctx.begins is not None and self.resets:
            keep = torch.where(ctx.begins[..., None], 0.0, keep)
        before = None if ctx.cache is None else ctx.cache.last(self)
        if before is not None:
            first = new[:, :1] + keep[:, :1] * before[0][:, None]
            new = torch.cat((first, new[:, 1:]), dim=1)
        h = scan(keep, new)
        if ctx.cache is not None:
            ctx.cache.extend(self, h, dim=1)
        return self.wo(h)


def hybrid(args: ModelArgs, depth: int, resets: bool = True) -> TransformerBlock:
    """Attention and the recurrence in turn, so that both kinds of cache are in one model."""
    kinds = (Attention, partial(MinGRU, resets=resets))
    return TransformerBlock(args, depth, attention=kinds[depth % 2])


def never_resets(args: ModelArgs, depth: int) -> TransformerBlock:
    """The control: a state that is kept from one document, and from padding, to the next."""
    return hybrid(args, depth, resets=False)


def plan_of(args: ModelArgs, seq_len: int) -> ParallelPlan:
    """tp ranks share the features of the state as they share the heads of attention."""
    plan = parallel_plan(args, seq_len)
    own = {f"layers.*.attention.{w}": ColwiseParallel() for w in ("wz", "wc")}
    return replace(plan, tp=plan.tp | own)


def plain_model(block: MakeBlock = hybrid) -> Transformer:
    model = build_transformer(ARGS, block)
    init_parameters(model, 1, CPU)
    return model


def model_on_mesh(sizes: Sizes, block: MakeBlock) -> tuple[nn.Module, DeviceMesh]:
    parallel = DistributedArgs(*sizes, model_dtype="fp32")
    mesh = start(CPU, detect_launch(), parallel)
    plan = plan_of(ARGS, 20)
    model = parallelize_model(build_transformer(ARGS, block), mesh, plan, parallel)
    init_parameters(model, 1, CPU)
    return model, mesh


# --------------------------------------------------------------------------------------- training

LENGTHS = [5, 1, 9, 2, 3]  # of the documents in the row, 20 tokens in all


def test_the_recurrence_is_the_one_of_the_formula():
    torch.manual_seed(0)
    gru, x = MinGRU(ARGS, 1.0), torch.randn(2, 11, ARGS.dim)
    z = torch.sigmoid(x @ gru.wz.weight.T)
    candidate, h, states = x @ gru.wc.weight.T, torch.zeros(2, ARGS.dim), []
    for t in range(11):
        h = (1 - z[:, t]) * h + z[:, t] * candidate[:, t]
        states.append(h)
    expected = torch.stack(states, dim=1) @ gru.wo.weight.T
    torch.testing.assert_close(gru(x, Context(ARGS, 11, CPU)), expected)


def packed_row() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and documents of one row of several documents."""
    row = torch.randint(0, 256, (1, 21), generator=torch.Generator().manual_seed(0))
    tokens, targets = row[:, :-1], row[None, :, 1:].clone()
    targets[..., torch.tensor(LENGTHS).cumsum(0) - 1] = IGNORE  # what crosses into the next one
    documents = torch.tensor([[0, *LENGTHS[:-1]]]).cumsum(1)
    return tokens, targets, documents


def gradients_here(sizes: Sizes, block: MakeBlock) -> tuple[float, dict[str, Tensor]]:
    """The loss sum of the packed row, and its whole gradients."""
    model, _ = model_on_mesh(sizes, block)
    sums = model(*packed_row()).sums
    sums.sum().backward()
    grads = {canonical_name(name): whole(p.grad) for name, p in model.named_parameters()}
    return sums.item(), grads


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 1, 2)])
def test_a_row_of_documents_is_each_document_alone(ranks, sizes):
    model, expected = plain_model(), 0.0
    tokens, targets, _ = packed_row()
    for document, target in zip(tokens.split(LENGTHS, 1), targets.split(LENGTHS, 2), strict=True):
        part = model(document, target).sums
        part.sum().backward()
        expected += part.item()

    def worst(loss: float, grads: dict[str, Tensor]) -> float:
        """The largest difference, relative: of the loss and of each gradient."""
        pairs = [(grads[name], p.grad) for name, p in model.named_parameters()]
        return max(abs(loss / expected - 1), *(float((g - e).norm() / e.norm()) for g, e in pairs))

    for found in ranks.run(sizes[2], gradients_here, sizes, hybrid):
        assert worst(*found) < 1e-5
    for found in ranks.run(sizes[2], gradients_here, sizes, never_resets):
        assert worst(*found) > 1e-2


# ------------------------------------------------------------------------------------- generation


N_TOKENS = (4, 5, 12, 12)  # that each prompt asks for


def generate_here(sizes: Sizes, block: MakeBlock) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities; a batch of three prompts, then one by itself."""
    model, mesh = model_on_mesh(sizes, block)
    settings = [replace(GREEDY, max_gen_tokens=n) for n in N_TOKENS]
    requests = [Request(*pair) for pair in zip(PROMPTS, settings, strict=True)]
    found = generate(model, requests, BYTES, mesh, batch_size=3)
    return [(completion.tokens, completion.logprobs) for completion in found]


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 1, 2)])
def test_generating_with_the_cache_is_recomputing_the_text_for_every_token(ranks, sizes):
    """In a batch the shorter prompts begin with padding; with tp ranks, columns that are run again
    continue from the state before them."""
    model = plain_model()
    expected = [step_by_step(model, *pair) for pair in zip(PROMPTS, N_TOKENS, strict=True)]
    assert all(len(set(tokens)) > 1 for tokens, _ in expected)  # one token would show nothing

    def worst(found: list[tuple[list[int], list[float]]]) -> float:
        """The largest difference of a log-probability."""
        pairs = zip(found, expected, strict=True)
        return max(
            abs(ours - theirs)
            for (_, of_ours), (_, of_theirs) in pairs
            for ours, theirs in zip(of_ours, of_theirs, strict=True)
        )

    for found in ranks.run(sizes[2], generate_here, sizes, hybrid):
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        assert worst(found) < 3e-5
    for found in ranks.run(sizes[2], generate_here, sizes, never_resets):
        assert worst(found) > 1e-2
