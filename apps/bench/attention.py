"""Attention over documents on a CPU: each by itself, as in long rows, over a mask of whole rows.

Forward and backward of the heads of one layer. The two take the same rows in turns. `keys` of the
training program set the heads and their dtype.
"""

import time
from itertools import product

import torch
from torch import Tensor

from apps.bench.report import Report, spread
from apps.main.config import TrainArgs
from lingua.attention import LONG_ROW, Documents, Mask, attend, build_mask
from lingua.config.load import load
from lingua.config.meta_lingua import META_LINGUA
from lingua.format import align

TOKENS = 4096  # of all rows
ROWS = (LONG_ROW, 1024, 2048, 4096)
DOCUMENTS = (1, 4, 16, 64)  # of a row


def measure(keys: list[str], repeats: int = 10) -> Report:
    """`keys` is the command line of the training program; `repeats` turns of each are measured."""
    args, _ = load(TrainArgs, keys, foreign=META_LINGUA)
    n_heads, n_kv_heads, head_dim = args.model.heads()
    heads = n_heads, n_kv_heads, n_kv_heads, n_heads
    dtype, random = args.distributed.dtype, torch.Generator().manual_seed(args.seed)
    cases = []
    for seq_len, n in product(ROWS, DOCUMENTS):
        n_rows = TOKENS // seq_len
        documents = random_documents(n_rows, seq_len, n, random)
        q, k, v, grad = (
            torch.randn(n_rows, seq_len, h, head_dim, generator=random).to(dtype).transpose(1, 2)
            for h in heads
        )
        turns = [turn(q, k, v, grad, documents, i % 2 == 0) for i in range(repeats + 1)][1:]
        masked, each, apart = zip(*turns, strict=True)
        ratio = spread(mask / own for mask, own in zip(masked, each, strict=True))
        case = {"seq_len": seq_len, "documents": n, "ratio": ratio, "difference": max(apart)}
        cases.append(case | {"masked_s": spread(masked), "each_s": spread(each)})
    lines = [
        *table(cases),
        "",
        f"medians of {repeats} turns of {TOKENS:,} tokens, forward and backward, {str(dtype)[6:]}, "
        f"{n_heads} heads ({n_kv_heads} of keys and values) of {head_dim} features;",
        f"gradients: at most {max(case['difference'] for case in cases):.1e} apart (relative)",
    ]
    return Report(lines, {"cases": cases})


def random_documents(n_rows: int, seq_len: int, n: int, random: torch.Generator) -> Tensor:
    """Where n documents of random lengths begin, int64 B n."""
    cuts = [torch.randperm(seq_len - 1, generator=random)[: n - 1] + 1 for _ in range(n_rows)]
    return torch.stack([torch.cat((torch.tensor([0]), cut.sort().values)) for cut in cuts])


def turn(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, documents: Tensor, mask_first: bool
) -> tuple[float, float, float]:
    """Seconds with the mask and of each document by itself, and the largest relative difference of
    a gradient. What both are made of is not in the seconds."""
    place = torch.arange(q.shape[2])
    own = torch.searchsorted(documents, place.repeat(len(documents), 1), right=True) - 1
    first = documents.gather(1, own)
    masks = {
        "mask": build_mask("sdpa", place, place, first, None, None),
        "each": Documents(documents, first, None),
    }
    order = ("mask", "each") if mask_first else ("each", "mask")
    done = {kind: timed(q, k, v, grad, masks[kind]) for kind in order}
    (masked, expected), (each, found) = done["mask"], done["each"]
    apart = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
    return masked, each, max(apart)


def timed(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Mask
) -> tuple[float, tuple[Tensor, ...]]:
    """Seconds of forward and backward, and the gradients of q, k and v."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    begin = time.perf_counter()
    gradients = torch.autograd.grad(attend(q, k, v, mask), (q, k, v), grad)
    return time.perf_counter() - begin, gradients


def table(cases: list[dict]) -> list[str]:
    rows = [("row, tokens", "documents", "mask, ms", "each, ms", "ratio", "range")]
    for case in cases:
        ratio = case["ratio"]
        masked, each = (f"{1000 * case[key].median:.1f}" for key in ("masked_s", "each_s"))
        middle, around = f"{ratio.median:.2f}", f"{ratio.low:.2f} to {ratio.high:.2f}"
        rows.append((f"{case['seq_len']:,}", str(case["documents"]), masked, each, middle, around))
    return align(rows, left=0)
