"""A fork that runs its blocks several times, as a Universal Transformer (Dehghani et al., 2019,
arXiv 1807.03819), with parts of modded-nanogpt: value embeddings (further embeddings of the tokens,
added to attention's values in every other block), QK-norm, and a soft cap of the logits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel

from apps.main import app as main_app
from apps.main.config import ModelArgs as MainModelArgs
from apps.main.config import TrainArgs as MainArgs
from apps.main.transformer import Transformer
from apps.main.transformer import build as main_build
from lingua.app import Built
from lingua.config.schema import Guarded, bounds, require
from lingua.model.head import Head
from lingua.model.transformer import (
    Attention,
    Context,
    TransformerBlock,
    flops_per_token,
    trunc_normal_,
)


@dataclass
class ModelArgs(MainModelArgs):
    n_loops: Guarded[int] = 2  # times that the blocks run
    logit_cap: Guarded[float] = 15.0  # bound of the logits' size
    qk_norm: Guarded[Literal["per_head", "all_heads"] | None] = "per_head"

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from super().validate()
        yield from bounds(self, 1, "n_loops")
        yield from require(self, "above 0", lambda v: v > 0, "logit_cap")


@dataclass
class TrainArgs(MainArgs):
    model: ModelArgs = field(default_factory=ModelArgs)


class ValueAttention(Attention):
    def __init__(self, args: ModelArgs, out_factor: float) -> None:
        super().__init__(args, out_factor)
        self.value_embedding = nn.Embedding(args.vocab_size, self.wv.out_features)

    def values(self, x: Tensor, ctx: Context) -> Tensor:  # B S E -> B S H*D
        return super().values(x, ctx) + self.value_embedding(ctx.tokens)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        trunc_normal_(self.value_embedding.weight, 0.5)


class Looped(Transformer):
    def blocks(self) -> list[tuple[str, nn.Module]]:
        return super().blocks() * self.args.n_loops


def block(args: ModelArgs, depth: int) -> TransformerBlock:
    return TransformerBlock(args, depth, Attention if depth % 2 else ValueAttention)


def build(args: Any) -> Built:
    model = args.model
    built = main_build(args, Looped, block=block, head=partial(Head, cap=model.logit_cap))
    deep = replace(model, n_layers=model.n_layers * model.n_loops)
    flops = flops_per_token(deep, model.vocab_size, args.data.seq_len)
    plan = built.plan.with_part("layers.*.attention.value_embedding", {"": ColwiseParallel()})
    return replace(built, plan=plan, flops_per_token=flops)


app = replace(main_app, path=__name__, config=TrainArgs, build=build, hugging_face=None)
