"""Causal attention over the documents and the sliding window of each row: which implementation
computes it (`model.attn_impl`), the mask in the form that this one takes, and the call.

Shapes in comments: B rows, S positions, L columns, H query heads, H' key and value heads, D
features of a head.
"""

from importlib.util import find_spec
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lingua.base.errors import UserError
from lingua.model.args import AttnImpl

HALF_DTYPES = (torch.bfloat16, torch.float16)
MIN_SEPARATED = 512  # positions; shorter rows are faster with a mask, whatever their documents


def choose_attention(
    asked: AttnImpl, head_dim: int, device: torch.device, dtype: torch.dtype, masked: bool
) -> tuple[AttnImpl, str]:
    """(implementation, why it is this one) for `model.attn_impl = asked`.

    Args:
        masked: whether documents or a sliding window hide anything.

    Raises:
        UserError: the one asked for cannot serve. Only `auto` is replaced by another.
    """
    if asked != "auto":
        if (need := _unmet(asked, head_dim, device, dtype)) is not None:
            raise UserError(f"model.attn_impl = {asked}: needs {need}; auto takes one that serves")
        return asked, "as model.attn_impl asks"
    if device.type == "cpu":
        return "sdpa", "the only one that trains on a CPU"
    if not masked:
        return "sdpa", "fused kernels, since every token sees all before it"
    needs = _unmet("varlen", head_dim, device, dtype)
    if needs is None:
        return "varlen", "skips what documents and the window hide"
    return "flex_attention", f"skips what documents and the window hide; varlen needs {needs}"


def _unmet(impl: AttnImpl, head_dim: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns what an implementation requires and does not have; None where it can be used."""
    if impl == "sdpa":
        return None
    if device.type != "cuda":
        return "a CUDA device"
    if impl == "fmha":
        if find_spec("xformers") is None:
            return "the package xformers (docs/configuration.md#attention)"
        from lingua.model.masks import fmha_unmet

        if torch.cuda.is_available():
            deterministic = torch.are_deterministic_algorithms_enabled()
            return fmha_unmet(head_dim, device, dtype, deterministic)
    if impl == "varlen":
        if dtype not in HALF_DTYPES:
            return "bfloat16 or float16 (distributed.model_dtype = bf16)"
        if head_dim % 8 or head_dim > 256:
            return f"heads of a multiple of 8 and at most 256 features, not {head_dim}"
        if torch.__version__ < "2.12":  # compared as versions
            return "torch 2.12 or later, for grouped heads"
        if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
            return "compute capability 8.0"
    return None


# -------------------------------------------------------------------------------------- masks


class Attends(Protocol):
    """A mask in a form of its own, which computes attention with it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


Mask = Tensor | Attends | None


def build_mask(
    impl: AttnImpl,
    column: Tensor,
    place: Tensor,
    starts: Tensor | None,
    documents: Tensor | None,
    window: int | None,
) -> Mask:
    """Returns the mask that `attend` takes.

    Args:
        column: int64 L, from 0 on.
        place: int64 S, the columns of the queries: all, for implementations other than sdpa.
        starts: int64 B S, the column at which the document of each position begins.
        documents: int64 B K, the same by row (lingua.model); None with a cache.
        window: columns that a query sees at most, its own included.
    """
    if impl in ("varlen", "fmha"):
        from lingua.model.masks import PackedRows, fmha, varlen

        return PackedRows(varlen if impl == "varlen" else fmha, documents, len(place), window)
    # The first column that each position sees: S, or B S.
    first = (place - (len(column) if window is None else window) + 1).clamp(min=0)
    if starts is not None:
        first = torch.maximum(first, starts)
    # It is compiled for each shape. Without gradients the dense mask is one for all layers.
    if impl == "flex_attention" and torch.is_grad_enabled():
        from lingua.model.masks import Blocks

        return Blocks(first if first.dim() == 2 else first[None])
    if documents is not None and first.device.type == "cpu" and len(place) >= MIN_SEPARATED:
        from lingua.model.masks import SeparateDocuments

        return SeparateDocuments(documents, first, window)
    return dense_mask(column, place, first)


def dense_mask(column: Tensor, place: Tensor, first: Tensor) -> Tensor:
    """bool S L or B 1 S L, from the first column that each position sees, int64 S or B S."""
    mask = (column <= place[:, None]) & (column >= first[..., None])
    return mask if first.dim() == 1 else mask[:, None]


# ------------------------------------------------------------------------------------ attention


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Causal softmax attention.

    q is B H S D; k and v are B H' L D with H' dividing H. A tensor as mask is bool S L or B 1 S L,
    True where a query (row) sees a key (column); None: every query sees all keys up to its own,
    where L is S, or S is 1 and the query the last of all. Returns B H S D.
    """
    if not (mask is None or isinstance(mask, Tensor)):
        return mask.attend(q, k, v)
    n_heads, n_kv_heads = q.shape[1], k.shape[1]
    if q.shape[2] == 1:  # the heads that share keys as queries of one head, which reads them once
        grouped = q.reshape(q.shape[0], n_kv_heads, -1, q.shape[3])  # B H' H/H' D
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).reshape(q.shape)
    # On CUDA only the flash kernels, which take no mask, know grouped heads. Without one that does,
    # torch would compute all scores in float32 and keep them.
    flash = mask is None and q.dtype in HALF_DTYPES and q.shape[3] <= 256
    if n_heads != n_kv_heads and q.is_cuda and not flash:
        k, v = repeat_heads(k, v, n_heads, dim=1)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=n_heads != k.shape[1]
    )


def repeat_heads(k: Tensor, v: Tensor, n_heads: int, dim: int) -> tuple[Tensor, Tensor]:
    repeats = n_heads // k.shape[dim]
    return k.repeat_interleave(repeats, dim), v.repeat_interleave(repeats, dim)
