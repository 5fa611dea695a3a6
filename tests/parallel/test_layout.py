"""How a plan lays a model out, and what it must declare. Runs: tests/apps/test_matrix.py."""

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from apps.main.transformer import ModelArgs, Transformer, parallel_plan
from lingua.base.errors import UserError
from lingua.parallel.gradients import grad_norm
from lingua.parallel.init import canonical_name, init_parameters
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.mesh import DistributedArgs, dp_degree, dp_rank
from lingua.parallel.parallelize import ParallelPlan, check_layout, parallelize_model
from lingua.parallel.tensors import whole
from tests.mistakes import refused

CPU = torch.device("cpu")
CLOSE = 1e-5  # of gradients, as `apart` measures
Sizes = tuple[int, int, int]  # of dp_replicate, dp_shard, tp


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


def mesh_of(sizes: Sizes, **settings: Any) -> tuple[DeviceMesh, DistributedArgs]:
    replicate, shard, tp = sizes
    args = DistributedArgs(replicate, shard, tp, model_dtype="fp32", **settings)
    return start(CPU, detect_launch(), args), args


def test_a_plan_that_fits_is_accepted_for_any_number_of_ranks():
    assert [problems(PLAN, tp) for tp in (1, 2, 3)] == ["", "", ""]
    assert problems(None, 1) == ""
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
    mesh, args = mesh_of((1, 1, 2))
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


def placed(checkpointing: str) -> dict[str, str]:
    mesh, args = mesh_of((1, 2, 2), activation_checkpointing=checkpointing)
    model = parallelize_model(on_meta(), mesh, PLAN, args)
    return {name: str(p.placements) for name, p in model.named_parameters()} | {
        name: type(module).__name__ for name, module in model.named_modules()
    }


def test_a_plan_is_applied_by_name(ranks):
    found = ranks.run(4, placed, "none")[0]
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    fsdp = [name for name, kind in found.items() if kind.startswith("FSDP")]
    assert fsdp == ["", "embed", *blocks, "head"]
    split, shared = found["blocks.1.up.weight"], found["head.weight"]
    assert "Shard(dim=0)" in split and split.count("hard") == 2
    assert found["blocks.1.down.weight"] == "(Shard(dim=0), Shard(dim=1))"
    assert shared == "(Shard(dim=0),)"
    wrapped = ranks.run(4, placed, "full")[0]
    assert [k for k, v in wrapped.items() if v == "FSDPCheckpointWrapper"] == blocks


def tokens_of(mesh: DeviceMesh | None) -> Tensor:
    """6 rows, or those of this data-parallel rank."""
    tokens = torch.randint(0, 11, (6, 8), generator=torch.Generator().manual_seed(3))
    return tokens if mesh is None else tokens[dp_rank(mesh) :: dp_degree(mesh)]


def gradients(model: nn.Module, mesh: DeviceMesh | None) -> dict[str, Any]:
    """Whole gradients by name, and as "" their global norm."""
    tokens = tokens_of(mesh)
    model(tokens, tokens.roll(1, 1)[None]).sums.sum().backward()
    found = {"": grad_norm(list(model.parameters())).item()}
    for name, p in model.named_parameters():
        found[canonical_name(name)] = whole(p.grad).numpy()
    return found


def apart(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Largest difference of a gradient or of the norm, relative to the largest value of it."""
    assert found.keys() == expected.keys()
    return max(
        abs(found[name] - value).max() / abs(value).max()
        for name, value in ((name, np.asarray(value)) for name, value in expected.items())
    )


ARGS = ModelArgs(dim=24, n_heads=4, n_kv_heads=2, n_layers=2, vocab_size=11, multiple_of=8)


def with_extra_norms(sizes: Sizes | None, how: str) -> dict[str, Any] | str:
    """Gradients of the model of apps/main with one more norm before each block, whose input is
    split over positions; what is refused, if it is."""
    with torch.device("meta"):
        model = Transformer(ARGS)
        for layer in model.layers:
            layer.extra = nn.RMSNorm(ARGS.dim)
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda m, inputs: (m.extra(inputs[0]), *inputs[1:]))
    mesh = None
    if sizes is not None:
        mesh, args = mesh_of(sizes)
        plan = parallel_plan(ARGS, seq_len=8)
        if how == "declared equal":
            plan = replace(plan, tp_equal=("layers.*.extra",))
        elif how == "styled":
            style = SequenceParallel(use_local_output=True)
            plan = replace(plan, tp=plan.tp | {"layers.*.extra": style})
        try:
            parallelize_model(model, mesh, plan, args)
        except UserError as error:
            return str(error)
    init_parameters(model, 5, CPU)
    return gradients(model, mesh)


@pytest.mark.parametrize("sizes", [(1, 1, 2), pytest.param((1, 2, 2), marks=pytest.mark.soak)])
def test_a_forgotten_norm_over_split_positions_is_refused_and_with_its_style_trains(ranks, sizes):
    expected, n = with_extra_norms(None, ""), math.prod(sizes)
    assert isinstance(expected, dict)
    for found in ranks.run(n, with_extra_norms, sizes, "forgotten"):
        assert "hold layers.0.extra.weight, layers.1.extra.weight. Give each" in found
    for found in ranks.run(n, with_extra_norms, sizes, "styled"):
        assert apart(found, expected) < CLOSE
    # The comparison notices what the refusal prevents: tp ranks with gradients of their own.
    wrong = ranks.run(n, with_extra_norms, sizes, "declared equal")
    for found in wrong:
        assert abs(found[""] / expected[""] - 1) > 10 * CLOSE
    assert (wrong[0]["layers.0.extra.weight"] != wrong[1]["layers.0.extra.weight"]).any()


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
