"""Sampled continuations: what the model itself ranks first, the same text on every topology."""

from dataclasses import replace

import torch

from apps.main.generate import continue_tokens
from apps.main.transformer import ModelArgs, build_transformer, parallel_plan
from lingua.distributed import DistributedArgs, detect_launch, parallelize_model, start
from lingua.init import init_parameters
from tests.ranks import Ranks

ARGS = ModelArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=16, vocab_size=67)
CPU = torch.device("cpu")
PROMPT, CONTEXT = [5, 60, 2, 33, 9], 16


def generate(sizes: tuple[int, int, int], temperature: float, seed: int) -> list[int]:
    replicate, shard, tp = sizes
    args = DistributedArgs(dp_replicate=replicate, dp_shard=shard, tp_size=tp, model_dtype="fp32")
    mesh = start(CPU, detect_launch(), args)
    model = parallelize_model(build_transformer(ARGS), mesh, parallel_plan(ARGS, CONTEXT), args)
    init_parameters(model, 3, CPU)
    return continue_tokens(model, PROMPT, 24, CONTEXT, CPU, seed, temperature, tp)


def most_likely() -> list[int]:
    """The plain model's argmax, one token at a time, without padding."""
    model = build_transformer(ARGS)
    init_parameters(model, 3, CPU)
    tokens = list(PROMPT)
    for _ in range(24):
        logits = model(torch.tensor([tokens[-CONTEXT:]]))
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def test_a_cold_sample_is_what_the_model_ranks_first_past_the_context_too(ranks: Ranks) -> None:
    expected = most_likely()
    assert len(set(expected)) > 3  # a model stuck on one token would show nothing
    for sizes in ((1, 1, 1), (1, 2, 1), (1, 1, 2)):
        n = sizes[0] * sizes[1] * sizes[2]
        assert ranks.run(n, generate, sizes, 1e-6, 0) == [expected] * n


def test_a_sample_depends_on_the_seed_and_not_on_the_topology(ranks: Ranks) -> None:
    [alone] = ranks.run(1, generate, (1, 1, 1), 1.0, 0)
    assert ranks.run(4, generate, (1, 2, 2), 1.0, 0) == [alone] * 4
    assert ranks.run(1, generate, (1, 1, 1), 1.0, 1) != [alone]


def test_the_positions_of_a_padded_sequence_divide_over_any_number_of_tp_ranks(
    ranks: Ranks,
) -> None:
    """64 and 128, which sequences are padded to on one process, do not divide by 3."""
    [alone] = ranks.run(1, generate_over_three, 1)
    assert ranks.run(3, generate_over_three, 3) == [alone] * 3


def generate_over_three(tp: int) -> list[int]:
    wide = replace(ARGS, dim=36, n_heads=3, n_kv_heads=3)
    args = DistributedArgs(tp_size=tp, model_dtype="fp32")
    mesh = start(CPU, detect_launch(), args)
    model = parallelize_model(build_transformer(wide), mesh, parallel_plan(wide, 300), args)
    init_parameters(model, 3, CPU)
    return continue_tokens(model, [*PROMPT] * 12, 10, 300, CPU, 0, 1.0, tp)


class LastTokens(torch.nn.Module):
    """The later a token stands in the vocabulary, the likelier it comes next."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.arange(10.0).expand(*tokens.shape, 10)


def generate_from_eight() -> list[int]:
    start(CPU, detect_launch(), DistributedArgs())
    return continue_tokens(LastTokens(), [0], 5, 4, CPU, 0, 1e-6, vocab_size=8)


def test_tokens_that_only_the_model_has_are_not_sampled(ranks: Ranks) -> None:
    assert ranks.run(1, generate_from_eight) == [[7] * 5]
