"""Causal attention over the documents and the sliding window of each row: which implementation
computes it (`model.attn_impl`), the mask in the form that this one takes, and the call.

Shapes in comments: B rows, S positions, L columns, H query heads, H' key and value heads, D
features of a head, K documents of a row.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lingua.errors import UserError

AttnImpl = Literal["auto", "sdpa", "varlen", "flex_attention", "fmha"]
HALF = (torch.bfloat16, torch.float16)


def choose_attention(
    asked: AttnImpl, head_dim: int, device: torch.device, dtype: torch.dtype, masked: bool
) -> tuple[AttnImpl, str]:
    """(implementation, why it is this one) for `model.attn_impl = asked`.

    Args:
        masked: whether documents or a sliding window hide anything.

    Raises:
        UserError: the one asked for cannot serve. Only `auto` is replaced by another.
    """
    planned = _planned.get()
    if planned == "cuda" and asked != "sdpa" and (masked or asked != "auto"):
        return "varlen", "the other kernels that skip what is hidden keep the same tensors"
    device = torch.device(planned or device)
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


_planned: ContextVar[str | None] = ContextVar("planned", default=None)


@contextmanager
def planned_for(device: str) -> Iterator[None]:
    """Inside it the choice is that for this type of device, though tensors are on meta."""
    token = _planned.set(device)
    try:
        yield
    finally:
        _planned.reset(token)


def _unmet(impl: AttnImpl, head_dim: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """What an implementation needs and does not have; None: it can serve."""
    if impl == "sdpa":
        return None
    if device.type != "cuda":
        return "a CUDA device"
    if impl == "fmha":
        if find_spec("xformers") is None:
            return "the package xformers (pip install 'lingua[fmha]')"
        if torch.cuda.is_available() and not _fmha_serves(head_dim, device, dtype):
            kind = f"{dtype} heads of {head_dim} features"
            if torch.are_deterministic_algorithms_enabled():
                kind += ", deterministic"
            return f"kernels of xformers for torch {torch.__version__}, {kind}"
    if impl == "varlen":
        if torch.__version__ < "2.12":  # compared as versions
            return "torch 2.12 or later, for grouped heads"
        if dtype not in HALF:
            return "bfloat16 or float16 (distributed.model_dtype = bf16)"
        if head_dim % 8 or head_dim > 256:
            return f"heads of a multiple of 8 and at most 256 features, not {head_dim}"
        if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
            return "compute capability 8.0"
    return None


@cache
def _fmha_serves(head_dim: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether xformers finds kernels for a small example, forward and backward."""
    q = torch.zeros(8, 1, head_dim, device=device, dtype=dtype, requires_grad=True)
    try:
        _fmha(q, q, q, torch.tensor([0, 8], dtype=torch.int32, device=device), 8, None)
    except NotImplementedError:
        return False
    return True


# -------------------------------------------------------------------------------------- masks


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


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        q, k, v, bounds, bounds, longest, longest,
        window_size=(-1 if window is None else window - 1, 0), enable_gqa=True,
    )  # fmt: skip
    assert isinstance(out, Tensor)  # a tuple only where more is asked for
    return out


def _fmha(
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
    k, v = _repeat_heads(k, v, q.shape[1], dim=1)  # its kernels have no backward of grouped heads
    return memory_efficient_attention(q[None], k[None], v[None], bias)[0]


LONG_ROW = 512  # positions from which documents one by one are faster, those of 16 tokens too


class Documents:
    """Each document by itself: on a CPU, whose kernel would compute all scores of a row with a
    mask. The compiler takes the mask, since it would make a graph for every list of lengths."""

    def __init__(self, documents: Tensor, first: Tensor, window: int | None) -> None:
        self.packed = PackedRows(_one_by_one, documents, first.shape[1], window)
        self.first = first  # int64 B S, the first column that each position sees

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # B H S D
        if not torch.compiler.is_compiling():
            return self.packed.attend(q, k, v)
        place = torch.arange(q.shape[2], device=q.device)
        return attend(q, k, v, _dense(place, place, self.first))


def _one_by_one(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, window: int | None
) -> Tensor:
    lengths = [n for n in bounds.diff().tolist() if n]
    out = []
    for document in zip(*(t.split(lengths) for t in (q, k, v)), strict=True):
        place, mask = torch.arange(len(document[0])), None
        if window is not None and window < len(place):
            mask = _dense(place, place, (place - window + 1).clamp(min=0))
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
    """Not compiled, it would compute all scores and keep them."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


Mask = Tensor | PackedRows | Documents | Blocks | None


def build_mask(
    impl: AttnImpl,
    column: Tensor,
    place: Tensor,
    starts: Tensor | None,
    documents: Tensor | None,
    window: int | None,
) -> Mask:
    """What `attend` takes.

    Args:
        column: int64 L, from 0 on.
        place: int64 S, the columns of the queries: all, for implementations other than sdpa.
        starts: int64 B S, the column at which the document of each position begins.
        documents: int64 B K, the same by row (lingua.model); None with a cache.
        window: columns that a query sees at most, its own included.
    """
    if impl in ("varlen", "fmha"):
        return PackedRows(_varlen if impl == "varlen" else _fmha, documents, len(place), window)
    # The first column that each position sees: S, or B S.
    first = (place - (len(column) if window is None else window) + 1).clamp(min=0)
    if starts is not None:
        first = torch.maximum(first, starts)
    # It is compiled for each shape. Without gradients the dense mask is one for all layers.
    if impl == "flex_attention" and torch.is_grad_enabled():
        return Blocks(first if first.dim() == 2 else first[None])
    one_by_one = first.device.type == "cpu" and len(place) >= LONG_ROW
    if documents is not None and one_by_one:
        return Documents(documents, first, window)
    return _dense(column, place, first)


def _dense(column: Tensor, place: Tensor, first: Tensor) -> Tensor:
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
    if isinstance(mask, PackedRows | Documents | Blocks):
        return mask.attend(q, k, v)
    n_heads, n_kv_heads = q.shape[1], k.shape[1]
    if q.shape[2] == 1:  # the heads that share keys as queries of one head, which reads them once
        grouped = q.reshape(q.shape[0], n_kv_heads, -1, q.shape[3])  # B H' H/H' D
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).reshape(q.shape)
    # On CUDA only the flash kernels, which take no mask, know grouped heads. Without one that does,
    # torch would compute all scores in float32 and keep them.
    flash = mask is None and q.dtype in HALF and q.shape[3] <= 256
    if n_heads != n_kv_heads and q.is_cuda and not flash:
        k, v = _repeat_heads(k, v, n_heads, dim=1)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=n_heads != k.shape[1]
    )


def _repeat_heads(k: Tensor, v: Tensor, n_heads: int, dim: int) -> tuple[Tensor, Tensor]:
    repeats = n_heads // k.shape[dim]
    return k.repeat_interleave(repeats, dim), v.repeat_interleave(repeats, dim)
