"""Initial values: a function of seed, parameter name and index, whatever the topology."""

import hashlib
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from lingua.base.errors import UserError
from lingua.model.transformer import trunc_normal_
from lingua.parallel import init
from lingua.parallel.args import DistributedArgs
from lingua.parallel.init import init_parameters
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.parallelize import parallelize_model
from lingua.parallel.tensors import local
from tests.mistakes import refused

CPU = torch.device("cpu")


def initialised(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    init_parameters(model, seed, CPU)
    return {name: t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}


class Filled(nn.Module):
    """One parameter of a shape, filled by a function."""

    def __init__(self, shape: tuple[int, ...], fill: Callable[[Tensor], Any] | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.fill = fill

    def reset_parameters(self) -> None:
        if self.fill is not None:
            self.fill(self.weight)


def test_values_depend_on_seed_name_and_index_alone():
    def model(n: int) -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(40, 50) for _ in range(n)))

    two, three = initialised(model(2)), initialised(model(3))
    assert all(torch.equal(t, three[name]) for name, t in two.items())  # whatever else there is
    wide = initialised(nn.Sequential(nn.Linear(40, 70)))  # the first rows are the first indices
    assert torch.equal(wide["0.weight"][:50], two["0.weight"])
    other_seed = initialised(model(2), seed=1)
    for name, t in two.items():
        assert (t != other_seed[name]).float().mean() > 0.99
    assert (two["0.weight"] != two["1.weight"]).float().mean() > 0.99


def test_values_of_a_large_tensor_are_drawn_in_pieces_of_any_size():
    whole = initialised(Filled((60, 70), nn.init.normal_))["weight"]
    with mock.patch.object(init, "CHUNK_ELEMENTS", 37):
        assert torch.equal(initialised(Filled((60, 70), nn.init.normal_))["weight"], whole)


BOUND = math.sqrt(3 / 200) * math.sqrt(2 / 6)  # kaiming_uniform_ with a = sqrt(5), 200 inputs


@pytest.mark.parametrize(
    ("fill", "law"),
    [
        (lambda w: nn.init.uniform_(w, -2, 6), stats.uniform(-2, 8)),
        (lambda w: nn.init.normal_(w, 3, 0.5), stats.norm(3, 0.5)),
        (lambda w: nn.init.trunc_normal_(w, 0, 0.02, -0.06, 0.06), stats.truncnorm(-3, 3, 0, 0.02)),
        (lambda w: nn.init.kaiming_uniform_(w, 5**0.5), stats.uniform(-BOUND, 2 * BOUND)),
        (lambda w: nn.init.xavier_normal_(w), stats.norm(0, math.sqrt(2 / 500))),
    ],
    ids=["uniform", "normal", "trunc_normal", "kaiming_uniform", "xavier_normal"],
)
def test_values_have_the_distribution_that_was_asked_for(fill, law):
    values = initialised(Filled((300, 200), fill))["weight"].double().flatten()
    assert stats.kstest(values.numpy(), law.cdf).pvalue > 1e-3
    low, high = law.support()
    assert low - 1e-8 <= values.min() and values.max() <= high + 1e-8
    score = (values - values.mean()) / values.std()
    for lag in (1, 2, 200):  # neighbours in a row and in a column
        assert abs((score[lag:] * score[:-lag]).mean()) < 4 / math.sqrt(len(values))


def normal_draw(seed: int, name: str, draw: int, n: int) -> np.ndarray:
    """Of the first n elements, by numpy: SplitMix64 over blake2b's key, then Box and Muller."""
    text = f"{seed}\0{name}\0{draw}".encode()
    key = np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), np.uint64)
    x = np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    x ^= x >> np.uint64(31)
    high, low = (x >> np.uint64(32)) + 0.5, (x & np.uint64(0xFFFFFFFF)).astype(float)
    return np.sqrt(-2 * np.log(high / 2**32)) * np.cos(2 * np.pi / 2**32 * low)


class Truncated(Filled):
    def __init__(self) -> None:
        super().__init__((1000, 7), lambda w: trunc_normal_(w, 0.5))


def truncated_shard() -> Tensor:
    mesh = start(CPU, detect_launch(), DistributedArgs(dp_shard=3))
    with torch.device("meta"):
        model = Truncated()
    parallelize_model(model, mesh, None, DistributedArgs())
    init_parameters(model, 7, CPU)
    return local(model.weight).detach()


def test_a_truncated_normal_is_each_elements_first_draw_within_three_deviations(ranks):
    draws = np.stack([normal_draw(7, "weight", draw, 7000) for draw in range(4)])
    within = np.abs(draws) <= 3
    assert 5 < (~within[0]).sum() < 40 and within.any(0).all()  # 0.27 % are drawn again
    expected = torch.from_numpy(0.5 * draws[within.argmax(0), range(7000)]).float().view(1000, 7)
    for found in (initialised(Truncated(), 7)["weight"], torch.cat(ranks.run(3, truncated_shard))):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_modules_run_before_what_holds_them():
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def reset_parameters(self) -> None:
            nn.init.ones_(self.linear.weight)

    values = initialised(Parent())
    assert torch.equal(values["linear.weight"], torch.ones(3, 3))
    assert values["linear.bias"].abs().max() <= 1 / math.sqrt(3)
    # Tied parameters stay one.
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    values = initialised(model)
    assert model[1].weight is model[0].weight and list(values) == ["0.weight"]


class Holes(nn.Module):
    """Of two parameters and three buffers, one of each kind is not filled."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Filled((1, 2), None)
        self.whole = Filled((4, 2), nn.init.normal_)
        self.register_buffer("scale", torch.empty(3))
        self.register_buffer("index", torch.empty(3, dtype=torch.int64), persistent=False)
        self.register_buffer("order", torch.empty(3, dtype=torch.int64))

    def reset_parameters(self) -> None:
        self.order.copy_(torch.arange(3))


class Identity(Filled):
    def __init__(self) -> None:
        super().__init__((5, 4), nn.init.eye_)


HOLES = "no reset_parameters of the model fills part.weight, scale, index: "


def error_of(build: Callable[[], nn.Module]) -> str:
    mesh = start(CPU, detect_launch(), DistributedArgs(dp_shard=3))
    with torch.device("meta"):
        model = build()
    parallelize_model(model, mesh, None, DistributedArgs())
    try:
        init_parameters(model, 0, CPU)
    except UserError as error:
        return str(error)
    return ""


def test_what_is_not_filled_is_named_on_every_rank_though_one_has_a_part_of_it(ranks):
    refused(lambda: initialised(Holes()), HOLES)
    errors = ranks.run(3, error_of, Holes)
    assert errors[0].startswith(HOLES) and set(errors) == {errors[0]}


def test_filling_a_part_with_the_whole_is_refused(ranks):
    assert torch.equal(initialised(Identity())["weight"], torch.eye(5, 4))
    errors = ranks.run(3, error_of, Identity)
    assert all("fills weight: " in e and "(nn.init.eye_ does not)" in e for e in errors)


@pytest.mark.parametrize(
    "fill",
    [
        lambda w: w.copy_(torch.randn(w.shape)),
        lambda w: w.bernoulli_(0.5),
        lambda w: w.exponential_(),
        lambda w: nn.init.sparse_(w, 0.5),
        lambda w: w.copy_(nn.functional.dropout(torch.ones_like(w))),
    ],
    ids=["randn", "bernoulli_", "exponential_", "sparse_", "dropout"],
)
def test_a_draw_that_would_depend_on_the_topology_is_refused(fill):
    refused(lambda: initialised(Filled((4, 4), fill)), "initial values can only be drawn")
