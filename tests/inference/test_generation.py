"""Generation against transformers and against recomputing every token, alone, in batches, on any
topology; where it stops, and what it says."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from apps.main.transformer import ModelArgs, build_transformer, parallel_plan
from lingua.errors import UserError
from lingua.inference.generate import Completion, Request, fit_prompt, generate
from lingua.inference.sampling import SamplingArgs
from lingua.init import init_parameters
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.mesh import DistributedArgs, dp_degree, dp_rank
from lingua.parallel.parallelize import parallelize_model
from lingua.tokenizer import TokenizerArgs, build_tokenizer
from tests.apps.test_model import reference
from tests.ranks import Ranks
from tests.test_tokenizer import write_sentencepiece

CPU = torch.device("cpu")
BYTES = build_tokenizer(TokenizerArgs())
# Deviations above 1 / sqrt(dim) keep it from repeating one token.
ARGS = ModelArgs(
    dim=36, n_layers=2, n_heads=6, n_kv_heads=3, multiple_of=7, vocab_size=261, init_base_std=0.3
)
WINDOW = replace(ARGS, sliding_window=5)
GREEDY = SamplingArgs(temperature=0.0, max_gen_tokens=12, stop_tokens=[])
PROMPTS = [[256, *text.encode()] for text in ("A", "four", "some longer prompt", "of ten too")]
Sizes = tuple[int, int, int]


def requests(settings: SamplingArgs = GREEDY) -> list[Request]:
    return [Request(prompt, settings, seed) for seed, prompt in enumerate(PROMPTS)]


class NoCache(nn.Module):
    """A fork's model, whose forward knows nothing of caches."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)


def generate_here(
    args: ModelArgs,
    sizes: Sizes,
    given: list[Request],
    batch_size: int = 8,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    dtype: str = "fp32",
) -> list[Completion]:
    """Completions of this data-parallel rank's share of the requests."""
    replicate, shard, tp = sizes
    parallel = DistributedArgs(replicate, shard, tp, model_dtype=dtype)
    mesh = start(CPU, detect_launch(), parallel)
    plan = parallel_plan(args, 16 * tp)
    model = parallelize_model(build_transformer(args), mesh, plan, parallel)
    init_parameters(model, 1, CPU)
    mine = given[dp_rank(mesh) :: dp_degree(mesh)]
    return generate(wrap(model), mine, BYTES, mesh, batch_size)


