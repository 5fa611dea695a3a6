"""The sizes and parts of a transformer: the keys of `model` that every app has."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lingua.config.schema import Announced, Guarded, bounds, require

MAX_FEATURES = 1 << 24  # largest side of a matrix
AttnImpl = Literal["auto", "sdpa", "varlen", "flex_attention", "fmha"]


@dataclass
class RopeScaling:
    """Rotary frequencies stretched as in Llama 3.1, for contexts longer than those trained on."""

    factor: Guarded[float] = 8.0  # what the lowest frequencies are divided by
    # turns in original_seq_len up to which a frequency is divided by the whole factor
    low_freq_factor: Guarded[float] = 1.0
    high_freq_factor: Guarded[float] = 4.0  # turns from which on it is kept
    original_seq_len: Guarded[int] = 8192  # context the unscaled frequencies were trained on

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 1, "original_seq_len")
        yield from require(self, "at least 1 and finite", lambda v: 1 <= v < math.inf, "factor")
        if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            yield "low_freq_factor", f"must be above 0 and below {self.high_freq_factor} (high)"


@dataclass
class TransformerArgs:
    dim: Guarded[int] = 512  # features of the residual stream
    n_layers: Guarded[int] = 8  # blocks
    head_dim: Guarded[int | None] = None  # features of a head; null: dim / n_heads
    n_heads: Guarded[int | None] = None  # query heads; null: dim / head_dim
    n_kv_heads: Guarded[int | None] = None  # key and value heads; null: n_heads
    ffn_dim_multiplier: Guarded[float | None] = None  # scales the feed-forward's hidden size
    multiple_of: Guarded[int] = 256  # the feed-forward's hidden size is rounded up to this
    norm_eps: Guarded[float] = 1e-5  # added to the mean square in RMSNorm
    rope_theta: Guarded[float] = 10000.0  # base of the rotary frequencies
    # {factor, low_freq_factor, high_freq_factor, original_seq_len}: Llama 3.1's; null: none
    rope_scaling: Guarded[RopeScaling | None] = None
    sliding_window: Guarded[int | None] = None  # positions a token sees, itself included; null: all
    qkv_bias: Guarded[bool] = False  # queries, keys and values have biases
    # RMSNorm of queries and keys, over the features of each head (`per_head`, as in Qwen3) or of
    # all heads together (`all_heads`, as in OLMo 2); null: none
    qk_norm: Guarded[Literal["per_head", "all_heads"] | None] = None
    # what a block's norms take: null: the input of attention and of feed-forward; `output`: what
    # these return, before it is added to the residual stream, as in OLMo 2
    norm_placement: Guarded[Literal["output"] | None] = None
    init_base_std: Guarded[float | None] = None  # deviation of every matrix; null: 1 / sqrt(inputs)
    # what divides the deviation of the matrices that write to the residual stream: `disabled` 1,
    # `global_depth` sqrt(2 (n_layers + 1)), `current_depth` sqrt(2 (depth + 1)), `dim_ratio`
    # dim / 4096; `zero`: these matrices begin at zero
    init_std_factor: Guarded[
        Literal["disabled", "global_depth", "current_depth", "dim_ratio", "zero"]
    ] = "disabled"
    dropout: Guarded[float] = 0.0  # share of each sublayer's outputs zeroed in training
    # implementation of attention: `sdpa`, `varlen`, `flex_attention`, `fmha` (xformers); `auto`
    # takes the fastest that device, dtype and mask allow
    attn_impl: Announced[AttnImpl] = "auto"
    vocab_size: Guarded[int] = -1  # rows of the embedding and the head; -1: the tokenizer's

    def validate(self) -> Iterator[tuple[str, str]]:
        if self.vocab_size != -1 and not 1 <= self.vocab_size <= 1 << 27:
            yield "vocab_size", "must be 1 to 134,217,728, or -1 for the tokenizer's"
        sizes = ("dim", "head_dim", "n_heads", "n_kv_heads", "multiple_of")
        mistakes = list(bounds(self, 1, *sizes, maximum=MAX_FEATURES))
        mistakes += bounds(self, 1, "n_layers", maximum=4096)
        yield from mistakes
        if mistakes:
            return
        yield from bounds(self, 1, "sliding_window")
        yield from require(self, "at least 0 and below 1", lambda v: 0 <= v < 1, "dropout")
        positive = ("norm_eps", "rope_theta", "init_base_std")
        yield from require(self, "above 0 and finite", lambda v: 0 < v < math.inf, *positive)
        scale = self.ffn_dim_multiplier
        if scale is not None and not 1 <= scale * int(8 * self.dim / 3) <= MAX_FEATURES:
            yield "ffn_dim_multiplier", f"must give 1 to {MAX_FEATURES:,} hidden features"
        if self.n_heads is None and self.head_dim is None:
            yield "n_heads", "must be given when model.head_dim is null"
            return
        given, derived = "n_heads", "head_dim"
        if self.head_dim is not None:
            given, derived = derived, given
        n_heads, n_kv_heads, head_dim = self.heads()
        if getattr(self, derived) is None and n_heads * head_dim != self.dim:
            yield given, f"must divide model.dim = {self.dim} when model.{derived} is null"
        elif head_dim % 2:
            yield given, f"gives heads of {head_dim} features: rotary embedding needs pairs"
        elif n_heads * head_dim > MAX_FEATURES:
            n_features = n_heads * head_dim
            yield given, f"gives {n_features:,} features, and at most {MAX_FEATURES:,} may be"
        elif n_heads % n_kv_heads:
            yield "n_kv_heads", f"must divide model.n_heads = {n_heads}"

    def heads(self) -> tuple[int, int, int]:
        """(query heads, key and value heads, features of a head)."""
        n_heads = self.n_heads or self.dim // (self.head_dim or self.dim)
        return n_heads, self.n_kv_heads or n_heads, self.head_dim or self.dim // n_heads

    def hidden_dim(self) -> int:
        """Hidden size of the feed-forward: 2/3 of 4 dim, scaled, rounded up to `multiple_of`."""
        hidden = int(2 * (4 * self.dim) / 3)
        if self.ffn_dim_multiplier is not None:
            hidden = int(self.ffn_dim_multiplier * hidden)
        return -(-hidden // self.multiple_of) * self.multiple_of
