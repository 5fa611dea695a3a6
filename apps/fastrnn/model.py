"""Layers of which each feature is a gated recurrence of its own, in the place of attention:

minGRU, minLSTM: Feng et al., 2024, arXiv 2410.01201, whose gates see the layer's input alone
Hawk: the recurrent block and RG-LRU of De et al., 2024, arXiv 2402.19427

All have a convolution over the last positions before the recurrence. Shapes in comments: B rows,
S positions, E features of the residual stream, D features of the state, H heads, F features of one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lingua.model.args import TransformerArgs
from lingua.model.scan import CausalConv, Weight, scan
from lingua.model.transformer import Context, init_projections

DECAY_POWER = 8.0  # c in the paper of Hawk


class Recurrence(nn.Module):
    """h_t = a_t h_{t-1} + b_t, with a and b from `cell`. u_t = conv(wx x)_t."""

    def __init__(self, args: TransformerArgs, out_factor: float) -> None:
        super().__init__()
        n_heads, _, self.head_dim = args.heads()
        self.std, self.out_factor = args.init_base_std, out_factor
        self.dim, self.n_features = args.dim, n_heads * self.head_dim
        self.wx = self.projection()
        self.conv = CausalConv(self.n_features)
        self.wo = nn.Linear(self.n_features, args.dim, bias=False)

    def projection(self) -> nn.Linear:
        return nn.Linear(self.dim, self.n_features, bias=False)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:  # B S E -> B S E
        u = self.conv(self.wx(x), ctx)
        a, b = self.cell(x, u.float())
        if ctx.begins is not None:
            a = a.masked_fill(ctx.begins[..., None], 0.0)
        if ctx.cache is not None and (last := ctx.cache.last(self)) is not None:
            b = torch.cat((b[:, :1] + a[:, :1] * last[0][:, None], b[:, 1:]), dim=1)
        h = scan(a, b)
        if ctx.cache is not None:
            ctx.cache.keep(self, h[:, -1 - ctx.cache.overlap])
        return self.wo(self.read(h.type_as(u), x))

    def cell(self, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """a and b, float32 B S D, of x (B S E) and u (float32 B S D)."""
        raise NotImplementedError

    def read(self, h: Tensor, x: Tensor) -> Tensor:  # B S D, B S E -> B S D
        return h

    def reset_parameters(self) -> None:
        linears = [m for m in self.children() if isinstance(m, nn.Linear) and m is not self.wo]
        init_projections(linears, self.wo, self.out_factor, self.std)


class MinGRU(Recurrence):
    """h_t = (1 - z_t) h_{t-1} + z_t u_t, with z_t = sigmoid(wz x_t)."""

    def __init__(self, args: TransformerArgs, out_factor: float) -> None:
        super().__init__(args, out_factor)
        self.wz = self.projection()

    def cell(self, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        z = self.wz(x).float()
        return torch.sigmoid(-z), torch.sigmoid(z) * u


class MinLSTM(Recurrence):
    """h_t = f_t / (f_t + i_t) h_{t-1} + i_t / (f_t + i_t) u_t, with f_t = sigmoid(wf x_t) and
    i_t = sigmoid(wi x_t)."""

    def __init__(self, args: TransformerArgs, out_factor: float) -> None:
        super().__init__(args, out_factor)
        self.wf, self.wi = self.projection(), self.projection()

    def cell(self, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        # i / (f + i) is the sigmoid of log(i / f), also where both are too small to add.
        z = F.logsigmoid(self.wi(x).float()) - F.logsigmoid(self.wf(x).float())
        return torch.sigmoid(-z), torch.sigmoid(z) * u


class Hawk(Recurrence):
    """h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t u_t), times gelu(wg x_t) where it is read. The gates
    r_t and i_t are sigmoids of a product of u_t with a matrix of each head; a_t is
    sigmoid(decay)^(c r_t)."""

    def __init__(self, args: TransformerArgs, out_factor: float) -> None:
        super().__init__(args, out_factor)
        n_heads, head_dim = self.n_features // self.head_dim, self.head_dim
        self.wg = self.projection()
        self.decay = Weight(n_heads, head_dim)
        self.r, self.i = (Weight(n_heads, head_dim, head_dim) for _ in range(2))
        self.r_bias, self.i_bias = (Weight(n_heads, head_dim) for _ in range(2))

    def cell(self, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        heads = u.unflatten(-1, (-1, self.head_dim))  # B S H F
        r = torch.sigmoid(self.gate(heads, self.r(), self.r_bias()))
        i = torch.sigmoid(self.gate(heads, self.i(), self.i_bias()))
        log_a = DECAY_POWER * F.logsigmoid(self.decay().float()) * r
        # The slope of the root is infinite where nothing decays.
        scale = torch.expm1(2 * log_a).neg().clamp(min=1e-12).sqrt()
        return log_a.exp().flatten(-2), (scale * i * heads).flatten(-2)

    @staticmethod
    def gate(heads: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # B S H F, H F F, H F
        return torch.einsum("bshf,hfe->bshe", heads, weight.float()) + bias.float()

    def read(self, h: Tensor, x: Tensor) -> Tensor:
        return h * F.gelu(self.wg(x), approximate="tanh")

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for weight, bias in ((self.r, self.r_bias), (self.i, self.i_bias)):
            nn.init.normal_(weight.weight, std=self.head_dim**-0.5)
            nn.init.zeros_(bias.weight)
        # sigmoid(decay)^c is uniform between 0.9 and 0.999.
        decay = nn.init.uniform_(self.decay.weight, 0.9, 0.999)
        decay.log_().div_(DECAY_POWER)
        decay.sub_((-torch.expm1(decay)).log())


MIXERS: dict[str, type[Recurrence]] = {"mingru": MinGRU, "minlstm": MinLSTM, "hawk": Hawk}
