"""The language model of apps/main: a Llama-style transformer, and how it is laid out on a mesh."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from apps.main.config import ModelArgs, TrainArgs
from lingua.app import Built
from lingua.data import IGNORE
from lingua.model import Losses, PerRow
from lingua.model.head import Head, VocabularyParallel
from lingua.model.transformer import (
    Context,
    RMSNorm,
    TransformerBlock,
    flops_per_token,
    run_blocks,
    trunc_normal_,
)
from lingua.parallel.plan import ParallelPlan

if TYPE_CHECKING:
    from lingua.model.cache import Cache


class Transformer(nn.Module):
    """Tokens in, summed losses of the next token out: a lingua.model.LanguageModel.

    `block(args, depth)` makes a layer, `head(dim, vocab_size)` the last one; `run_blocks` documents
    what a block takes and returns. A derived class may replace one step: `embed`, `blocks`,
    `hidden`.
    """

    over_positions = "pointwise"  # for context parallelism; a derived class says it again

    def __init__(
        self,
        args: ModelArgs,
        block: Callable[[ModelArgs, int], nn.Module] = TransformerBlock,
        head: Callable[[int, int], Head] = Head,
    ) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(block(args, i) for i in range(args.n_layers))
        self.norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.output = head(args.dim, args.vocab_size)
        if args.weight_tying:
            self.output.weight = self.tok_embeddings.weight

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        noise: Tensor | None = None,
        cache: "Cache | None" = None,
        per_token: bool = False,
    ) -> Tensor | Losses:
        ctx = Context(self.args, tokens, documents, noise, cache)
        x = self.embed(tokens, ctx)
        ctx.set_mask(self.args, x.dtype)
        per_row: PerRow = {}
        n_views = 1 if targets is None else len(targets)
        ahead = self.hidden(x, ctx, n_views, per_row)
        h = self.norm(torch.cat(ahead))  # V*B S E
        if targets is None:
            return self.output(h if cache is None else h[:, -1:])
        targets = targets[: len(ahead)]
        if per_token:
            return self.output(h, targets, per_token=True)
        counts = (targets != IGNORE).sum((1, 2))
        return Losses(self.output(h, targets), counts, per_row)

    def embed(self, tokens: Tensor, ctx: Context) -> Tensor:
        """The residual stream before the first block (B S E), of tokens B S."""
        return self.tok_embeddings(tokens)

    def blocks(self) -> list[tuple[str, nn.Module]]:
        """The blocks with their names, in the order in which they run. One may run several times:
        its calls have other noise, and parts of the cache of their own."""
        return [(f"layers.{i}", block) for i, block in enumerate(self.layers)]

    def hidden(self, x: Tensor, ctx: Context, n_views: int, per_row: PerRow) -> list[Tensor]:
        """The residual stream after the last block (B S E) for each view that the model predicts,
        at most `n_views`, from the one before the first; terms are added to `per_row`."""
        return [run_blocks(self.blocks(), x, ctx, per_row)]

    def reset_parameters(self) -> None:
        std = self.args.init_base_std or self.args.dim**-0.5
        trunc_normal_(self.tok_embeddings.weight, std)
        if not self.args.weight_tying:
            trunc_normal_(self.output.weight, std)


def parallel_plan(args: ModelArgs, seq_len: int) -> ParallelPlan:
    """Blocks are FSDP units; tensor parallelism splits heads, hidden features and vocabulary.

    Between the split products the residual stream is split over positions (sequence parallelism,
    Korthikanti et al., 2022), and the loss is computed on the split vocabulary.
    """
    n_heads, n_kv_heads, _ = args.heads()
    colwise, rowwise = ColwiseParallel, RowwiseParallel
    local_positions = PrepareModuleInput(
        input_layouts=(None, Replicate()),
        desired_input_layouts=(None, Shard(1)),
        use_local_output=True,
    )
    # What is added to the residual stream must be local as that is.
    block_norm = SequenceParallel(use_local_output=args.norm_placement == "output")
    qk_norm: dict[str, ParallelStyle] = {}
    if args.qk_norm is not None:
        # Each head by itself is a dimension of B S H D that is split; all heads are their features.
        style: ParallelStyle = SequenceParallel(sequence_dim=2, use_local_output=True)
        if args.qk_norm == "all_heads":
            from lingua.parallel.styles import FeatureParallel

            style = FeatureParallel()
        qk_norm = {f"layers.*.attention.{name}": style for name in ("q_norm", "k_norm")}
    return ParallelPlan(
        blocks=("layers.*",),
        compiled=("output",),
        # Tied, the two ends share a parameter and stay together in the root unit.
        units=() if args.weight_tying else (("tok_embeddings",), ("norm", "output")),
        tp={
            "tok_embeddings": rowwise(input_layouts=Replicate(), output_layouts=Shard(1)),
            "layers.*.attention_norm": block_norm,
            "layers.*.attention": PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            ),
            # All but wo, so that another attention with projections of these names is split, too.
            "layers.*.attention.w[!o]": colwise(),
            "layers.*.attention.wo": rowwise(output_layouts=Shard(1)),
            # A rank drops from the positions it holds: of their keys, which it has all, it takes
            # its part.
            "layers.*.attention_dropout": local_positions,
            "layers.*.ffn_dropout": local_positions,
            "layers.*.ffn_norm": block_norm,
            "layers.*.feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            # DTensors know the hidden size as a whole, which tp then need not divide.
            "layers.*.feed_forward.w1": colwise(use_local_output=False),
            "layers.*.feed_forward.w3": colwise(use_local_output=False),
            "layers.*.feed_forward.w2": rowwise(output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": VocabularyParallel(),
            **qk_norm,
        },
        tp_divides={
            "model.n_heads": n_heads,
            "model.n_kv_heads": n_kv_heads,
            "data.seq_len": seq_len,  # positions that do not divide would end in gloo's abort
        },
    )


def build_transformer(
    args: ModelArgs, kind: type[Transformer] = Transformer, **parts: Any
) -> Transformer:
    """The model on the meta device: shapes without memory. `parts` are arguments of the class."""
    with torch.device("meta"):
        return kind(args, **parts)


def build(args: TrainArgs, kind: type[Transformer] = Transformer, **parts: Any) -> Built:
    """The model of a configuration; of a fork, with other parts or of a derived class."""
    model, seq_len = args.model, args.data.seq_len
    flops = flops_per_token(model, model.vocab_size, seq_len)
    return Built(build_transformer(model, kind, **parts), parallel_plan(model, seq_len), flops)
