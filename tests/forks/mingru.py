"""A fork with another block: a minimal gated recurrence (minGRU, Feng et al., 2024, arXiv
2410.01201) in the place of attention.

h_t = (1 - z_t) h_{t-1} + z_t v_t with z_t = sigmoid(wz x_t), v_t = wv x_t. The state begins at 0
with every document.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apps.main import app as main_app
from apps.main.transformer import build as main_build
from lingua.app import Built
from lingua.model.args import TransformerArgs
from lingua.model.transformer import Context, TransformerBlock, init_projections


def scan(a: Tensor, b: Tensor) -> Tensor:
    """h of h_t = a_t h_{t-1} + b_t with h_{-1} = 0, all B S D, in log2(S) steps."""
    shift = 1
    while shift < a.shape[1]:
        before_a = F.pad(a, (0, 0, shift, 0), value=1.0)[:, :-shift]
        before_b = F.pad(b, (0, 0, shift, 0))[:, :-shift]
        a, b, shift = a * before_a, b + a * before_b, 2 * shift
    return b


class MinGRU(nn.Module):
    def __init__(self, args: TransformerArgs, out_factor: float) -> None:
        super().__init__()
        self.out_factor = out_factor
        wz, wv, wo = (nn.Linear(args.dim, args.dim, bias=False) for _ in range(3))
        self.wz, self.wv, self.wo = wz, wv, wo

    def forward(self, x: Tensor, ctx: Context) -> Tensor:  # B S E -> B S E
        z = torch.sigmoid(self.wz(x))
        a, b = 1 - z, z * self.wv(x)
        if ctx.begins is not None:
            a = torch.where(ctx.begins[..., None], 0.0, a)
        if ctx.cache is not None and (last := ctx.cache.last(self)) is not None:
            b = torch.cat((b[:, :1] + a[:, :1] * last[0][:, None], b[:, 1:]), dim=1)
        h = scan(a, b)
        if ctx.cache is not None:
            ctx.cache.keep(self, h[:, -1 - ctx.cache.overlap])
        return self.wo(h)

    def reset_parameters(self) -> None:
        init_projections((self.wz, self.wv), self.wo, self.out_factor)


def build(args: Any) -> Built:
    built = main_build(args, block=partial(TransformerBlock, attention=MinGRU))
    _embedding, *weights = built.module.parameters()
    plan = replace(built.plan, tp_divides=built.plan.tp_divides | {"model.dim": args.model.dim})
    return replace(built, plan=plan, flops_per_token=6.0 * sum(w.numel() for w in weights))


app = replace(main_app, path=__name__, build=build, hugging_face=None)
