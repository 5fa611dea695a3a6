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
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from apps.main import app as main_app
from apps.main.transformer import build_transformer, parallel_plan
from lingua.app import Built
from lingua.model.transformer import Context, TransformerArgs, TransformerBlock, trunc_normal_
from lingua.parallel.parallelize import ParallelPlan


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
        self.wz = nn.Linear(args.dim, args.dim, bias=False)
        self.wv = nn.Linear(args.dim, args.dim, bias=False)
        self.wo = nn.Linear(args.dim, args.dim, bias=False)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:  # B S E -> B S E
        z = torch.sigmoid(self.wz(x))
        a, b = 1 - z, z * self.wv(x)
        if ctx.begins is not None:
            a = torch.where(ctx.begins[..., None], 0.0, a)
        if ctx.cache is not None and (last := ctx.cache.last(self)) is not None:
            b = torch.cat((b[:, :1] + a[:, :1] * last[0][:, None], b[:, 1:]), dim=1)
        h = scan(a, b)
        if ctx.cache is not None:
            ctx.cache.extend(self, h, dim=1)
        return self.wo(h)

    def reset_parameters(self) -> None:
        std = self.wz.in_features**-0.5
        for linear, scale in ((self.wz, 1.0), (self.wv, 1.0), (self.wo, self.out_factor)):
            trunc_normal_(linear.weight, std / scale)


def plan_of(args: Any) -> ParallelPlan:
    """The features of the state are split over tp ranks; everything else is as in apps.main."""
    plan = parallel_plan(args.model, args.data.seq_len)
    kept = {name: style for name, style in plan.tp.items() if ".attention.w" not in name}
    own = {
        "layers.*.attention.wz": ColwiseParallel(),
        "layers.*.attention.wv": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    }
    divides = {"model.dim": args.model.dim, "data.seq_len": args.data.seq_len}
    return replace(plan, tp=kept | own, tp_divides=divides)


def build(args: Any) -> Built:
    model = build_transformer(args.model, partial(TransformerBlock, attention=MinGRU))
    n_weights = sum(p.numel() for p in model.parameters()) - model.tok_embeddings.weight.numel()
    return Built(model, plan_of(args), 6.0 * n_weights)


app = replace(main_app, path=__name__, build=build, hugging_face=None)
