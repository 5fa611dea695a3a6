"""Terms that a model has per row, such as an auxiliary loss: value and gradient are those of the
mean over the global batch in plain torch, on any topology and in any micro-batches."""

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel

from apps.main import app
from apps.main.config import TrainArgs
from apps.main.train import Objective
from apps.main.transformer import build as main_build
from apps.main.transformer import build_transformer
from lingua.app import Built
from lingua.data import IGNORE
from lingua.data.loader import agree
from lingua.model import PerRow
from lingua.model.transformer import FeedForward, TransformerArgs, TransformerBlock
from lingua.parallel.init import canonical_name, init_parameters
from lingua.parallel.mesh import dp_sum_
from lingua.parallel.tensors import whole
from tests.apps.meshes import Sizes, name_of
from tests.apps.runs import GLOBAL_BATCH, Runs, arguments, masked, opened

CLOSE = 1e-5  # of losses, terms and gradients, relative
CHECKPOINTING, COMPILE = "distributed.activation_checkpointing", "distributed.compile"


class Balanced(FeedForward):
    """With the term of a mixture of experts (Fedus et al., 2022) that is least when the row's
    positions choose every expert alike. It is not a sum over positions."""

    def __init__(self, args: TransformerArgs, out_factor: float) -> None:
        super().__init__(args, out_factor)
        self.gate = nn.Linear(args.dim, 3, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, PerRow]:
        share = self.gate(x).float().softmax(-1).mean(1)  # B experts
        return super().forward(x), {"balance": share.square().sum(-1)}


balanced = partial(TransformerBlock, feed_forward=Balanced)


def build(args: TrainArgs) -> Built:
    built = main_build(args, block=balanced)
    # The experts' logits stay a DTensor, and so does the term, whatever of it a rank has.
    gate = {"": ColwiseParallel(use_local_output=False)}
    return replace(built, plan=built.plan.with_part("layers.*.feed_forward.gate", gate))


def first_step_here(
    overrides: dict[str, Any], count_padding: bool = False
) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """Loss, terms and whole gradients of the first global batch, by the program's own steps.

    count_padding: the fault, padding rows that count as rows.
    """
    args = arguments(overrides)
    with opened(replace(app, build=build), overrides) as run:
        batch = next(run.steps)
        for micro in batch:
            masked(micro.row_ids, micro.targets)
            if count_padding:
                micro.row_ids.clamp_(min=0)
        objective = Objective(run)
        valid = agree(batch, objective.count, run.mesh, False, save_overdue=False).counts
        torch._dynamo.utils.counters.clear()
        loss, _ = objective.gradients(batch, valid)
    if args.distributed.compile:  # a graph for all blocks and micro-steps, without a break
        counters = torch._dynamo.utils.counters
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    loss = dp_sum_(loss, run.mesh).item()
    sums = {name: dp_sum_(part, run.mesh) for name, part in run.report.numbers.parts.items()}
    terms = {name: (total / count).item() for name, (total, count) in sums.items()}
    grads = {canonical_name(name): whole(p.grad) for name, p in run.model.named_parameters()}
    return loss, terms, grads


@pytest.fixture(scope="module")
def expected(runs: Runs) -> tuple[float, float, dict[str, Tensor]]:
    """By plain torch, from the whole global batch at once: the loss is that of the logits, the term
    is computed from the inputs of the gates."""
    args = arguments({})
    model = build_transformer(args.model, block=balanced)
    init_parameters(model, args.seed, torch.device("cpu"))
    seen: list[Tensor] = []
    for layer in model.layers:
        layer.ffn_norm.register_forward_hook(lambda module, inputs, out: seen.append(out))
    ids = torch.arange(GLOBAL_BATCH)
    rows = torch.from_numpy(runs.stream().rows(ids.numpy()).astype("int64"))
    targets = rows[None, :, 1:].clone()
    masked(ids, targets)
    logits = model(rows[:, :-1]).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE)
    term = torch.zeros(())
    for layer, x in zip(model.layers, seen, strict=True):
        for row in x:
            chosen = torch.exp(row @ layer.feed_forward.gate.weight.T)  # S experts
            share = (chosen / chosen.sum(1, keepdim=True)).sum(0) / len(row)
            term = term + (share @ share) / GLOBAL_BATCH
    (loss + term).backward()
    return loss.item(), term.item(), {name: p.grad for name, p in model.named_parameters()}


def worst(found: tuple, expected: tuple) -> float:
    """The largest difference, relative: of the loss, the term and each gradient."""
    (loss, terms, grads), (its_loss, its_term, its_grads) = found, expected
    assert terms.keys() == {"balance"} and grads.keys() == its_grads.keys()
    errors = [float((grads[k] - g).norm() / g.norm()) for k, g in its_grads.items()]
    return max(abs(loss / its_loss - 1), abs(terms["balance"] / its_term - 1), *errors)


FULL, COMPILED = {CHECKPOINTING: "full"}, {CHECKPOINTING: "selective", COMPILE: True}
CASES: list[tuple[Sizes, int, dict[str, Any]]] = [  # of the second number of rows at once
    ((1, 2, 1), 3, FULL),
    ((1, 1, 2), 3, {CHECKPOINTING: "selective"}),
]
SOAK: list[tuple[Sizes, int, dict[str, Any]]] = [
    ((1, 1, 1), 3, COMPILED),
    ((1, 1, 2), 4, FULL | {COMPILE: True}),
    ((2, 2, 2), 1, {}),
]


@pytest.mark.parametrize(
    ("sizes", "rows", "settings"),
    CASES + [pytest.param(*case, marks=pytest.mark.soak) for case in SOAK],
    ids=lambda value: name_of(value) if isinstance(value, tuple) else "",
)
def test_a_term_adds_its_mean_over_the_rows(runs, expected, sizes, rows, settings, tmp_path):
    settings = settings | {"dump_dir": tmp_path, "data.batch_size": rows}
    for found in runs.ranks.run(prod(sizes), first_step_here, runs.config(sizes, settings)):
        assert worst(found, expected) < CLOSE


def test_padding_rows_that_count_are_seen(runs, expected, tmp_path):
    for sizes in ((1, 1, 1), (1, 1, 2)):
        config = runs.config(sizes, {"dump_dir": tmp_path, "data.batch_size": 2})
        for found in runs.ranks.run(sizes[2], first_step_here, config, count_padding=True):
            assert worst(found, expected) > 1000 * CLOSE
