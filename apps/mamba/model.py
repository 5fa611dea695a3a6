"""Mamba-2 (Dao and Gu, 2024, arXiv 2405.21060) in the place of attention.

Each head has a state of P x N, h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_t^T, which is read as
y_t = h_t c_t. `ssd` computes it in chunks (section 6 of the paper). Shapes in comments: B rows,
S positions, E features of the residual stream, H heads of P features, G groups of heads that share
b and c of N features.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lingua.model.scan import CausalConv, Weight, scan
from lingua.model.transformer import AllHeadsNorm, Context, init_projections

CHUNK = 64  # positions whose pairs are computed, as of attention; the state passes between chunks


def ssd(
    a: Tensor, state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, begins: Tensor
) -> tuple[Tensor, Tensor]:
    """y (B S H P), and the state after the last position (B H P N).

    a: float32 H, below 0. state: float32 B H P N, before the first position. x: B S H P. dt:
    float32 B S H, above 0. b, c: B S G N, where G divides H. begins: bool B S, where documents do.
    """
    seq_len, n_groups, size = x.shape[1], b.shape[2], min(CHUNK, x.shape[1])
    rest = -seq_len % size  # padded with steps of 0, which change no state
    dt = F.pad(dt, (0, 0, 0, rest)).unflatten(1, (-1, size))  # B n C H: n chunks of C
    begins = F.pad(begins, (0, rest))
    document = begins.cumsum(1).unflatten(1, (-1, size))  # B n C, 0 is that of the state
    # Sums of log decays begin again with a chunk and a document: so that those of one document take
    # no part in another, not by rounding either.
    total = scan(~begins.view(-1, size, 1), (dt * a).flatten(0, 1)).view_as(dt)
    total, dt = (t.unflatten(-1, (n_groups, -1)).movedim(2, -1) for t in (total, dt))  # B n G R C
    x, b, c = (F.pad(t.float(), (0, 0, 0, 0, 0, rest)).unflatten(1, (-1, size)) for t in (x, b, c))
    x = x.unflatten(3, (n_groups, -1)).movedim(2, -2) * dt[..., None]  # B n G R C P
    b, c = b.transpose(2, 3), c.transpose(2, 3)  # B n G C N
    sees = (document[..., None] == document[..., None, :]).tril()  # B n C C
    hidden = ~sees[:, :, None, None]
    pairs = (total[..., None] - total[..., None, :]).masked_fill(hidden, -math.inf).exp()
    y = (pairs * (c @ b.mT)[:, :, :, None]) @ x
    # What each chunk adds to the state behind it, and what remains there of the one before it.
    at_end = (total[..., -1:] - total).masked_fill(hidden[..., -1, :], -math.inf).exp()
    added = torch.einsum("zlgrsp,zlgsn->zlgrpn", x * at_end[..., None], b)
    ended = (document != F.pad(document[:, :-1, -1:], (0, 0, 1, 0)))[:, :, None, None]
    carried = total.masked_fill(ended, -math.inf).exp()
    remains = carried[..., -1:, None]
    state = state.unflatten(1, (n_groups, -1))  # B G R P N
    added = torch.cat((added[:, :1] + remains[:, :1] * state[:, None], added[:, 1:]), dim=1)
    states = torch.cat((state[:, None], scan(remains, added)), dim=1)
    read = torch.einsum("zlgtn,zlgrpn->zlgrtp", c, states[:, :-1])
    y = (y + read * carried[..., None]).movedim(-2, 2)  # B n C G R P
    return y.flatten(1, 2)[:, :seq_len].flatten(2, 3), states[:, -1].flatten(1, 2)


class Mamba(nn.Module):
    """y and skip x, times silu(z), are normalised and projected; x, b and c are silu of
    convolutions of projections. `kernel` computes ssd on CUDA, but for generation."""

    def __init__(self, args: Any, out_factor: float, kernel: Callable[..., Tensor] | None) -> None:
        super().__init__()
        sizes, self.std, self.out_factor = args.mamba, args.init_base_std, out_factor
        self.head_dim, self.state_dim, self.kernel = sizes.head_dim, sizes.state_dim, kernel
        width, shared = sizes.expand * args.dim, 2 * sizes.n_groups * sizes.state_dim
        sides = (width, width, shared, width // sizes.head_dim)
        self.wz, self.wx, self.ws, self.wd = (nn.Linear(args.dim, n, bias=False) for n in sides)
        self.conv_x, self.conv_bc = CausalConv(width), CausalConv(shared)
        self.dt_bias, self.log_a, self.skip = (Weight(sides[-1]) for _ in range(3))
        self.norm = AllHeadsNorm(width, eps=args.norm_eps)
        self.wo = nn.Linear(width, args.dim, bias=False)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:  # B S E -> B S E
        z, dt = self.wz(x), F.softplus(self.wd(x).float() + self.dt_bias().float())
        a = -self.log_a().float().exp()
        begins = dt.new_zeros(dt.shape[:2], dtype=torch.bool) if ctx.begins is None else ctx.begins
        bc = F.silu(self.conv_bc(self.ws(x), ctx)).unflatten(-1, (-1, 2, self.state_dim))
        x = F.silu(self.conv_x(self.wx(x), ctx)).unflatten(-1, (-1, self.head_dim))
        if self.kernel is not None and x.is_cuda and ctx.cache is None:
            y = self.kernel(x, dt, a, *bc.unbind(-2), 256, seq_idx=begins.cumsum(1).int()).float()
        else:
            inputs, last = (x, dt, *bc.unbind(-2), begins), ctx.cache and ctx.cache.last(self)
            state = last[0] if last else dt.new_zeros(*x[:, 0].shape, self.state_dim)
            y, after = ssd(a, state, *inputs)
            if ctx.cache is not None:
                if n := ctx.cache.overlap:  # columns that the next forward runs again
                    after = ssd(a, state, *(t[:, :-n] for t in inputs))[1]
                ctx.cache.keep(self, after)
        y = y + self.skip().float()[:, None] * x
        return self.wo(self.norm(y.flatten(-2).type_as(z) * F.silu(z)))

    def reset_parameters(self) -> None:
        init_projections((self.wz, self.wx, self.ws, self.wd), self.wo, self.out_factor, self.std)
        nn.init.uniform_(self.log_a.weight, 1, 16).log_()
        nn.init.ones_(self.skip.weight)
        # softplus(dt_bias), the step where wd gives 0, is log-uniform between 0.001 and 0.1.
        dt = nn.init.uniform_(self.dt_bias.weight, math.log(1e-3), math.log(1e-1)).exp_()
        dt.add_((-torch.expm1(-dt)).log())
