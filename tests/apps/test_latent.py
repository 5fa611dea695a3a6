"""An attention of another form, by the fork tests/forks/latent.py: what its plan must say, what is
said where it is wrong, and text that it generates."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from lingua.app import Built
from lingua.base.errors import UserError
from lingua.model.attend import attend, dense_mask
from lingua.model.generate import Request, generate
from lingua.model.masks import SeparateDocuments
from lingua.model.sampling import SamplingArgs
from lingua.parallel.init import init_parameters
from lingua.parallel.plan import check_layout
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import TokenizerArgs
from lingua.tools.plan.trace import trace
from tests.apps.meshes import Sizes, on_mesh
from tests.apps.runs import arguments
from tests.forks.latent import app, build
from tests.model.test_generation import step_by_step

TP: Sizes = (1, 1, 2)
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9]]
SETTINGS = {"data.sources": "{one: 1}", "model.n_heads": 4, "model.init_base_std": 0.3}


def generate_here(sizes: Sizes) -> list[list[int]]:
    """Greedy tokens behind each prompt, all together, by the model of seed 1 with a cache."""
    built = build(arguments(SETTINGS, app))
    model, mesh = on_mesh(built.module, built.plan, sizes)
    greedy = SamplingArgs(max_gen_tokens=6, temperature=0.0)
    requests = [Request(prompt, greedy, 0) for prompt in PROMPTS]
    found = generate(model, requests, build_tokenizer(TokenizerArgs()), mesh, len(PROMPTS))
    return [completion.tokens for completion in found]


@pytest.mark.parametrize("sizes", [(1, 1, 1), TP])
def test_values_of_another_size_than_the_queries_are_generated_with(ranks, sizes):
    model = build(arguments(SETTINGS, app)).module
    init_parameters(model, 1, torch.device("cpu"))
    expected = [step_by_step(model, prompt, 6)[0] for prompt in PROMPTS]
    assert all(len(set(tokens)) > 1 for tokens in expected)
    n = sizes[2]
    assert ranks.run(n, generate_here, sizes) == [expected] * n


def restyled(name: str, style: Any, args: Any) -> Built:
    """The model with another style of a part of its attention."""
    built = build(args)
    assert built.plan is not None
    return replace(built, plan=built.plan.with_part("layers.*.attention", {name: style}))


def test_a_gathered_output_whose_gradient_a_rank_would_have_in_part_is_refused():
    gathered = partial(restyled, "shared_key", ColwiseParallel(output_layouts=Replicate()))
    args = arguments(SETTINGS | {"distributed.tp_size": 2}, app)
    for build_it, refused in ((gathered, True), (build, False)):
        built = build_it(args)
        message = ""
        try:
            check_layout(built.module, built.plan, 2)
        except UserError as error:
            message = str(error)
        named = "layers.*.attention.shared_key is ColwiseParallel(output_layouts=Replicate())"
        assert (named in message and "styles.Replicated" in message) == refused
        check_layout(built.module, built.plan, 1)


def test_a_wrong_output_layout_is_named_by_the_plan_and_at_the_start(runs):
    gathered = RowwiseParallel(output_layouts=Replicate())
    broken = replace(app, build=partial(restyled, "wo", gathered))
    note = "distributed.tp_size = 2: in layers.0, with x [7, 8, 22], out [7, 16, 22]. Outside"
    with pytest.raises(UserError) as plan:
        trace(broken, arguments(SETTINGS | {"distributed.tp_size": 2}, broken), TP, "cpu")
    with pytest.raises(AssertionError) as start:
        runs.train(TP, {"model.n_heads": 4}, app=broken)
    for text in (str(plan.value), str(start.value)):
        assert note in text and "layers.*.attention.wo" in text
    right = replace(app, build=partial(restyled, "wo", RowwiseParallel(output_layouts=Shard(1))))
    planned = trace(right, arguments(SETTINGS | {"distributed.tp_size": 2}, right), TP, "cpu")
    assert planned.parameters == planned.trained
    assert runs.train(TP, {"model.n_heads": 4, "stop_at": 1}, app=right).column("step") == [1]


def test_of_several_styles_that_match_a_module_the_last_counts(runs):
    """`wk` is also within `w[!o]`, which the other projections need."""
    again = replace(app, build=partial(restyled, "wk", ColwiseParallel()))
    settings = {"model.n_heads": 4, "stop_at": 1}
    found, expected = (runs.train(TP, settings, app=a).column("loss") for a in (again, app))
    assert found == expected


@pytest.mark.parametrize("size", [3, 10, 25])
def test_kernels_of_one_size_attend_to_values_of_another(size):
    chance = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, 4, 12, 10, generator=chance) for _ in range(2))
    v = torch.randn(2, 4, 12, size, generator=chance)
    place, documents = torch.arange(12), torch.tensor([[0, 5], [0, 12]])
    first = torch.where(place < 5, 0, torch.tensor([[5], [0]]))  # B S
    found = attend(q, k, v, SeparateDocuments(documents, first, None))
    expected = attend(q, k, v, dense_mask(place, place, first))
    torch.testing.assert_close(found, expected)


def test_a_module_may_lose_its_style():
    plan = build(arguments(SETTINGS, app)).plan
    assert plan is not None and plan.tp is not None
    less = plan.with_part("layers.*.attention", {"w[qk]": None, "w[!o]": None, "latent": None})
    assert less.tp == {
        name: style
        for name, style in plan.tp.items()
        if name not in ("layers.*.attention.w[!o]", "layers.*.attention.latent")
    }
