"""Generation against recomputing every token with the plain model, which tests/apps/test_model.py
compares with transformers; alone, in batches, on any topology; where it stops, and its text."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apps.main.config import ModelArgs
from apps.main.transformer import build_transformer, parallel_plan
from lingua.model.generate import Completion, Request, generate
from lingua.model.sampling import SamplingArgs
from lingua.parallel.args import DistributedArgs
from lingua.parallel.init import init_parameters
from lingua.parallel.launch import detect_launch, start
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import TokenizerArgs
from lingua.tools.inference.score import score
from tests.apps.meshes import on_mesh
from tests.ranks import Ranks
from tests.tokenizer.test_tokenizer import write_sentencepiece

CPU = torch.device("cpu")
BYTES = build_tokenizer(TokenizerArgs())
# Deviations above 1 / sqrt(dim) keep it from repeating one token.
ARGS = ModelArgs(
    dim=36, n_layers=2, n_heads=6, n_kv_heads=2, multiple_of=7, vocab_size=261, init_base_std=0.3
)
WINDOW = replace(ARGS, sliding_window=5)
GREEDY = SamplingArgs(temperature=0.0, max_gen_tokens=12, stop_tokens=[])
PROMPTS = [[256, *text.encode()] for text in ("A", "four", "some longer prompt", "of ten too")]
Sizes = tuple[int, int, int]
SINGLE = (1, 1, 1)


def requests(settings: SamplingArgs = GREEDY) -> list[Request]:
    return [Request(prompt, settings, seed) for seed, prompt in enumerate(PROMPTS)]


def with_cache(model: nn.Module) -> nn.Module:
    return model


class NoCache(nn.Module):
    """A fork's model, whose forward knows nothing of caches."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)


Case = tuple[list[Request], int]  # and the batch size


def generate_here(
    args: ModelArgs,
    sizes: Sizes,
    cases: list[Case],
    wrap: Callable[[nn.Module], nn.Module] = with_cache,
    dtype: str = "fp32",
) -> list[list[Completion]]:
    """Completions of the requests of each case."""
    plan = parallel_plan(args, 16 * sizes[2])
    model, mesh = on_mesh(build_transformer(args), plan, sizes, model_dtype=dtype)
    return [generate(wrap(model), given, BYTES, mesh, batch_size) for given, batch_size in cases]


@pytest.fixture
def run(ranks: Ranks) -> Callable[..., list[list[Completion]]]:
    """Completions of each case, on which the ranks of a topology agree."""

    def run(args: ModelArgs, sizes: Sizes, *cases: Case, **kwargs: Any):
        n = sizes[0] * sizes[1] * sizes[2]
        first, *others = ranks.run(n, generate_here, args, sizes, cases, **kwargs)
        assert all(other == first for other in others)
        return first

    return run


def plain_model(args: ModelArgs) -> nn.Module:
    """The model of generate_here, in this process."""
    model = build_transformer(args)
    init_parameters(model, 1, CPU)
    return model


def step_by_step(model: nn.Module, prompt: list[int], n: int) -> tuple[list[int], list[float]]:
    """The plain model's likeliest tokens, each from all before it, and their log-probabilities."""
    tokens, logprobs = list(prompt), []
    for _ in range(n):
        with torch.no_grad():
            logits = model(torch.tensor([tokens]))[0, -1]
        tokens.append(int(logits[: BYTES.vocab_size].argmax()))
        logprobs.append(float(logits.double().log_softmax(0)[tokens[-1]]))
    return tokens[len(prompt) :], logprobs


@pytest.mark.parametrize("args", [ARGS, WINDOW], ids=["all positions", "sliding window"])
def test_greedy_tokens_are_those_of_recomputing_every_one_alone_and_in_a_batch(run, args):
    model = plain_model(args)
    expected = [step_by_step(model, prompt, 12) for prompt in PROMPTS]
    assert all(len(set(tokens)) > 3 for tokens, _ in expected)  # one token would show nothing
    for found in run(args, SINGLE, (requests(), 1), (requests(), 3), (requests(), 8)):
        for completion, (tokens, logprobs) in zip(found, expected, strict=True):
            assert completion.tokens == tokens and completion.finish == "length"
            assert completion.logprobs == pytest.approx(logprobs, abs=3e-5)
            assert completion.text == BYTES.decode(tokens)
    if args is ARGS:  # the texts are long enough for the window to matter
        windowed = plain_model(WINDOW)
        assert step_by_step(windowed, PROMPTS[2], 12)[0] != expected[2][0]


