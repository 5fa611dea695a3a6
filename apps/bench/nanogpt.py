"""Forward and backward of the model of apps.main in turns with a plain module of nanoGPT's shape,
on the CPU in float32: what rotary positions, RMSNorm and SwiGLU cost beside learned positions,
LayerNorm and GELU of as many layers, features and heads.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apps.bench.launch import read_config
from apps.bench.report import Report, quotients, spread
from apps.bench.turns import take_turns
from apps.main.config import ModelArgs
from apps.main.transformer import build
from lingua.parallel.init import init_parameters

PASSES = 10  # turns of a round: each forward and backward, once


class Block(nn.Module):
    """A block of nanoGPT (https://github.com/karpathy/nanoGPT, model.py), without biases."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim, False), nn.Linear(dim, dim, False)
        self.c_fc, self.c_out = nn.Linear(dim, 4 * dim, False), nn.Linear(4 * dim, dim, False)

    def forward(self, x: Tensor) -> Tensor:  # B S E -> B S E
        heads = self.c_attn(self.ln_1(x)).unflatten(-1, (3, self.n_heads, -1))  # B S 3 H D
        q, k, v = heads.transpose(1, 3).unbind(2)  # B H S D each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(-2))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """Tokens and targets, int64 B S, to the mean loss."""

    def __init__(self, args: ModelArgs, seq_len: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(args.vocab_size, args.dim)
        self.wpe = nn.Embedding(seq_len, args.dim)
        self.h = nn.Sequential(*(Block(args.dim, args.heads()[0]) for _ in range(args.n_layers)))
        self.ln_f = nn.LayerNorm(args.dim, bias=False)
        self.lm_head = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        logits = self.lm_head(self.ln_f(self.h(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def measure(keys: list[str], repeats: int) -> Report:
    args = read_config(keys)
    model, seq_len = build(args).module, args.data.seq_len
    init_parameters(model, args.seed, torch.device("cpu"))
    reference = NanoGPT(args.model, seq_len)
    shape = args.data.batch_size, seq_len + 1
    rows = torch.randint(args.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    tokens, targets = rows[:, :-1], rows[:, 1:]

    def lingua() -> None:
        model.zero_grad()
        sums, counts, *_ = model(tokens, targets[None])
        (sums / counts).sum().backward()

    def nanogpt() -> None:
        reference.zero_grad()
        reference(tokens, targets).backward()

    sides = {"lingua": lingua, "nanogpt": nanogpt}
    turns = take_turns(sides, repeats * PASSES, "forward and backward")
    table: list[dict[str, Any]] = []
    for name, module in (("lingua", model), ("nanogpt", reference)):
        n_parameters = sum(p.numel() for p in module.parameters())
        row = {"": name, "parameters": n_parameters}
        row["tokens/s"] = spread(tokens.numel() / s for s in turns[name].seconds)
        row["time / lingua's"] = ratio = quotients(turns[name].seconds, turns["lingua"].seconds)
        row["quartiles"] = ratio.quartiles()
        cpu_s = (turns[side].cpu_seconds for side in (name, "lingua"))
        table.append(row | {"processor time / lingua's": quotients(*cpu_s)})
    about = f"medians of {repeats * PASSES} passes of {len(tokens)} rows of {seq_len} tokens"
    return Report(table, [about])
