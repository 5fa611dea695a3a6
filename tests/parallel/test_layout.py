"""How a plan lays a model out, and what it must declare. Runs: tests/apps/test_matrix.py."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
)

from apps.main.config import ModelArgs
from apps.main.transformer import Transformer, parallel_plan
from lingua.base.errors import UserError
from lingua.parallel.args import DistributedArgs
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.parallelize import parallelize_model
from lingua.parallel.plan import ParallelPlan, check_layout
from tests.mistakes import refused


class Block(nn.Module):
    """Its norm, where it has one, sees all features of all positions on every tp rank."""

    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        if has_norm:
            self.norm = nn.RMSNorm(4)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList(map(Block, (True, False, True)))
        self.head = nn.Linear(4, 11)
        self.scale = nn.Parameter(torch.empty(4))


STYLES = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
EQUAL = ("embed", "blocks.*.norm", "head", "scale")
PLAN = ParallelPlan(blocks=("blocks.*",), units=(("embed", "head"),), tp=STYLES, tp_equal=EQUAL)


def on_meta() -> Tree:
    with torch.device("meta"):
        return Tree()


def problems(plan: ParallelPlan | None, tp: int) -> str:
    """What check_layout refuses; there are no processes."""
    try:
        check_layout(on_meta(), plan, tp)
    except UserError as error:
        return str(error)
    return ""


def test_a_plan_that_fits_is_accepted_for_any_number_of_ranks():
    assert [problems(PLAN, tp) for tp in (1, 2, 3)] == ["", "", ""]
    assert problems(None, 1) == ""
    none = problems(None, 2)
    assert "distributed.tp_size = 2: this model gives no tensor-parallel layout" in none
    # A parameter may be declared by its own name, and a star is one part.
    named = ("embed", "blocks.*.norm.weight", "head.weight", "head.bias", "scale")
    assert problems(replace(PLAN, tp_equal=named), 2) == ""
    assert problems(replace(PLAN, tp_equal=("*",)), 2) == ""


OF_INPUTS = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())


@pytest.mark.parametrize(
    ("fields", "hold"),
    [
        ({"tp_equal": ("embed", "head")}, "scale, blocks.0.norm.weight, blocks.2.norm.weight"),
        ({"tp_equal": ("*.*.norm", "head.*")}, "scale, embed.weight"),
        (  # a style of inputs does not distribute parameters
            {"tp": STYLES | {"blocks.*.norm": OF_INPUTS}, "tp_equal": ("embed", "head", "scale")},
            "blocks.0.norm.weight, blocks.2.norm.weight",
        ),
    ],
)
def test_parameters_that_the_plan_forgets_are_refused_together_by_name(fields, hold):
    plan = replace(PLAN, **fields)
    refused(lambda: check_layout(on_meta(), plan, 2), f"hold {hold}. ", "ParallelPlan.tp_equal")
    assert problems(plan, 1) == ""


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("fields", "name", "pattern"),
    [
        ({"blocks": ("block.*",)}, "blocks", "block.* (did you mean"),
        ({"blocks": ("blocks.*", "*.*.*.*")}, "blocks", "*.*.*.*"),
        ({"units": (("embed", "haed"),)}, "units", "haed (did you mean"),
        ({"tp": STYLES | {"blocks.*.gate": ColwiseParallel()}}, "tp", "blocks.*.gate"),
        ({"tp": STYLES | {"scale": ColwiseParallel()}}, "tp", "scale"),
        ({"tp_equal": (*EQUAL, "blocks.1.norm")}, "tp_equal", "blocks.1.norm"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_on_any_mesh(fields, name, pattern, tp):
    plan = replace(PLAN, **fields)
    refused(lambda: check_layout(on_meta(), plan, tp), f"ParallelPlan.{name}: ", pattern)


def test_everything_that_is_wrong_is_refused_together():
    plan = replace(PLAN, blocks=("a", "b"), tp_equal=("embed",), tp_divides={"heads": 3, "dim": 4})
    lines = problems(plan, 2).splitlines()
    keys = ["ParallelPlan.blocks"] * 2 + ["distributed.tp_size = 2"] * 2
    assert [line.split(":")[0] for line in lines] == keys
    assert lines[2].endswith("must divide heads = 3") and "head.weight" in lines[3]


class Own(ParallelStyle):
    """A style that torch does not have; with `distributes` it distributes what it is given."""

    def __init__(self, distributes: bool) -> None:
        self.distributes = distributes

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh) if self.distributes else module


def refused_in_ranks(plan: ParallelPlan) -> tuple[str, list[str]]:
    """What parallelize_model refuses, and the warnings it gives."""
    args = DistributedArgs(tp_size=2)
    mesh = start(torch.device("cpu"), detect_launch(), args)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            parallelize_model(on_meta(), mesh, plan, args)
            error = ""
        except UserError as refused:
            error = str(refused)
    return error, [str(w.message) for w in caught if "Parallelize plan key" in str(w.message)]


def test_ranks_refuse_what_the_check_refuses_and_what_an_unknown_style_leaves(ranks):
    forgotten = replace(PLAN, tp_equal=("embed", "head"))
    assert ranks.run(2, refused_in_ranks, forgotten) == [(problems(forgotten, 2), [])] * 2
    for distributes in (True, False):
        styles = STYLES | {"blocks.*.norm": Own(distributes)}
        plan = replace(PLAN, tp=styles, tp_equal=("embed", "head", "scale"))
        assert problems(plan, 2) == ""
        [(error, _), (other, _)] = ranks.run(2, refused_in_ranks, plan)
        assert error == other and ("norm.weight" in error) != distributes
    # Not every block has a norm: torch's own matching would warn of the one without.
    plan = replace(PLAN, tp=STYLES | {"blocks.*.norm": Own(True)})
    assert ranks.run(2, refused_in_ranks, plan) == [("", [])] * 2


@pytest.mark.parametrize("units", [(("tok_embeddings",), ("norm", "output")), (("output",),)])
def test_a_parameter_in_several_fsdp_units_is_refused_by_name(units):
    args = ModelArgs(dim=16, n_layers=2, n_heads=2, vocab_size=13, weight_tying=True)
    with torch.device("meta"):
        tied, separate = Transformer(args), Transformer(replace(args, weight_tying=False))
    plan = replace(parallel_plan(args, 8), units=units)
    refused(lambda: check_layout(tied, plan, 1), "tok_embeddings.weight and output.weight are one")
    check_layout(separate, plan, 1)
    for together in ((), (("tok_embeddings", "norm", "output"),)):
        check_layout(tied, replace(plan, units=together), 1)
