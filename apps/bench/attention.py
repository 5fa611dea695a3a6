"""Attention over documents on a CPU: each by itself, as in long rows, over a mask of whole rows.

Forward and backward of the heads of one layer, on the same rows in turns. `keys` of the training
program set the heads and their dtype.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from apps.bench.launch import read_config
from apps.bench.report import Report, largest_difference
from apps.bench.turns import take_turns, times
from lingua.model.attend import Mask, attend
from lingua.model.attention import MIN_SEPARATED, build_mask
from lingua.model.masks import SeparateDocuments

TOKENS = 4096  # tokens of all rows together
ROWS = (MIN_SEPARATED, 1024, 2048, 4096)  # tokens of a row
DOCUMENTS = (1, 4, 16, 64)  # documents in a row


def measure(keys: list[str], repeats: int) -> Report:
    args = read_config(keys)
    n_heads, n_kv_heads, head_dim = args.model.heads()
    dtype, random = args.distributed.dtype, torch.Generator().manual_seed(args.seed)
    rows: list[dict[str, Any]] = []
    for seq_len, n in product(ROWS, DOCUMENTS):
        n_rows = TOKENS // seq_len
        starts = random_starts(n_rows, seq_len, n, random)
        q, k, v, grad = (
            torch.randn(n_rows, seq_len, h, head_dim, generator=random).to(dtype).transpose(1, 2)
            for h in (n_heads, n_kv_heads, n_kv_heads, n_heads)
        )
        title = f"rows of {seq_len} tokens, {n} documents"
        turns = take_turns(sides(q, k, v, grad, starts), repeats, title)
        apart = max(map(largest_difference, turns["each"].results, turns["mask"].results))
        row = {"row, tokens": seq_len, "documents": n, **times(turns, ("mask", "each"))}
        rows.append(row | {"apart": apart})
    notes = [
        f"medians of {repeats} turns of {TOKENS:,} tokens, forward and backward, {str(dtype)[6:]}, "
        f"{n_heads} heads ({n_kv_heads} of keys and values) of {head_dim} features;",
        "apart: the largest relative difference of their gradients",
    ]
    return Report(rows, notes)


def random_starts(n_rows: int, seq_len: int, n: int, random: torch.Generator) -> Tensor:
    """Where n documents of random lengths begin, int64 B n."""
    cuts = [torch.randperm(seq_len - 1, generator=random)[: n - 1] + 1 for _ in range(n_rows)]
    return torch.stack([torch.cat((torch.tensor([0]), cut.sort().values)) for cut in cuts])


def sides(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, starts: Tensor
) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Forward and backward with a mask and with each document by itself; each returns the gradients
    of q, k and v. What describes the documents is made here, before either is timed."""
    place = torch.arange(q.shape[2])
    document = torch.searchsorted(starts, place.repeat(len(starts), 1), right=True) - 1
    first = starts.gather(1, document)  # B S, where the document of each position begins
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))

    def gradients(mask: Mask) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(q, k, v, mask), (q, k, v), grad)

    mask = build_mask("sdpa", place, place, first, None, None)
    each = SeparateDocuments(starts, first, None)
    return {"mask": lambda: gradients(mask), "each": lambda: gradients(each)}
