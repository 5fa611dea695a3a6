"""Text from a model: sampled continuations, for a first look at what a run has learned."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

LENGTHS = 64  # sequences are padded to a multiple of this, so that compiled blocks see few shapes


@torch.no_grad()
def continue_tokens(
    model: nn.Module,
    prompt: Sequence[int],
    n_tokens: int,
    context: int,
    device: torch.device,
    seed: int,
    temperature: float = 0.8,
    tp: int = 1,
    vocab_size: int | None = None,
) -> list[int]:
    """Up to `n_tokens` tokens that the model samples after `prompt`. Called by every rank.

    It runs the whole sequence again for each token, at most the last `context` tokens of it, padded
    to a length that `tp` divides, as it must divide `context`: tp ranks share out the positions.
    Rank 0 samples, so that all ranks continue the same text, among the first `vocab_size` tokens:
    the model may have more than its tokenizer.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    training = model.training
    model.eval()
    for _ in range(n_tokens):
        window = tokens[-context:]
        # What follows the last token cannot reach it: attention is causal.
        length = min(-(-len(window) // (LENGTHS * tp)) * LENGTHS * tp, context)
        padded = torch.zeros(1, length, dtype=torch.int64)
        padded[0, : len(window)] = torch.tensor(window)
        logits = model(padded.to(device))
        if isinstance(logits, DTensor):  # the vocabulary is split over tp ranks
            logits = logits.full_tensor()
        scores = logits[0, len(window) - 1, :vocab_size].float().cpu() / temperature
        token = torch.multinomial(scores.softmax(0), 1, generator=generator).to(device)
        dist.broadcast(token, 0)
        tokens.append(int(token))
    model.train(training)
    return tokens[len(prompt) :]
