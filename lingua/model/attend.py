"""Causal attention with a mask: by torch's scaled_dot_product_attention, or by a mask in a form of
its own (lingua.model.masks).

Shapes in comments: B rows, S positions, L columns, H query heads, H' key and value heads, D
features of a head.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

HALF_DTYPES = (torch.bfloat16, torch.float16)


class Attends(Protocol):
    """A mask in a form of its own, which computes attention with it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


Mask = Tensor | Attends | None


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Causal softmax attention.

    q is B H S D; k and v are B H' L D with H' dividing H, v also with other features. A tensor as
    mask is bool S L or B 1 S L, True where a query (row) sees a key (column); None: every query
    sees all keys up to its own, where L is S, or S is 1 and the query the last of all. Returns
    B H S D, with the features of v.
    """
    if not (mask is None or isinstance(mask, Tensor)):
        size, n = q.shape[3], v.shape[3]
        if n == size:
            return mask.attend(q, k, v)
        parts = F.pad(v, (0, -n % size)).split(size, dim=3)  # its kernels know one size
        return torch.cat([mask.attend(q, k, part) for part in parts], dim=3)[..., :n]
    n_heads, n_kv_heads = q.shape[1], k.shape[1]
    if q.shape[2] == 1:  # the heads that share keys as queries of one head, which reads them once
        grouped = q.reshape(q.shape[0], n_kv_heads, -1, q.shape[3])  # B H' H/H' D
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask)
        return out.reshape(*q.shape[:3], v.shape[3])
    # On CUDA only the flash kernels, which take no mask, know grouped heads. Without one that does,
    # torch would compute all scores in float32 and keep them.
    flash = mask is None and q.dtype in HALF_DTYPES and v.shape[3] == q.shape[3] <= 256
    if n_heads != n_kv_heads and ((q.is_cuda and not flash) or q.device.type == "mps"):
        k, v = repeat_heads(k, v, n_heads, dim=1)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=n_heads != k.shape[1]
    )


def repeat_heads(k: Tensor, v: Tensor, n_heads: int, dim: int) -> tuple[Tensor, Tensor]:
    repeats = n_heads // k.shape[dim]
    return k.repeat_interleave(repeats, dim), v.repeat_interleave(repeats, dim)


def dense_mask(column: Tensor, place: Tensor, first: Tensor) -> Tensor:
    """bool S L or B 1 S L, from the first column that each position sees, int64 S or B S."""
    mask = (column <= place[:, None]) & (column >= first[..., None])
    return mask if first.dim() == 1 else mask[:, None]
