"""Causal attention over the documents and the sliding window of each row: which implementation
computes it (`model.attn_impl`), and the mask in the form that this one takes.

Shapes in comments: B rows, S positions, L columns, K documents of a row.
"""

import torch
from torch import Tensor

from lingua.base.errors import UserError
from lingua.model.args import AttnImpl
from lingua.model.attend import Mask, dense_mask

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
    if asked == "auto" and device.type in ("cpu", "mps"):
        return "sdpa", f"the only one that trains on {'a CPU' if device.type == 'cpu' else 'mps'}"
    if asked == "auto" and not masked:
        return "sdpa", "fused kernels, since every token sees all before it"
    from lingua.model.masks import unmet

    if asked != "auto":
        if (need := unmet(asked, head_dim, device, dtype)) is not None:
            raise UserError(f"model.attn_impl = {asked}: needs {need}; auto takes one that serves")
        return asked, "as model.attn_impl asks"
    needs = unmet("varlen", head_dim, device, dtype)
    if needs is None:
        return "varlen", "skips what documents and the window hide"
    return "flex_attention", f"skips what documents and the window hide; varlen needs {needs}"


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
