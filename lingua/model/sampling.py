"""The next token: the most likely, or one drawn at a temperature among the most likely.

A drawn token is a function of (logits, seed, number of tokens drawn before): it does not depend on
the other rows of the batch, nor on the topology.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lingua.base.hashing import hash_bits, key_of
from lingua.config.schema import MAX_TOKENS, Free, bounds


@dataclass
class SamplingArgs:
    temperature: Free[float] = 1.0  # divides the logits; 0: always the most likely token (greedy)
    top_k: Free[int | None] = None  # draw among the k most likely tokens; null: among all
    # draw among the most likely tokens that together have this probability; null: among all
    top_p: Free[float | None] = None
    max_gen_tokens: Free[int] = 128  # tokens generated at most
    # texts that end the result; neither they nor what follows them is part of it
    stop: Free[list[str]] = field(default_factory=list)
    # tokens that end the result; null: the tokenizer's eos
    stop_tokens: Free[list[int] | None] = None

    def validate(self) -> Iterator[tuple[str, str]]:
        if not 0 <= self.temperature < math.inf:
            yield "temperature", "must be at least 0 and finite"
        yield from bounds(self, 1, "top_k")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            yield "top_p", "must be above 0 and at most 1, or null"
        yield from bounds(self, 1, "max_gen_tokens", maximum=MAX_TOKENS)
        if "" in self.stop:
            yield "stop", "must not have an empty text"
        if any(token < 0 for token in self.stop_tokens or ()):
            yield "stop_tokens", "must be tokens, numbers of at least 0"


class Sampler:
    """Draws for the rows of a batch, each with settings and a seed of its own."""

    def __init__(
        self, settings: Sequence[SamplingArgs], seeds: Sequence[int], device: torch.device
    ) -> None:
        device = torch.device("cpu") if device.type == "mps" else device  # which has no float64
        self.temperature = torch.tensor([s.temperature for s in settings], device=device)
        self.top_k = torch.tensor([s.top_k or 2**62 for s in settings], device=device)
        top_p = [s.top_p or 2.0 for s in settings]
        self.top_p = torch.tensor(top_p, dtype=torch.float64, device=device)
        self.keys = torch.tensor([key_of("sample", seed) for seed in seeds], device=device)
        self.draws = any(s.temperature > 0 for s in settings)
        self.cuts = any(s.top_k is not None or s.top_p is not None for s in settings)

    def __call__(self, logits: Tensor, step: int) -> Tensor:
        """Tokens int64 B from logits B V; `step` is the number of tokens drawn before."""
        greedy = (logits := logits.to(self.keys.device)).argmax(-1)
        if not self.draws:
            return greedy
        # A token is drawn for a greedy row too, at any temperature, and not used.
        temperature = torch.where(self.temperature > 0, self.temperature, 1.0)
        p = (logits.float() / temperature[:, None]).double().softmax(-1)
        if self.cuts:
            ranked, order = p.sort(dim=-1, descending=True, stable=True)
            kept = torch.arange(p.shape[1], device=p.device) < self.top_k[:, None]
            ranked = ranked * kept
            # a token is kept where the more likely ones together are below top_p
            before = ranked.cumsum(-1) - ranked
            kept &= before < self.top_p[:, None] * ranked.sum(-1, keepdim=True)
            p = p * torch.zeros_like(kept).scatter(1, order, kept)
        # In the order of the vocabulary, so that sorting for other rows changes nothing.
        cumulative = p.cumsum(-1)
        bits = hash_bits(self.keys, torch.full_like(self.keys, step))
        u = ((bits >> 11) & ((1 << 53) - 1)).double() / 2**53
        # right=True: never a token of probability 0, whose sum is that of the one before it
        drawn = torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True)
        drawn = drawn.clamp(max=p.shape[1] - 1)
        return torch.where(self.temperature > 0, drawn[:, 0], greedy)
