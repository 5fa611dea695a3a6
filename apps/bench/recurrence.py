"""The scan of apps/fastrnn and the chunks of apps/mamba, over a loop of positions and attention.

Forward and backward of one layer's mixing of positions, of a row, in turns. `keys` of the training
program set the heads: of attention, and of Mamba-2, whose state has as many numbers for a feature.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apps.bench.launch import read_config
from apps.bench.report import Report, largest_difference
from apps.bench.turns import take_turns, times
from apps.mamba.model import ssd
from lingua.model.attend import attend
from lingua.model.scan import scan

LENGTHS = (1024, 4096, 16384)  # tokens of the row
RATIOS = (("loop", "scan"), ("attention", "scan"), ("attention", "ssd"))


def measure(keys: list[str], repeats: int) -> Report:
    n_heads, _, head_dim = read_config(keys).model.heads()
    rows: list[dict[str, Any]] = []
    for seq_len in LENGTHS:
        layers = sides(seq_len, n_heads, head_dim)
        del layers["ssd loop"]  # the definition that others compare with
        turns = take_turns(layers, repeats, f"{seq_len} tokens")
        apart = largest_difference(turns["scan"].results[0], turns["loop"].results[0])
        rows.append({"tokens": seq_len, **times(turns, *RATIOS), "apart": apart})
    about = f"medians of {repeats} turns, {n_heads} heads of {head_dim} features, float32"
    return Report(rows, [f"{about}; apart: relative difference of gradients of loop and scan"])


def sides(
    seq_len: int,
    n_heads: int,
    head_dim: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Each returns the gradients of its inputs, which are drawn on the CPU."""
    torch.manual_seed(0)
    drawn = [*torch.randn(4, 1, seq_len, n_heads, head_dim)]
    drawn += [torch.rand_like(drawn[0]), torch.rand(1, seq_len, n_heads), -torch.rand(n_heads)]
    b, c, x, grad, a, dt, decays = (t.to(device, dtype) for t in drawn)
    state = x.new_zeros(1, n_heads, head_dim, head_dim)
    begins = torch.zeros(1, seq_len, dtype=torch.bool, device=device)
    a, b, c, x, dt = (t.requires_grad_() for t in (a, b, c, x, dt))

    def loop() -> Tensor:
        h, states = torch.zeros_like(x[:, 0]), []
        for at, xt in zip(a.unbind(1), x.unbind(1), strict=True):
            h = torch.addcmul(xt, at, h)
            states.append(h)
        return torch.stack(states, dim=1)

    def attention() -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (c, b, x))
        return attend(q, k, v, None).transpose(1, 2)

    def mamba() -> Tensor:
        return ssd(decays, state, x, dt, b[:, :, :1], c[:, :, :1], begins)[0]

    def mamba_loop() -> Tensor:
        h, outputs = state, []
        for t in range(seq_len):
            added = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :1, None]
            h = h * (dt[:, t] * decays).exp()[..., None, None] + added
            outputs.append((h * c[:, t, :1, None]).sum(-1))
        return torch.stack(outputs, dim=1)

    def gradients(work: Callable[[], Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(work(), inputs, grad)

    return {
        "loop": lambda: gradients(loop, a, x),
        "scan": lambda: gradients(lambda: scan(a, x), a, x),
        "ssd": lambda: gradients(mamba, x, dt, b, c),
        "ssd loop": lambda: gradients(mamba_loop, x, dt, b, c),
        "attention": lambda: gradients(attention, b, c, x),
    }
