"""Multi-token prediction (Gloeckle et al., 2024, arXiv 2404.19737): at every position one head for
each of the next tokens, over a shared trunk, with a shared norm and output matrix.

The head of the next token is the last blocks of the plain transformer, so without `extra_heads`
this is that transformer, with the same parameter names; the others only shape the trunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from apps.main.config import ModelArgs as PlainArgs
from apps.main.transformer import Transformer
from apps.main.transformer import parallel_plan as plain_plan
from lingua.config.schema import Guarded
from lingua.model import PerRow
from lingua.model.transformer import Context, TransformerBlock, run_blocks
from lingua.parallel.plan import ParallelPlan


@dataclass
class ModelArgs(PlainArgs):
    # how many of the n_layers blocks each predicted token has for itself; the others are the trunk
    head_layers: Guarded[int] = 1

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from super().validate()
        if not 1 <= self.head_layers <= self.n_layers:
            yield "head_layers", f"must be between 1 and model.n_layers = {self.n_layers}"


class MultiToken(Transformer):
    """Tokens in, summed losses of the next `n_heads` tokens out."""

    over_positions = "pointwise"
    args: ModelArgs

    def __init__(self, args: ModelArgs, n_heads: int) -> None:
        super().__init__(args)
        depths = range(args.n_layers - args.head_layers, args.n_layers)
        self.extra_heads = nn.ModuleList(
            nn.ModuleList(TransformerBlock(args, depth) for depth in depths)
            for _ in range(n_heads - 1)
        )

    def hidden(self, x: Tensor, ctx: Context, n_views: int, per_row: PerRow) -> list[Tensor]:
        """The trunk, then the blocks of each head on what it gives."""
        layers = self.blocks()
        trunk = len(layers) - self.args.head_layers
        x = run_blocks(layers[:trunk], x, ctx, per_row)
        ahead = [run_blocks(layers[trunk:], x, ctx, per_row)]
        for i, head in enumerate(self.extra_heads[: n_views - 1]):
            blocks = ((f"extra_heads.{i}.{k}", block) for k, block in enumerate(head.children()))
            ahead.append(run_blocks(blocks, x, ctx, per_row))
        return ahead


def parallel_plan(args: ModelArgs, n_heads: int, seq_len: int) -> ParallelPlan:
    """A block of a head is laid out as a block of the trunk."""
    plan = plain_plan(args, seq_len)
    if n_heads == 1:
        return plan
    trunk = plan.tp or {}
    heads = {
        name.replace("layers.*", "extra_heads.*.*"): style
        for name, style in trunk.items()
        if name.startswith("layers.*")
    }
    return replace(plan, blocks=(*plan.blocks, "extra_heads.*.*"), tp=trunk | heads)


def build_multi_token(args: ModelArgs, n_heads: int) -> MultiToken:
    """The model on the meta device."""
    with torch.device("meta"):
        return MultiToken(args, n_heads)