OTHERS = [((1, 2, 2), with_cache), ((1, 1, 2), NoCache), ((1, 1, 2), with_cache), (SINGLE, NoCache)]
SOAK = [pytest.param(*case, marks=pytest.mark.soak) for case in OTHERS]


# Tensor-parallel by default in tests/apps/test_generate.py.
@pytest.mark.parametrize(("sizes", "wrap"), [((2, 1, 1), with_cache), *SOAK])
def test_every_topology_generates_the_same_tokens_with_a_cache_and_without(run, sizes, wrap):
    """Fewer prompts than ranks, and other numbers of tokens on each, included."""
    given = requests(replace(GREEDY, max_gen_tokens=6))
    given[1] = replace(given[1], settings=replace(GREEDY, max_gen_tokens=3))
    given += [Request(p, SamplingArgs(max_gen_tokens=5, top_p=0.9), 7) for p in PROMPTS[:3]]
    cases = (given, 2), (given[:1], 2)
    expected = [[c.tokens for c in found] for found in run(ARGS, SINGLE, *cases)]
    found = run(ARGS, sizes, *cases, wrap=wrap)
    assert [[c.tokens for c in part] for part in found] == expected


def test_in_bfloat16_the_log_probabilities_are_those_of_float32_arithmetic(run):
    """Of the model's bfloat16 logits: rounded to bfloat16 they would be off by up to 0.4 %."""
    [[found]] = run(ARGS, SINGLE, (requests()[:1], 8), dtype="bf16")
    model = plain_model(ARGS).bfloat16()
    tokens = PROMPTS[0] + found.tokens
    with torch.no_grad():
        logits = model(torch.tensor([tokens]))[0, len(PROMPTS[0]) - 1 : -1]
    exact = logits.double().log_softmax(-1)
    exact = exact.gather(1, torch.tensor(found.tokens)[:, None])[:, 0]
    errors = (torch.tensor(found.logprobs) - exact).abs()
    assert errors[0] < 1e-5  # the others' logits may differ in their last bit
    assert len({math.frexp(x)[0] * 256 % 1 for x in found.logprobs}) > 1  # no bfloat16 numbers


def test_a_prompt_draws_with_its_own_seed_and_settings_whatever_is_beside_it(run):
    hot = SamplingArgs(temperature=1.2, max_gen_tokens=10, stop_tokens=[])
    few = replace(hot, top_k=3, max_gen_tokens=7), replace(hot, top_p=0.5)
    asked = [(1, hot, 3), (2, GREEDY, 3), (1, few[0], 3), (1, few[1], 3), (1, hot, 4), (1, hot, 3)]
    given = [Request(PROMPTS[i], settings, seed) for i, settings, seed in asked]
    together, *alone = run(ARGS, SINGLE, (given, 8), *(([request], 8) for request in given))
    assert [c.tokens for c in together] == [c.tokens for [c] in alone]
    assert together[0].tokens == together[5].tokens
    assert len({tuple(c.tokens) for c in together}) == 5


class Recites(nn.Module):
    """A model of any prompt, whose n-th token is that of a text."""

    def __init__(self, text: list[int], vocab_size: int) -> None:
        super().__init__()
        self.logits = nn.functional.one_hot(torch.tensor([*text[1:], 0]), vocab_size).float()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits[: tokens.shape[1]].expand(len(tokens), -1, -1)


def recite_here(tokenizer: TokenizerArgs, text: str, n: int, cases: list[SamplingArgs]) -> Any:
    """The completion for each setting, and the pieces in which its text is passed on."""
    made = build_tokenizer(tokenizer)
    tokens = made.encode(text, bos=tokenizer.name == "bytes").tolist()
    continued = [*tokens, made.eos_id, *made.encode(" after the end of it all " * 5).tolist()]
    mesh = start(CPU, detect_launch(), DistributedArgs(model_dtype="fp32"))
    pieces: list[list[str]] = [[] for _ in cases]
    requests = [
        Request(tokens[:n], settings, on_text=passed.append)
        for settings, passed in zip(cases, pieces, strict=True)
    ]
    model = Recites(continued, made.vocab_size)
    return list(zip(generate(model, requests, made, mesh, 3), pieces, strict=True))


