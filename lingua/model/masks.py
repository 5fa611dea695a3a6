"""Masks in forms of their own and the kernels that take them, imported where one is chosen
(lingua.model.attention).

Shapes in comments: B rows, S positions, H query heads, H' key and value heads, D features of a
head, K documents of a row. Packed rows are [B*S, H or H', D].
"""

from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lingua.model.args import AttnImpl
from lingua.model.attend import HALF_DTYPES, attend, dense_mask, repeat_heads


def unmet(impl: AttnImpl, head_dim: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns what an implementation requires and does not have; None where it can be used."""
    if impl == "sdpa":
        return None
    if device.type != "cuda":
        return "a CUDA device"
    if impl == "fmha":
        if find_spec("xformers") is None:
            return "the package xformers (docs/configuration.md#attention)"
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
        old = torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0)
        if torch.version.hip or old:
            return "a GPU of NVIDIA with compute capability 8.0"
    return None


class PackedRows:
    """All rows end to end, and where documents begin: for kernels of sequences of any length."""

    def __init__(
        self,
        kernel: Callable[[Tensor, Tensor, Tensor, Tensor, int, int | None], Tensor],
        documents: Tensor | None,  # int64 B K, see lingua.model
        seq_len: int,
        window: int | None,
    ) -> None:
        self.kernel, self.window = kernel, window
        self.bounds: Tensor | None = None  # int32 B K + 1
        if documents is not None:
            # As many for every row, so that the host knows their number: unused ones are empty.
            row = torch.arange(len(documents), device=documents.device)[:, None]
            begins = (documents + row * seq_len).flatten()
            self.bounds = F.pad(begins, (0, 1), value=len(documents) * seq_len).int()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # B H S D
        n_rows, _, seq_len, _ = q.shape
        bounds = self.bounds
        if bounds is None:
            end = n_rows * seq_len
            bounds = torch.arange(0, end + 1, seq_len, dtype=torch.int32, device=q.device)
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))  # B*S H D
        out = self.kernel(q, k, v, bounds, seq_len, self.window)
        return out.unflatten(0, (n_rows, seq_len)).transpose(1, 2)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # Grouped heads; torch 2.11 has no word for them, and gives its kernel whatever comes.
    grouped: dict[str, Any] = {"enable_gqa": True} if torch.__version__ >= "2.12" else {}
    out = varlen_attn(
        q, k, v, bounds, bounds, longest, longest,
        window_size=(-1 if window is None else window - 1, 0), **grouped,
    )  # fmt: skip
    assert isinstance(out, Tensor)  # a tuple only where more is asked for
    return out


def fmha(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, window: int | None
) -> Tensor:
    from xformers.ops.fmha import memory_efficient_attention
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask

    # Lists of lengths serve its checks and prints alone. The real ones are on the device only, for
    # which the host would wait: whole rows stand for them.
    rows = [longest] * (len(q) // longest)
    bias = BlockDiagonalCausalMask.from_seqlens(rows, device=torch.device("cpu"))
    bias.q_seqinfo.seqstart = bias.k_seqinfo.seqstart = bounds
    if window is not None:
        bias = bias.make_local_attention(window)
    k, v = repeat_heads(k, v, q.shape[1], dim=1)  # its kernels have no backward of grouped heads
    return memory_efficient_attention(q[None], k[None], v[None], bias)[0]


@cache
def fmha_unmet(
    head_dim: int, device: torch.device, dtype: torch.dtype, deterministic: bool
) -> str | None:
    """What a small example of two sequences, forward and backward, lacks of xformers; or None."""
    q = torch.zeros(16, 1, head_dim, device=device, dtype=dtype, requires_grad=True)
    try:
        with torch.enable_grad():
            bounds = torch.tensor([0, 8, 16], dtype=torch.int32, device=device)
            fmha(q, q, q, bounds, 8, None).sum().backward()
    except NotImplementedError as error:
        found = f"xformers {version('xformers')}"
        if "build with CUDA" in str(error):
            return (
                f"xformers built for CUDA {torch.version.cuda}, as torch {torch.__version__} is, "
                f"not this {found} (docs/configuration.md#attention)"
            )
        kind = f"{dtype} heads of {head_dim} features"
        return f"kernels for {kind}{', deterministic' * deterministic}, which {found} has not"
    return None


class SeparateDocuments:
    """Computes each document by itself, for a CPU, whose kernel would compute all scores of a row
    with a mask. The compiler takes the mask, since it would make a graph for every list of
    lengths."""

    def __init__(self, documents: Tensor, first: Tensor, window: int | None) -> None:
        self.packed = PackedRows(_one_by_one, documents, first.shape[1], window)
        self.first = first  # int64 B S, the first column that each position sees

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # B H S D
        if not torch.compiler.is_compiling():
            return self.packed.attend(q, k, v)
        place = torch.arange(q.shape[2], device=q.device)
        return attend(q, k, v, dense_mask(place, place, self.first))


def _one_by_one(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, window: int | None
) -> Tensor:
    lengths = [n for n in bounds.diff().tolist() if n]
    out = []
    for document in zip(*(t.split(lengths) for t in (q, k, v)), strict=True):
        place, mask = torch.arange(len(document[0])), None
        if window is not None and window < len(place):
            mask = dense_mask(place, place, (place - window + 1).clamp(min=0))
        q1, k1, v1 = (t.transpose(0, 1)[None] for t in document)  # 1 H N D
        out.append(attend(q1, k1, v1, mask)[0].transpose(0, 1))
    return torch.cat(out)


BLOCK = 128  # positions: flex_attention's default


class Blocks:
    """The blocks of BLOCK x BLOCK scores that flex_attention computes, from the first column that
    each position sees (int64 B S, or 1 S where rows do not differ; never falling along S)."""

    def __init__(self, first: Tensor) -> None:
        from torch.nn.attention.flex_attention import BlockMask

        seq_len = first.shape[1]
        n = -(-seq_len // BLOCK)
        i = torch.arange(n, device=first.device)
        padded = F.pad(first, (0, n * BLOCK - seq_len), value=seq_len)
        # Row i of blocks sees those from `begin` to i, and all of those from `whole` to i - 1.
        begin = (padded[:, ::BLOCK] // BLOCK)[:, None]  # B 1 n
        whole = torch.minimum(-(-padded[:, BLOCK - 1 :: BLOCK] // BLOCK), i)[:, None]
        n_parts = whole - begin
        parts = torch.where(i < n_parts[..., None], begin[..., None] + i, i[:, None])  # B 1 n n
        shared = len(first) == 1
        self.mask = BlockMask.from_kv_blocks(
            (n_parts + 1).int(), parts.clamp(max=n - 1).int(),
            (i - whole).int(), (whole[..., None] + i).clamp(max=n - 1).int(),
            BLOCK_SIZE=BLOCK, seq_lengths=(seq_len, seq_len),
            mask_mod=lambda b, h, at, key: (key <= at) & (key >= first[0 if shared else b, at]),
        )  # fmt: skip
        self.kernel = _compiled_flex_attention()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # B H S D
        return self.kernel(q, k, v, block_mask=self.mask, enable_gqa=q.shape[1] != k.shape[1])


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    """Compile flex_attention: not compiled, it would compute all scores and keep them."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