@pytest.fixture
def run(ranks: Ranks) -> Callable[..., list[Completion]]:
    """Completions of all requests, on which the ranks of a topology agree."""

    def run(args: ModelArgs, sizes: Sizes, given: list[Request], **kwargs: Any):
        n = sizes[0] * sizes[1] * sizes[2]
        parts = ranks.run(n, generate_here, args, sizes, given, **kwargs)
        tp, degree = sizes[2], n // sizes[2]
        for rank, part in enumerate(parts):
            assert [c.tokens for c in part] == [c.tokens for c in parts[rank // tp * tp]]
        return [parts[i % degree * tp][i // degree] for i in range(len(given))]

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


# ----------------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize("args", [ARGS, WINDOW], ids=["all positions", "sliding window"])
def test_greedy_tokens_are_those_of_recomputing_every_one_alone_and_in_a_batch(run, args):
    model = plain_model(args)
    expected = [step_by_step(model, prompt, 12) for prompt in PROMPTS]
    assert all(len(set(tokens)) > 3 for tokens, _ in expected)  # one token would show nothing
    for batch_size in (1, 3, 8):
        found = run(args, (1, 1, 1), requests(), batch_size=batch_size)
        for completion, (tokens, logprobs) in zip(found, expected, strict=True):
            assert completion.tokens == tokens and completion.finish == "length"
            assert completion.logprobs == pytest.approx(logprobs, abs=3e-5)
            assert completion.text == BYTES.decode(tokens)
    if args is ARGS:  # the texts are long enough for the window to matter
        windowed = plain_model(WINDOW)
        assert step_by_step(windowed, PROMPTS[2], 12)[0] != expected[2][0]


def test_greedy_tokens_are_those_that_transformers_generates(run):
    model = plain_model(ARGS)
    there = reference(model)
    assert type(there) is LlamaForCausalLM
    found = run(ARGS, (1, 1, 1), requests())
    for prompt, completion in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        text = there.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
            eos_token_id=None, pad_token_id=0, suppress_tokens=[258, 259, 260],
        )  # fmt: skip
        assert completion.tokens == text[0, len(prompt) :].tolist()


def test_every_topology_generates_the_same_tokens(run):
    """Fewer prompts than ranks, and other numbers of tokens on each, included."""
    given = requests()
    given[1] = replace(given[1], settings=replace(GREEDY, max_gen_tokens=3))
    drawn = [Request(p, SamplingArgs(max_gen_tokens=9, top_p=0.9), 7) for p in PROMPTS[:3]]
    alone = run(ARGS, (1, 1, 1), [*given, *drawn])
    for sizes in ((1, 2, 1), (2, 1, 1), (1, 1, 3), (1, 2, 3)):
        found = run(ARGS, sizes, [*given, *drawn], batch_size=2)
        assert [c.tokens for c in found] == [c.tokens for c in alone], sizes
    few = run(ARGS, (1, 3, 1), given[:1])
    assert few[0].tokens == alone[0].tokens


def test_a_model_that_takes_no_cache_generates_the_same_tokens(run):
    expected = run(ARGS, (1, 1, 1), requests())
    for sizes in ((1, 1, 1), (1, 1, 3)):
        found = run(ARGS, sizes, requests(), wrap=NoCache)
        assert [c.tokens for c in found] == [c.tokens for c in expected]


def test_in_bfloat16_the_log_probabilities_are_those_of_float32_arithmetic(run):
    """Of the model's bfloat16 logits: rounded to bfloat16 they would be off by up to 0.4 %."""
    found = run(ARGS, (1, 1, 1), requests()[:1], dtype="bf16")[0]
    model = plain_model(ARGS).bfloat16()
    tokens = PROMPTS[0] + found.tokens
    with torch.no_grad():
        logits = model(torch.tensor([tokens]))[0, len(PROMPTS[0]) - 1 : -1]
    exact = logits.double().log_softmax(-1)
    exact = exact.gather(1, torch.tensor(found.tokens)[:, None])[:, 0]
    errors = (torch.tensor(found.logprobs) - exact).abs()
    assert errors[0] < 1e-5  # the others' logits may differ in their last bit
    assert len({math.frexp(x)[0] * 256 % 1 for x in found.logprobs}) > 1  # no bfloat16 numbers


# -------------------------------------------------------------------------------------- sampling


def test_a_prompt_draws_with_its_own_seed_and_settings_whatever_is_beside_it(run):
    hot = SamplingArgs(temperature=1.2, max_gen_tokens=10, stop_tokens=[])
    given = [
        Request(PROMPTS[1], hot, 3),
        Request(PROMPTS[2], GREEDY, 3),
        Request(PROMPTS[1], replace(hot, top_k=3, max_gen_tokens=7), 3),
        Request(PROMPTS[1], hot, 4),
        Request(PROMPTS[1], hot, 3),
    ]
    together = run(ARGS, (1, 1, 1), given)
    for request, completion in zip(given, together, strict=True):
        [alone] = run(ARGS, (1, 1, 1), [request])
        assert completion.tokens == alone.tokens
    assert together[0].tokens == together[4].tokens
    assert len({tuple(c.tokens) for c in together}) == 4


# --------------------------------------------------------------------------------------- the end


class Says(nn.Module):
    """Goes on with a text, whatever the prompt; a byte each step."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids = [*text.encode(), 257, *b"after the end of it all " * 3]

    def forward(self, tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, 258)
        for i in range(tokens.shape[1]):
            logits[:, i, self.ids[max(i, 0)]] = 50.0
        return logits


def say_here(text: str, cases: list[SamplingArgs]) -> tuple[list[Completion], list[str]]:
    """What comes of each setting after a prompt of one token, and the pieces that are told."""
    mesh = start(CPU, detect_launch(), DistributedArgs(model_dtype="fp32"))
    told: list[list[str]] = [[] for _ in cases]
    given = [Request([256], settings) for settings in cases]
    return generate(Says(text), given, BYTES, mesh, 3, lambda i, s: told[i].append(s)), told


def test_it_ends_at_a_stop_string_a_stop_token_or_a_number_of_tokens(ranks):
    cold = SamplingArgs(temperature=0.0)
    cases = {
        "eos": (cold, "stop_token", "Grüße aus Köln: \U0001f389 ende", None),
        "no eos": (replace(cold, stop_tokens=[], max_gen_tokens=33), "length", None, 33),
        "token": (replace(cold, stop_tokens=[ord("K")]), "stop_token", "Grüße aus ", 13),
        "first": (replace(cold, stop_tokens=[ord("G")]), "stop_token", "", 1),
        "string": (replace(cold, stop=["us K"]), "stop_string", "Grüße a", 13),
        "first string": (replace(cold, stop=["Gr"]), "stop_string", "", 2),
        "earliest": (replace(cold, stop=["Köln", "ße aus K", "ß"]), "stop_string", "Grü", 6),
        "wide": (replace(cold, stop=["\U0001f389"]), "stop_string", "Grüße aus Köln: ", None),
        "never": (replace(cold, stop=["Kö1n"]), "stop_token", None, None),
        "length": (replace(cold, max_gen_tokens=5), "length", "Grü\ufffd", 5),
        "length of one": (replace(cold, max_gen_tokens=1), "length", "G", 1),
        "both": (replace(cold, max_gen_tokens=2, stop=["r"]), "stop_string", "G", 2),
    }
    text = "Grüße aus Köln: \U0001f389 ende"
    [(found, told)] = ranks.run(1, say_here, text, [case[0] for case in cases.values()])
    for (name, case), completion, pieces in zip(cases.items(), found, told, strict=True):
        _, finish, expected, n = case
        assert completion.finish == finish, name
        if expected is not None:
            assert completion.text == expected, name
        if n is not None:
            assert len(completion.tokens) == n, name
        assert len(completion.logprobs) == len(completion.tokens)
        assert "".join(pieces) == completion.text, name  # nothing that was told is taken back
        assert len(pieces) > 1 or len(completion.text) < 4, name
    assert told[0][2] == "ü"  # a character once it is whole


# -------------------------------------------------------------------------------- long prompts


class Recites(nn.Module):
    """Whatever it is given, its n-th token is that of a text."""

    def __init__(self, text: list[int], vocab_size: int) -> None:
        super().__init__()
        self.logits = nn.functional.one_hot(torch.tensor([*text[1:], 0]), vocab_size).float()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits[: tokens.shape[1]].expand(len(tokens), -1, -1)


def text_here(path: str, text: str, n_prompt: int) -> tuple[list[str], str, str]:
    """What follows a prompt: as it is streamed, as it is returned, and decoded alone."""
    tokenizer = build_tokenizer(TokenizerArgs("sp", path))
    tokens = tokenizer.encode(text).tolist()
    mesh = start(CPU, detect_launch(), DistributedArgs())
    settings = replace(GREEDY, max_gen_tokens=len(tokens) - n_prompt)
    told: list[str] = []
    [result] = generate(
        Recites(tokens, tokenizer.vocab_size), [Request(tokens[:n_prompt], settings)], tokenizer,
        mesh, 4, lambda _, new: told.append(new),
    )  # fmt: skip
    assert result.tokens == tokens[n_prompt:]
    return told, result.text, tokenizer.decode(result.tokens)


def test_text_goes_on_where_the_prompt_ends_also_with_a_space(ranks, tmp_path):
    path = write_sentencepiece(tmp_path / "sp.model", model_type="bpe")
    [(told, text, alone)] = ranks.run(1, text_here, path, "quick brown fox", 3)
    assert "".join(told) == text == " brown fox"
    assert alone == "brown fox"


def test_a_prompt_without_room_for_its_tokens_is_cut_on_the_left_or_refused():
    request = Request(list(range(20)), replace(GREEDY, max_gen_tokens=4))
    assert fit_prompt(request, 24, "refuse", "prompt") is request
    cut = fit_prompt(request, 15, "cut", "prompt")
    assert cut == replace(request, prompt=list(range(9, 20)))
    with pytest.raises(UserError, match=r"file:3: has 20 tokens; must have at most 11.*on_long"):
        fit_prompt(request, 15, "refuse", "file:3")
    with pytest.raises(UserError, match="max_gen_tokens = 4: leaves no room"):
        fit_prompt(request, 4, "cut", "prompt")
