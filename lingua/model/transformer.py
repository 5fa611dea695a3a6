"""Building blocks of a Llama-style transformer: attention, feed-forward, norm, rotary embedding.

Plain modules that know nothing of meshes; the number of heads is read from the projections'
outputs, so they run as they are on the slice of heads that tensor parallelism gives a rank.
Parameter names, the interleaved rotary layout and the feed-forward size rule are Meta Lingua's, so
that its checkpoints fit. Shapes in comments: B rows, S positions, H heads, D features of a head,
E features of the residual stream.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lingua.base.hashing import hash_bits, key_of
from lingua.model import PerRow
from lingua.model.args import AttnImpl, TransformerArgs
from lingua.model.attend import Mask, attend
from lingua.model.attention import build_mask, choose_attention

if TYPE_CHECKING:
    from lingua.model.cache import Cache


class Context:
    """The values that the blocks of one forward share. It covers all positions, also under tensor
    and context parallelism, where x has a rank's part of them outside of attention.

    Attributes (L is S, or with a cache all columns up to the last one of this forward):
        tokens: int64 B S.
        positions: int64 S, or B S where rows differ, of each token in its document.
        cos, sin: `angles` of the features of a head.
        mask: what each position sees, as `attend` takes it; None: every position before it. It is
            set before the first block.
        documents: int64 B S, the index of each position's document in its row: positions start
            again at 0 in each, and a token sees only its own; with a cache 0 for padding and 1 for
            the text behind it. None: a row is one document.
        begins: bool B S, True at the first position of each document; None where `documents` is.
        noise: int64 B S, a random key of each position; None: no dropout. Made of one of each row.
            A block has its own, see `at`.
        cache: the `seq_len` columns are those from `cache.begin` on.

    Not a dataclass: FSDP casts what it finds in those to the dtype of the parameters, and angles
    in bfloat16 are off by up to 0.4 %.
    """

    def __init__(
        self,
        args: TransformerArgs,
        tokens: Tensor,
        documents: Tensor | None = None,
        noise: Tensor | None = None,
        cache: "Cache | None" = None,
    ) -> None:
        """The arguments are those of the model's forward."""
        self.args, self.tokens, self.cache = args, tokens, cache
        self.mask: Mask = None
        self.documents: Tensor | None = None
        self.begins: Tensor | None = None
        self._calls = Counter[str]()  # of each block
        begin = 0 if cache is None else cache.begin
        column = torch.arange(begin + tokens.shape[1], device=tokens.device)
        place = self.positions = column[begin:]
        starts = None  # B S, the column at which each position's document begins
        if documents is not None:
            places = place.repeat(len(documents), 1)
            self.documents = torch.searchsorted(documents, places, right=True) - 1
            starts = documents.gather(1, self.documents)
        elif cache is not None and cache.longest_padding:
            self.documents = (place >= cache.padding[:, None]).long()
            starts = self.documents * cache.padding[:, None]
        if starts is not None:
            self.begins, self.positions = place == starts, place - starts
        self._columns = column, place, starts, documents
        self.noise = None if noise is None else hash_bits(noise[:, None], place)
        self.cos, self.sin = self.angles(args.heads()[2])

    def angles(self, size: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions for `size` features (D), which `rotate` takes: float32
        S 1 D each, or B S 1 D where rows differ (Su et al., 2021)."""
        frequencies = rotary_frequencies(self.args, self.tokens.device, size)
        angle = self.positions[..., None].float() * frequencies
        cos, sin = angle.cos(), angle.sin()  # S D/2, or B S D/2
        pairs = (cos, cos), (-sin, sin)
        cos, sin = (torch.stack(p, dim=-1).flatten(-2).unsqueeze(-2) for p in pairs)
        return cos, sin

    def set_mask(self, args: TransformerArgs, dtype: torch.dtype) -> Mask:
        """Set `mask`, in the form for queries and keys of this dtype, and return it. Raises
        UserError where `args.attn_impl` cannot serve."""
        column, place, starts, documents = self._columns
        device, window = column.device, args.sliding_window
        if window is not None and window >= len(column):
            window = None  # it hides nothing
        continues = 1 < len(place) < len(column)  # with a cache
        hides = starts is not None or window is not None or continues
        impl: AttnImpl = "sdpa"  # the only one that attends to a cache
        if self.cache is None:
            head_dim = args.heads()[2]
            if device.type != "meta" and torch.is_autocast_enabled(device.type):
                dtype = torch.get_autocast_dtype(device.type)
            impl, _ = choose_attention(args.attn_impl, head_dim, device, dtype, hides)
        if hides or impl != "sdpa":
            self.mask = build_mask(impl, column, place, starts, documents, window)
        return self.mask

    def at(self, block: str) -> "Context":
        """The context of one call of a block, whose noise is that of the block's name and of how
        often it was called before in this forward. Both enter here and not inside the block: blocks
        that differ in nothing but shapes share a compiled graph, and one that is computed again has
        the same noise."""
        if self.noise is None:
            return self
        call, self._calls[block] = self._calls[block], self._calls[block] + 1
        context = copy(self)
        context.noise = hash_bits(key_of(block, call) if call else key_of(block), self.noise)
        return context


def rotary_frequencies(args: TransformerArgs, device: torch.device, size: int) -> Tensor:
    """Radians a position turns each pair of `size` features by: float32 size/2, as Llama has it."""
    pair = torch.arange(0, size, 2, device=device, dtype=torch.float32)
    frequency = 1.0 / args.rope_theta ** (pair / size)
    scaling = args.rope_scaling
    if scaling is None:
        return frequency
    turns = scaling.original_seq_len * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequency / scaling.factor + kept * frequency


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of features (2i, 2i + 1) of x (B S H D) by the angle of its position: (a, b)
    becomes (a cos - b sin, b cos + a sin)."""
    wide = x.float()
    if eager_on_cpu(x):  # a complex product takes a third of the time; compilers have none
        turn = torch.complex(cos[..., ::2], sin[..., 1::2])
        pairs = torch.view_as_complex(wide.contiguous().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)
    even, odd = wide.unflatten(-1, (-1, 2)).unbind(-1)  # B S H D/2 each
    swapped = torch.stack((odd, even), dim=-1).flatten(-2)
    return (wide * cos + swapped * sin).type_as(x)


def eager_on_cpu(x: Tensor) -> bool:
    """Whether operators on x, which is no DTensor, run one by one on a CPU: a pass over memory
    each."""
    return not torch.compiler.is_compiling() and type(x) is Tensor and x.is_cpu


@torch.no_grad()
def trunc_normal_(weight: Tensor, std: float) -> None:
    """Fill with a normal of mean 0, cut off at three deviations: what lies beyond is drawn again.
    Zeros where `std` is 0. The bits of torch's own trunc_normal_ depend on its version."""
    nn.init.normal_(weight, std=std)
    while bool((beyond := weight.abs() > 3 * std).any()):
        again = nn.init.normal_(torch.empty_like(weight), std=std)
        weight.copy_(torch.where(beyond, again, weight))


def init_projections(
    inputs: Iterable[nn.Linear], output: nn.Linear, out_factor: float, std: float | None = None
) -> None:
    """Fill the matrices of a sublayer with deviation `std`, or 1 / sqrt(inputs) of each, and biases
    with zeros. That of `output`, which writes to the residual stream, is divided by `out_factor`.
    """
    for w, factor in (*((w, 1.0) for w in inputs), (output, out_factor)):
        trunc_normal_(w.weight, (std or w.in_features**-0.5) / factor)
        if w.bias is not None:
            nn.init.zeros_(w.bias)


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm. Of float32 on a CPU, where torch has no kernel for it, it takes a third of
    the time, and has no second derivative."""

    over_positions = "pointwise"
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        if eager_on_cpu(x) and x.dtype == self.weight.dtype == torch.float32:
            return _Normalise.apply(x, self.weight, self.eps)
        return super().forward(x)


class _Normalise(torch.autograd.Function):
    """x (... E) over the root mean square of its features, times weight (E)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = (size.square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        product = grad * x
        along = (product @ weight)[..., None] * (scale.square() / -x.shape[-1])
        x_grad = (grad * weight).addcmul_(x, along).mul_(scale)
        return x_grad, product.flatten(0, -2).T.mv(scale.flatten()), None


class AllHeadsNorm(RMSNorm):
    """RMSNorm as arithmetic, which also runs where the features are a DTensor that is split over
    ranks: torch's operator does not. It adds up their squares over the ranks."""

    over_positions = "pointwise"

    def forward(self, x: Tensor) -> Tensor:  # B S H*D
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (wide * scale * self.weight).type_as(x)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions. A derived class may make other `values`."""

    over_positions = "heads"

    def __init__(self, args: TransformerArgs, out_factor: float) -> None:
        super().__init__()
        n_heads, n_kv_heads, self.head_dim = args.heads()
        self.std = args.init_base_std
        self.out_factor = out_factor
        self.wq = nn.Linear(args.dim, n_heads * self.head_dim, bias=args.qkv_bias)
        self.wk = nn.Linear(args.dim, n_kv_heads * self.head_dim, bias=args.qkv_bias)
        self.wv = nn.Linear(args.dim, n_kv_heads * self.head_dim, bias=args.qkv_bias)
        self.wo = nn.Linear(n_heads * self.head_dim, args.dim, bias=False)
        self.qk_norm = args.qk_norm
        self.all_heads = ["wq", "wk", "wv"]  # the last modules that compute with all heads together
        if self.qk_norm == "per_head":
            self.q_norm = RMSNorm(self.head_dim, eps=args.norm_eps)
            self.k_norm = RMSNorm(self.head_dim, eps=args.norm_eps)
        elif self.qk_norm == "all_heads":
            self.q_norm = AllHeadsNorm(n_heads * self.head_dim, eps=args.norm_eps)
            self.k_norm = AllHeadsNorm(n_kv_heads * self.head_dim, eps=args.norm_eps)
            self.all_heads = ["q_norm", "k_norm", "wv"]

    def forward(self, x: Tensor, ctx: Context) -> Tensor:  # B S E -> B S E
        q, k, v = self.wq(x), self.wk(x), self.values(x, ctx)
        if self.qk_norm == "all_heads":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        if self.qk_norm == "per_head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, ctx.cos, ctx.sin), rotate(k, ctx.cos, ctx.sin)  # B S H D
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if ctx.cache is not None:
            k, v = ctx.cache.extend(self, k, v, dim=2)
        out = attend(q, k, v, ctx.mask)
        return self.wo(out.transpose(1, 2).flatten(-2))

    def values(self, x: Tensor, ctx: Context) -> Tensor:  # B S E -> B S H*D
        return self.wv(x)

    def reset_parameters(self) -> None:
        init_projections((self.wq, self.wk, self.wv), self.wo, self.out_factor, self.std)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020): w2(silu(w1 x) * w3 x)."""

    over_positions = "pointwise"

    def __init__(self, args: TransformerArgs, out_factor: float) -> None:
        super().__init__()
        self.std = args.init_base_std
        self.out_factor = out_factor
        self.w1 = nn.Linear(args.dim, args.hidden_dim(), bias=False)
        self.w3 = nn.Linear(args.dim, args.hidden_dim(), bias=False)
        self.w2 = nn.Linear(args.hidden_dim(), args.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # B S E -> B S E
        return self.w2(F.silu(self.w1(x)) * self.w3(x))

    def reset_parameters(self) -> None:
        init_projections((self.w1, self.w3), self.w2, self.out_factor, self.std)


class Dropout(nn.Module):
    """Zeroes each element with probability p, and scales the others so that the mean stays.

    An element's fate is a hash of its position's key, the site and its feature: no generator, so it
    is the same when it is computed again, compiled, or for some of the positions only.
    """

    over_positions = "pointwise"

    def __init__(self, p: float, site: str) -> None:
        super().__init__()
        self.p, self.site = p, key_of(site)
        self.limit = int(p * 2**64) - 2**63  # a share p of all int64 is below

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:  # B S E, int64 B S -> B S E
        kept = _kept_on_cpu if x.device.type == "cpu" else kept_elements
        keep = kept(noise, self.site, x.shape[-1], self.limit)
        return torch.where(keep, x / (1 - self.p), 0.0)


def kept_elements(noise: Tensor, site: int, n_features: int, limit: int) -> Tensor:
    """bool B S E, True where an element stays: arithmetic that the compiler puts into the kernel
    that uses it."""
    feature = torch.arange(n_features, device=noise.device)
    return hash_bits(hash_bits(site, noise)[..., None], feature) >= limit


# One operator to the compiler: torch 2.13 makes wrong code of these integers for the CPU where a
# vector register does not divide E, up to writing past the end.
_kept_on_cpu = torch.library.custom_op("lingua::keep", kept_elements, mutates_args=())


@_kept_on_cpu.register_fake
def _(noise: Tensor, site: int, n_features: int, limit: int) -> Tensor:
    return noise.new_empty((*noise.shape, n_features), dtype=torch.bool)


class TransformerBlock(nn.Module):
    """Attention, then feed-forward, each on the normalised residual stream; or on the stream as it
    is, and normalised themselves (`norm_placement`).

    Either may be of another kind, made and called as Attention and FeedForward are. A feed-forward
    may return (B S E, terms per row): the block then does, too.
    """

    over_positions = "pointwise"

    def __init__(
        self,
        args: TransformerArgs,
        depth: int,
        attention: Callable[[TransformerArgs, float], nn.Module] = Attention,
        feed_forward: Callable[[TransformerArgs, float], nn.Module] = FeedForward,
    ) -> None:
        super().__init__()
        out_factor = {
            "disabled": 1.0,
            "global_depth": (2 * (args.n_layers + 1)) ** 0.5,
            "current_depth": (2 * (depth + 1)) ** 0.5,
            "dim_ratio": args.dim / 4096,
            "zero": math.inf,
        }[args.init_std_factor]
        self.attention = attention(args, out_factor)
        self.feed_forward = feed_forward(args, out_factor)
        self.norms_outputs = args.norm_placement == "output"
        self.attention_norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.attention_dropout = Dropout(args.dropout, "attention")
        self.ffn_dropout = Dropout(args.dropout, "feed_forward")

    def forward(self, x: Tensor, ctx: Context) -> Tensor | tuple[Tensor, PerRow]:  # B S E -> B S E
        out = self.attention(x if self.norms_outputs else self.attention_norm(x), ctx)
        out = self.attention_norm(out) if self.norms_outputs else out
        x = x + (out if ctx.noise is None else self.attention_dropout(out, ctx.noise))
        out = self.feed_forward(x if self.norms_outputs else self.ffn_norm(x))
        out, per_row = out if isinstance(out, tuple) else (out, None)
        out = self.ffn_norm(out) if self.norms_outputs else out
        x = x + (out if ctx.noise is None else self.ffn_dropout(out, ctx.noise))
        return x if per_row is None else (x, per_row)


def run_blocks(
    blocks: Iterable[tuple[str, nn.Module]], x: Tensor, ctx: Context, per_row: PerRow
) -> Tensor:
    """x (B S E) after these blocks, given with their names, which decide their noise. A block may
    be among them several times.

    A block is called as block(x, ctx) and returns x, or (x, terms) with float32 B by name (see
    lingua.model.Losses). The sums of the terms over the blocks are put into `per_row` here: a block
    that is checkpointed runs twice, so it must have no effect but what it returns.
    """
    for name, block in blocks:
        x = block(x, ctx.at(name))
        if isinstance(x, tuple):
            x, terms = x
            for key, term in terms.items():
                per_row[key] = per_row[key] + term if key in per_row else term
    return x


def flops_per_token(args: TransformerArgs, vocab_size: int, seq_len: int) -> float:
    """Floating-point operations of forward and backward for one token of a row of `seq_len`.

    6 per weight of a matrix product (2 forward, 4 backward; Kaplan et al., 2020, section 2.1), the
    head's included even when it is tied, the embedding's look-up not; and attention's two products,
    12 H D per visible key, of which a causal query has (seq_len + 1) / 2 on average and at most
    `sliding_window`.
    """
    n_heads, n_kv_heads, head_dim = args.heads()
    attention = args.dim * head_dim * (2 * n_heads + 2 * n_kv_heads)
    weights = args.n_layers * (attention + 3 * args.dim * args.hidden_dim()) + args.dim * vocab_size
    window = min(args.sliding_window or seq_len, seq_len)
    keys = window - window * (window - 1) / (2 * seq_len)  # mean over the positions of a row
    return 6 * weights + 12 * args.n_layers * n_heads * head_dim * keys
