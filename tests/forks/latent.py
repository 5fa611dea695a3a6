"""A fork whose attention keeps a small latent in place of keys and values (DeepSeek-AI, 2024, arXiv
2405.04434): keys have features without positions of each head, and rotary ones that heads share.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from apps.main import app as main_app
from apps.main.config import ModelArgs as MainModelArgs
from apps.main.config import TrainArgs as MainArgs
from apps.main.transformer import build as main_build
from lingua.app import Built
from lingua.config.schema import Guarded, bounds
from lingua.model.attend import attend
from lingua.model.transformer import (
    Context,
    RMSNorm,
    TransformerBlock,
    init_projections,
    rotate,
)
from lingua.parallel.styles import Replicated


@dataclass
class ModelArgs(MainModelArgs):
    latent_dim: Guarded[int] = 10  # of keys and values
    rope_dim: Guarded[int] = 4  # features of a query or key that turn with its position
    value_dim: Guarded[int] = 5  # features of a head's values

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from super().validate()
        yield from bounds(self, 1, "latent_dim", "value_dim")
        yield from bounds(self, 2, "rope_dim")


@dataclass
class TrainArgs(MainArgs):
    model: ModelArgs = field(default_factory=ModelArgs)


class LatentAttention(nn.Module):
    def __init__(self, args: ModelArgs, out_factor: float) -> None:
        super().__init__()
        n_heads, _, self.head_dim = args.heads()
        self.rope_dim, self.value_dim = args.rope_dim, args.value_dim
        self.std, self.out_factor = args.init_base_std, out_factor
        linear = partial(nn.Linear, bias=False)
        self.wq = linear(args.dim, n_heads * (self.head_dim + args.rope_dim))
        norm = RMSNorm(args.latent_dim, eps=args.norm_eps)
        self.latent = nn.Sequential(linear(args.dim, args.latent_dim), norm)
        self.shared_key = linear(args.dim, args.rope_dim)
        self.wk = linear(args.latent_dim, n_heads * self.head_dim)
        self.wv = linear(args.latent_dim, n_heads * args.value_dim)
        self.wo = linear(n_heads * args.value_dim, args.dim)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:  # B S E -> B S E
        angles = ctx.angles(self.rope_dim)
        latent, key = self.latent(x), rotate(self.shared_key(x)[:, :, None], *angles)
        if ctx.cache is not None:
            latent, key = ctx.cache.extend(self, latent, key, dim=1)
        sizes = [self.head_dim, self.rope_dim]
        q, turned = self.wq(x).unflatten(-1, (-1, sum(sizes))).split(sizes, dim=-1)
        q = torch.cat((q, rotate(turned, *angles)), dim=-1)
        k = self.wk(latent).unflatten(-1, (-1, self.head_dim))
        k = torch.cat((k, key.expand(-1, -1, k.shape[2], -1)), dim=-1)
        v = self.wv(latent).unflatten(-1, (-1, self.value_dim))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.wo(attend(q, k, v, ctx.mask).transpose(1, 2).flatten(-2))

    def reset_parameters(self) -> None:
        inputs = (self.wq, self.latent[0], self.shared_key, self.wk, self.wv)
        init_projections(inputs, self.wo, self.out_factor, self.std)


def build(args: Any) -> Built:
    built = main_build(args, block=partial(TransformerBlock, attention=LatentAttention))
    shared = {"latent": Replicated(), "shared_key": Replicated(by_heads=True)}
    return replace(built, plan=built.plan.with_part("layers.*.attention", shared))


app = replace(main_app, path=__name__, config=TrainArgs, build=build, hugging_face=None)
