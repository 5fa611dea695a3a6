"""Tokens drawn with the probabilities that the settings give. That each row is drawn as if it were
alone: test_generation.py."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lingua.model.sampling import Sampler, SamplingArgs

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")
V, DRAWS = 12, 20_000
LOGITS = torch.randn(V, generator=torch.Generator().manual_seed(4)) * 2


def transformers_probabilities(settings: SamplingArgs) -> Tensor:
    """Of each token, by transformers' own processors of scores."""
    scores = TemperatureLogitsWarper(settings.temperature)(None, LOGITS[None])
    if settings.top_k is not None:
        scores = TopKLogitsWarper(settings.top_k)(None, scores)
    if settings.top_p is not None:
        scores = TopPLogitsWarper(settings.top_p)(None, scores)
    return scores.softmax(-1)[0]


SETTINGS = [{"temperature": t} for t in (1.0, 0.6, 3.0)] + [{"top_k": k} for k in (3, V + 5)]
SETTINGS += [{"top_p": 0.7}, {"top_p": 1e-9}, {"temperature": 1.5, "top_k": 8, "top_p": 0.8}]


@pytest.mark.parametrize("keys", SETTINGS, ids=str)
def test_tokens_come_with_the_chances_that_transformers_gives_them(keys):
    settings = SamplingArgs(**keys)
    sampler = Sampler([settings] * DRAWS, range(DRAWS), CPU)
    drawn = sampler(LOGITS.expand(DRAWS, V), step=0)
    expected = transformers_probabilities(settings)
    share = torch.bincount(drawn, minlength=V) / DRAWS
    assert ((share > 0) <= (expected > 0)).all()  # what is cut off is never drawn
    deviation = (expected * (1 - expected) / DRAWS).sqrt()
    assert ((share - expected).abs() <= 5 * deviation).all()
    # the tolerance notices another temperature, unless one token has all of the probability
    warmer = replace(settings, temperature=1.2 * settings.temperature)
    other = transformers_probabilities(warmer)
    if expected.max() < 1:
        assert ((share - other).abs() > 5 * deviation).any()


def test_the_steps_of_a_row_are_drawn_independently():
    sampler = Sampler([SamplingArgs()] * 50, range(50), CPU)
    pairs = Counter()
    for step in range(400):
        first, second = (sampler(torch.zeros(50, 2), s) for s in (2 * step, 2 * step + 1))
        pairs.update(zip(first.tolist(), second.tolist(), strict=True))
    assert all(abs(n - 5000) < 5 * math.sqrt(5000) for n in pairs.values()) and len(pairs) == 4
