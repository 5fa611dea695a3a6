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

from apps.main.transformer import ModelArgs as MainModelArgs
from apps.main.transformer import Transformer
from apps.main.transformer import build as main_build
from lingua.app import Built
from lingua.base.hashing import hash_bits
from lingua.config.schema import Guarded, bounds, require
from lingua.model import PerRow
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


@dataclass
class ModelArgs(MainModelArgs):
    # longest n-gram of tokens that has an embedding, which is added to its last token's: 3 for
    # those of two and of three tokens; 1: none
    ngrams: Guarded[int] = 1
    ngram_rows: Guarded[int] = (
        16_384  # rows of the table of each length; n-grams are hashed to them
    )
    smear: Guarded[bool] = False  # a gate adds the embedding of the token before
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
    """The tokens before each token, in its document."""

    def forward(self, tokens: Tensor, ctx: Context, n: int, none: int) -> list[Tensor]:
        """int64 B S each: the token, the one before it, and so on, n in all; `none` where the
        document has not so many."""
        last = None if ctx.cache is None else ctx.cache.last(self)
        before = [tokens]
        for i in range(n - 1):
            first = torch.full_like(tokens[:, 0], none) if last is None else last[i]
            shifted = torch.cat((first[:, None], before[-1][:, :-1]), dim=1)
            before.append(shifted if ctx.begins is None else shifted.masked_fill(ctx.begins, none))
        if ctx.cache is not None:
            ctx.cache.extend(self, *before, dim=1)
        return before


class NGrams(nn.Module):
    """Embeddings of the n-grams that end at a token, of two tokens and more, in tables to whose
    rows they are hashed."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.std, sizes = args.init_base_std or 0.0, range(2, args.ngrams + 1)
        self.tables = nn.ModuleList(nn.Embedding(args.ngram_rows, args.dim) for _ in sizes)

    def forward(self, before: list[Tensor]) -> Tensor:  # B S each -> B S E
        bits, out = before[0], []
        for table, token in zip(self.tables, before[1:], strict=True):
            bits = hash_bits(bits, token)
            out.append(table(bits % table.num_embeddings))
        return torch.stack(out).sum(0)

    def reset_parameters(self) -> None:
        for table in self.tables:  # by default zeros: an n-gram that was never seen adds nothing
            trunc_normal_(table.weight, self.std)


class Scale(nn.Module):
    """x times a learned number for each feature."""

    def __init__(self, dim: int, start: float) -> None:
        super().__init__()
        self.weight, self.start = nn.Parameter(torch.empty(dim)), start

    def forward(self, x: Tensor) -> Tensor:  # B S E -> B S E
        return x * self.weight

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.start)


class ValueAttention(Attention):
    def __init__(self, args: ModelArgs, out_factor: float) -> None:
        super().__init__(args, out_factor)
        self.value_embedding = nn.Embedding(args.vocab_size, self.wv.out_features)

    def values(self, x: Tensor, ctx: Context) -> Tensor:  # B S E -> B S H*D
        return super().values(x, ctx) + self.value_embedding(ctx.tokens)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        trunc_normal_(self.value_embedding.weight, self.std or 0.0)


class SquaredReLU(FeedForward):
    """w2(relu(w1 x)^2) (So et al., 2021), with as many weights as SwiGLU has."""

    def __init__(self, args: ModelArgs, out_factor: float) -> None:
        nn.Module.__init__(self)
        self.std, self.out_factor = args.init_base_std, out_factor
        hidden = 3 * args.hidden_dim() // 2
        self.w1 = nn.Linear(args.dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, args.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # B S E -> B S E
        return self.w2(F.relu(self.w1(x)).square())

    def reset_parameters(self) -> None:
        init_projections((self.w1,), self.w2, self.out_factor, self.std)


def block(args: ModelArgs, depth: int) -> TransformerBlock:
    attention = ValueAttention if args.value_embeddings and depth % 2 == 0 else Attention
    feed_forward = SquaredReLU if args.activation == "relu2" else FeedForward
    return TransformerBlock(args, depth, attention, feed_forward)


class Speedrun(Transformer):
    args: ModelArgs

    def __init__(self, args: ModelArgs, **parts: Any) -> None:
        super().__init__(args, block, **parts)
        self.before = Before()
        if args.ngrams > 1:
            self.ngrams = NGrams(args)
        if args.smear:
            self.smear = Scale(args.dim, 0.1)
        if args.residual_scales:
            self.stream = nn.ModuleList(Scale(args.dim, 1.0) for _ in self.layers)
            self.skip = nn.ModuleList(Scale(args.dim, 0.1) for _ in self.layers)

    def embed(self, tokens: Tensor, ctx: Context) -> Tensor:  # B S -> B S E
        x = super().embed(tokens, ctx)
        n = max(self.args.ngrams, 1 + self.args.smear)
        before = self.before(tokens, ctx, n, -1) if n > 1 else []
        if self.args.smear:  # the first token of a document has itself before it
            x = x + self.smear(self.tok_embeddings(before[1].where(before[1] >= 0, tokens)))
        return x + self.ngrams(before[: self.args.ngrams]) if self.args.ngrams > 1 else x

    def hidden(self, x: Tensor, ctx: Context, n_views: int, per_row: PerRow) -> list[Tensor]:
        if not self.args.residual_scales:
            return super().hidden(x, ctx, n_views, per_row)
        start = x
        for named, stream, skip in zip(self.blocks(), self.stream, self.skip, strict=True):
            x = run_blocks([named], stream(x) + skip(start), ctx, per_row)
        return [x]


def build(args: Any) -> Built:
    """The model and its layout. Its FLOPs are those of apps/main: the further parts have no matrix
    product, and a feed-forward has as many weights."""
    model = args.model
    built = main_build(args, Speedrun, head=partial(Head, cap=model.logit_cap))
    plan = built.plan
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    local: dict[str, ParallelStyle] = {"": SequenceParallel(use_local_output=True)}
    if model.ngrams > 1:
        plan = plan.with_part("ngrams.tables.*", {"": embedding})
    if model.smear:
        plan = plan.with_part("smear", local)
    if model.residual_scales:
        plan = plan.with_part("stream.*", local).with_part("skip.*", local)
    if model.value_embeddings:
        values = {"": ColwiseParallel()}
        plan = plan.with_part("layers.*.attention.value_embedding", values)
    if model.activation == "relu2":
        inputs = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        linears = {"w1": ColwiseParallel(use_local_output=False)}
        linears["w2"] = RowwiseParallel(output_layouts=Shard(1))
        plan = plan.with_part("layers.*.feed_forward", {"": inputs, **linears})
    return replace(built, plan=plan)
