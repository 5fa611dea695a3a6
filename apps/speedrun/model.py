"""Parts of public speedruns (modded-nanogpt, nanochat), on the steps of apps/main's Transformer.

Shapes in comments: B rows, S positions, H heads, D features of a head, E features of the residual
stream.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from apps.main.config import ModelArgs as MainModelArgs
from apps.main.transformer import Transformer
from apps.main.transformer import build as main_build
from apps.main.transformer import parallel_plan as main_plan
from lingua.app import Built
from lingua.base.hashing import hash_bits
from lingua.config.schema import Guarded, bounds, require
from lingua.model import PerRow
from lingua.model.args import TransformerArgs
from lingua.model.head import Head
from lingua.model.transformer import (
    Attention,
    Context,
    FeedForward,
    TransformerBlock,
    init_projections,
    run_blocks,
    trunc_normal_,
)
from lingua.parallel.plan import ParallelPlan

NONE = -1  # in the place of a token: there is none


@dataclass
class ModelArgs(MainModelArgs):
    # longest n-gram of tokens that has an embedding, which is added to its last token's: 3 for
    # those of two and of three tokens; 1: none
    ngrams: Guarded[int] = 1
    ngram_rows: Guarded[int] = 16_384  # rows of each length's table, to which n-grams are hashed
    smear: Guarded[bool] = False  # adds a learned part of the embedding of the token before
    value_embeddings: Guarded[bool] = False  # every other block adds embeddings to the values
    residual_scales: Guarded[bool] = False  # a block reads a mix of the stream and the embedding
    activation: Guarded[Literal["swiglu", "relu2"]] = "swiglu"  # of the feed-forward
    logit_cap: Guarded[float | None] = None  # bound of the logits' size; null: none

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from super().validate()
        yield from bounds(self, 1, "ngrams", maximum=16)
        yield from bounds(self, 1, "ngram_rows", maximum=1 << 27)
        yield from require(self, "above 0 and finite", lambda v: 0 < v < math.inf, "logit_cap")


class Before(nn.Module):
    """The tokens before each token in its document. A module, since the cache keeps them by it."""

    over_positions = "whole"

    def forward(self, tokens: Tensor, ctx: Context, n: int) -> list[Tensor]:
        """int64 B S each: the token, the one before it, and so on, n in all; NONE where the
        document has not so many."""
        last = None if ctx.cache is None else ctx.cache.last(self)
        before = [tokens]
        for i in range(n - 1):
            first = torch.full_like(tokens[:, 0], NONE) if last is None else last[i]
            shifted = torch.cat((first[:, None], before[-1][:, :-1]), dim=1)
            before.append(shifted if ctx.begins is None else shifted.masked_fill(ctx.begins, NONE))
        if ctx.cache is not None:
            ctx.cache.keep(self, *(t[:, -1 - ctx.cache.overlap] for t in before))
        return before


def ngram_rows(before: list[Tensor], n_rows: int) -> Tensor:
    """The rows, int64 B S n, of the n-grams that end at each token, of two tokens and more, in a
    table that has `n_rows` for each length, to which they are hashed."""
    bits, rows = before[0], list[Tensor]()
    for token in before[1:]:
        bits = hash_bits(bits, token)
        rows.append(bits % n_rows + len(rows) * n_rows)
    return torch.stack(rows, dim=-1)


class Scale(nn.Module):
    """x times a learned number for each feature."""

    over_positions = "pointwise"

    def __init__(self, dim: int, start: float) -> None:
        super().__init__()
        self.weight, self.start = nn.Parameter(torch.empty(dim)), start

    def forward(self, x: Tensor) -> Tensor:  # B S E -> B S E
        return x * self.weight

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.start)


class ValueAttention(Attention):
    """Attention whose values have a further embedding of the token added."""

    over_positions = "heads"

    def __init__(self, args: TransformerArgs, out_factor: float) -> None:
        super().__init__(args, out_factor)
        self.value_embedding = nn.Embedding(args.vocab_size, self.wv.out_features)
        self.all_heads.append("value_embedding")

    def values(self, x: Tensor, ctx: Context) -> Tensor:  # B S E -> B S H*D
        return super().values(x, ctx) + self.value_embedding(ctx.tokens)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        trunc_normal_(self.value_embedding.weight, self.std or 0.0)


class SquaredReLU(nn.Module):
    """w2(relu(w1 x)^2) (So et al., 2021), with as many weights as SwiGLU has."""

    over_positions = "pointwise"

    def __init__(self, args: TransformerArgs, out_factor: float) -> None:
        super().__init__()
        self.std, self.out_factor = args.init_base_std, out_factor
        hidden = 3 * args.hidden_dim() // 2
        self.w1 = nn.Linear(args.dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, args.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # B S E -> B S E
        return self.w2(F.relu(self.w1(x)).square())

    def reset_parameters(self) -> None:
        init_projections((self.w1,), self.w2, self.out_factor, self.std)


def block(args: Any, depth: int) -> TransformerBlock:
    attention = ValueAttention if args.value_embeddings and depth % 2 == 0 else Attention
    feed_forward: type[nn.Module] = SquaredReLU if args.activation == "relu2" else FeedForward
    return TransformerBlock(args, depth, attention, feed_forward)


class Speedrun(Transformer):
    """The Transformer of apps/main with the parts that its arguments ask for."""

    over_positions = "pointwise"
    args: ModelArgs

    def __init__(self, args: ModelArgs, **parts: Any) -> None:
        super().__init__(args, block, **parts)
        self.before = Before()
        if args.ngrams > 1:
            self.ngrams = nn.Embedding((args.ngrams - 1) * args.ngram_rows, args.dim)
        if args.smear:
            self.smear = Scale(args.dim, 0.1)
        if args.residual_scales:
            self.stream = nn.ModuleList(Scale(args.dim, 1.0) for _ in self.layers)
            self.skip = nn.ModuleList(Scale(args.dim, 0.1) for _ in self.layers)

    def embed(self, tokens: Tensor, ctx: Context) -> Tensor:  # B S -> B S E
        x = super().embed(tokens, ctx)
        n = self.args.ngrams
        before = self.before(tokens, ctx, max(n, 2)) if n > 1 or self.args.smear else []
        if self.args.smear:  # the first token of a document has itself before it
            x = x + self.smear(self.tok_embeddings(before[1].where(before[1] != NONE, tokens)))
        if n > 1:
            x = x + self.ngrams(ngram_rows(before, self.args.ngram_rows)).sum(2)
        return x

    def hidden(self, x: Tensor, ctx: Context, n_views: int, per_row: PerRow) -> list[Tensor]:
        if not self.args.residual_scales:
            return super().hidden(x, ctx, n_views, per_row)
        start = x
        for named, stream, skip in zip(self.blocks(), self.stream, self.skip, strict=True):
            x = run_blocks([named], stream(x) + skip(start), ctx, per_row)
        return [x]

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.args.ngrams > 1:  # by default zeros: an n-gram that was never seen adds nothing
            trunc_normal_(self.ngrams.weight, self.args.init_base_std or 0.0)


def parallel_plan(args: ModelArgs, seq_len: int) -> ParallelPlan:
    """That of apps/main, with the styles of the further parts."""
    parts: dict[str, dict[str, ParallelStyle | None]] = {}
    replicated = SequenceParallel(use_local_output=True)
    if args.ngrams > 1:
        split = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        parts["ngrams"] = {"": split}
    if args.smear:
        parts["smear"] = {"": replicated}
    if args.residual_scales:
        parts |= {"stream.*": {"": replicated}, "skip.*": {"": replicated}}
    if args.value_embeddings:
        parts["layers.*.attention.value_embedding"] = {"": ColwiseParallel()}
    if args.activation == "relu2":
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        rowwise = RowwiseParallel(output_layouts=Shard(1))
        colwise = ColwiseParallel(use_local_output=False)
        parts["layers.*.feed_forward"] = {"": whole, "w1": colwise, "w2": rowwise, "w3": None}
    plan = main_plan(args, seq_len)
    for name, styles in parts.items():
        plan = plan.with_part(name, styles)
    return plan


def build(args: Any) -> Built:
    """The model and its layout. Its FLOPs are those of apps/main: the further parts have no matrix
    product, and a feed-forward has as many weights."""
    model = args.model
    built = main_build(args, Speedrun, head=partial(Head, cap=model.logit_cap))
    return replace(built, plan=parallel_plan(model, args.data.seq_len))