def test_it_ends_at_a_stop_string_a_stop_token_or_a_number_of_tokens(ranks):
    text = "Grüße aus Köln: \U0001f389 ende"
    cold = SamplingArgs(temperature=0.0)
    cases = [  # settings, why it ends, its text and number of tokens
        (cold, "stop_token", text, 29),
        (replace(cold, stop_tokens=[], max_gen_tokens=33), "length", None, 33),
        (replace(cold, stop_tokens=[ord("K")]), "stop_token", "Grüße aus ", 13),
        (replace(cold, stop_tokens=[ord("G")]), "stop_token", "", 1),
        (replace(cold, stop=["us K"]), "stop_string", "Grüße a", 13),
        (replace(cold, stop=["Gr"]), "stop_string", "", 2),
        (replace(cold, stop=["Köln", "ße aus K", "ß"]), "stop_string", "Grü", 6),
        (replace(cold, stop=["\U0001f389"]), "stop_string", "Grüße aus Köln: ", 23),
        (replace(cold, stop=["Kö1n"]), "stop_token", text, 29),
        (replace(cold, max_gen_tokens=5), "length", "Grü\ufffd", 5),
        (replace(cold, max_gen_tokens=1), "length", "G", 1),
        (replace(cold, max_gen_tokens=2, stop=["r"]), "stop_string", "G", 2),
    ]
    settings = [case[0] for case in cases]
    [found] = ranks.run(1, recite_here, TokenizerArgs(), text, 1, settings)
    for case, (completion, pieces) in zip(cases, found, strict=True):
        _, finish, expected, n = case
        assert (completion.finish, len(completion.tokens)) == (finish, n), case
        assert completion.text == expected or expected is None, case
        assert len(completion.logprobs) == len(completion.tokens)
        assert "".join(pieces) == completion.text, case  # nothing that was passed on changes
        assert len(pieces) > 1 or len(completion.text) < 4, case
    assert found[0][1][2] == "ü"  # a character once it is whole


def test_text_continues_where_the_prompt_ends_also_with_a_space(ranks, tmp_path):
    sp = TokenizerArgs("sp", write_sentencepiece(tmp_path / "sp.model", model_type="bpe"))
    tokenizer = build_tokenizer(sp)
    n = len(tokenizer.encode("quick brown fox"))
    settings = replace(GREEDY, max_gen_tokens=n - 3)
    [[(completion, pieces)]] = ranks.run(1, recite_here, sp, "quick brown fox", 3, [settings])
    assert completion.tokens == tokenizer.encode("quick brown fox").tolist()[3:]
    assert "".join(pieces) == completion.text == " brown fox"
    assert tokenizer.decode(completion.tokens) == "brown fox"


class Bigrams(nn.Module):
    """A model of few digits: bfloat16 logits of each token, whatever came before it."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.table = (4 * torch.randn(50, 50, generator=draw)).bfloat16()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


def score_here(pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """With a context of 12 tokens, three texts at once."""
    return score(Bigrams(), pairs, start(CPU, detect_launch(), DistributedArgs()), 3, 12)


def test_a_text_of_any_length_has_the_sum_of_its_tokens_scores_in_float32(ranks):
    """Those of a transformer, on every topology: tests/apps/test_eval.py."""
    table, draw, likeliest = Bigrams().table, random.Random(1), [7]
    lengths = (1, 1), (3, 4), (11, 1), (12, 1), (30, 3), (2, 12), (5, 13), (1, 40)
    pairs = [tuple(draw.choices(range(50), k=n) for n in both) for both in lengths]
    for _ in range(3):
        likeliest.append(int(table[likeliest[-1]].argmax()))
    [found] = ranks.run(1, score_here, [*pairs, (likeliest[:1], likeliest[1:])])
    lost = []
    for (context, continuation), (ours, greedy) in zip(pairs, found, strict=False):
        steps = list(pairwise([context[-1], *continuation]))
        exact = sum(float(table[a].double().log_softmax(0)[b]) for a, b in steps)
        assert ours == pytest.approx(exact, abs=1e-4)
        assert greedy == all(table[a].argmax() == b for a, b in steps)
        lost.append(abs(exact - sum(float(table[a].log_softmax(0)[b]) for a, b in steps)))
    assert max(lost) > 1e-2  # in bfloat16
    assert [greedy for _, greedy in found] == 8 * [False] + [True]
