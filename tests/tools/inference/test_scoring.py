"""Log-probabilities of given texts against a plain computation of each text by itself."""

import random
from functools import cache
from itertools import pairwise

import pytest
import torch
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor, nn

from apps.main.transformer import build_transformer, parallel_plan
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.mesh import DistributedArgs
from lingua.tools.inference.score import score, windows
from tests.apps.meshes import on_mesh
from tests.apps.test_model import model_args
from tests.tools.inference.test_generation import plain_model

MODEL = model_args(vocab_size=50, dim=36, n_heads=6, n_kv_heads=3, init_base_std=0.3)
LENGTH = 12
CPU = torch.device("cpu")
Pairs = list[tuple[list[int], list[int]]]

plain = cache(lambda: plain_model(MODEL))  # not in the ranks: making one is work of all of them


def plainly(context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Every token from the last LENGTH before it at most, as the windows of the harness have it."""
    model, total, greedy = plain(), 0.0, True
    if len(continuation) > LENGTH:
        pieces = get_rolling_token_windows(continuation, context[-1], LENGTH, 1)
        pieces = [make_disjoint_window(piece) for piece in pieces]
    else:
        pieces = [(context, continuation)]
    for before, piece in pieces:
        tokens = [*before, *piece][-LENGTH - 1 :]
        with torch.no_grad():
            logprobs = model(torch.tensor([tokens[:-1]]))[0].double().log_softmax(-1)
        for at, token in zip(range(len(tokens) - 1 - len(piece), len(tokens)), piece, strict=False):
            total += float(logprobs[at, token])
            greedy &= int(logprobs[at].argmax()) == token
    return total, greedy


@cache
def pairs() -> Pairs:
    draw = random.Random(1)
    made = [
        ([draw.randrange(50) for _ in range(n)], [draw.randrange(50) for _ in range(m)])
        for n, m in ((1, 1), (3, 4), (11, 1), (12, 1), (30, 3), (2, 12), (5, 13), (1, 40))
    ]
    for context, n in (([1, 2, 3], 1), ([7] * 20, 3)):  # the model's own greedy text
        text = list(context)
        for _ in range(n):
            with torch.no_grad():
                text.append(int(plain()(torch.tensor([text[-LENGTH:]]))[0, -1].argmax()))
        made.append((context, text[len(context) :]))
    return made


@pytest.fixture(scope="module")
def expected() -> list[tuple[float, bool]]:
    return [plainly(*pair) for pair in pairs()]


class Bigrams(nn.Module):
    """A model of few digits: bfloat16 logits of each token, whatever came before it."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.table = (4 * torch.randn(50, 50, generator=draw)).bfloat16()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


def score_bigrams_here(given: Pairs) -> list[tuple[float, bool]]:
    mesh = start(CPU, detect_launch(), DistributedArgs())
    return score(Bigrams(), given, mesh, 4, LENGTH)


def score_here(given: Pairs, sizes: tuple[int, int, int]) -> list[tuple[float, bool]]:
    model, mesh = on_mesh(build_transformer(MODEL), parallel_plan(MODEL, seq_len=0), sizes)
    return score(model, given, mesh, 3, LENGTH)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 3)])
def test_scores_are_those_of_each_text_alone_on_every_topology(ranks, expected, sizes):
    n = sizes[0] * sizes[1] * sizes[2]
    assert [greedy for _, greedy in expected][-2:] == [True, True]
    assert not all(greedy for _, greedy in expected)
    for found in ranks.run(n, score_here, pairs(), sizes):
        for (ours, greedy), (theirs, likeliest) in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4) and greedy == likeliest


def test_logits_of_bfloat16_are_summed_up_in_float32(ranks):
    table = Bigrams().table
    [found] = ranks.run(1, score_bigrams_here, pairs())
    lost = []
    for (context, continuation), (ours, _) in zip(pairs(), found, strict=True):
        steps = list(pairwise([context[-1], *continuation]))
        exact = sum(float(table[a].double().log_softmax(0)[b]) for a, b in steps)
        assert ours == pytest.approx(exact, abs=1e-4)
        lost.append(abs(exact - sum(float(table[a].log_softmax(0)[b]) for a, b in steps)))
    assert max(lost) > 1e-2  # in bfloat16


@pytest.mark.parametrize("n", [1, 4, 5, 9, 14])
def test_the_windows_of_a_long_text_are_those_of_the_harness(n):
    text = list(range(100, 100 + n))
    theirs = [
        ([*before, *piece], len(piece))
        for before, piece in map(make_disjoint_window, get_rolling_token_windows(text, 0, 4, 1))
    ]
    assert list(windows([0], text, 4)) == theirs
    assert sum(n for _, n in theirs) == n


def test_a_context_that_is_cut_keeps_its_end_and_the_whole_continuation():
    assert list(windows([1, 2, 3, 4, 5], [6, 7], 4)) == [([3, 4, 5, 6, 7], 2)]
