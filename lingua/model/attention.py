"""Causal attention over the documents and the sliding window of each row: which implementation
computes it (`model.attn_impl`), and the mask in the form that this one takes.

Shapes in comments: B rows, S positions, L columns, K documents of a row.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from lingua.base.errors import UserError
from lingua.model.args import AttnImpl
from lingua.model.attend import HALF_DTYPES, Mask, dense_mask

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
