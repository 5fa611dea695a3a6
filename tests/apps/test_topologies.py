"""Rows, losses and gradients of a step against plain torch and one process, what is sent for them,
and that a fault is seen. The whole run on every topology: test_matrix.py."""

import itertools
import json
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel

from apps.main.config import TrainArgs
from apps.main.transformer import Transformer, build, build_transformer
from lingua.app import Built
from lingua.base.dump_dir import PLAN
from lingua.base.errors import UserError
from lingua.base.hashing import hash_bits, key_of
from lingua.data import IGNORE
from lingua.model import PerRow
from lingua.model.args import TransformerArgs
from lingua.model.transformer import FeedForward, TransformerBlock
from lingua.parallel.init import init_parameters
from lingua.parallel.tensors import local
from lingua.tools.plan.make import make_plan
from tests.apps.meshes import Sizes, name_of, on_meshes
from tests.apps.runs import (
    GLOBAL_BATCH,
    SMALL,
    TOLERANCES,
    Outcome,
    Runs,
    Twist,
    arguments,
    differs,
    masked,
    relative,
)

STEPS = 4
MEASURED = {"validation.every": 2, "stop_at": STEPS}
BOS = 256  # of the byte tokenizer
CHECKPOINTING, COMPILE = "distributed.activation_checkpointing", "distributed.compile"


@pytest.fixture(scope="module")
def alone(runs: Runs) -> Outcome:
    """The run in one process, its global batch in one piece."""
    return runs.train((1, 1, 1), MEASURED)


def test_micro_batches_do_not_change_the_run(runs, alone):
    for other in ({"data.batch_size": 2}, {"grad_acc_steps": 7, "data.workers": 0}):
        assert differs(runs.train((1, 1, 1), other | {"stop_at": STEPS}), alone) == []


def test_a_step_with_document_masks_is_that_of_each_document_alone(runs, alone):
    apart = {"data.document_mask": "ignore", "stop_at": 1}
    args = arguments(apart)
    model = Transformer(args.model)
    init_parameters(model, args.seed, torch.device("cpu"))
    ids = torch.arange(GLOBAL_BATCH)
    total = count = 0
    for row in torch.from_numpy(runs.stream().rows(ids.numpy()).astype("int64")):
        begins = [0, *(i for i in range(1, len(row)) if row[i] == BOS), len(row)]
        for begin, end in pairwise(begins):
            document = row[begin:end][None]
            losses, valid, *_ = model(document[:, :-1], document[None, :, 1:])
            total, count = total + losses.item(), count + valid.item()
    [loss] = runs.train((1, 1, 1), apart).column("loss")
    assert count < GLOBAL_BATCH * args.data.seq_len  # some rows hold more than one document
    assert max(relative([loss], [total / count])) < 1e-5
    assert max(relative([loss], alone.column("loss")[:1])) > 1e-4  # which is without masks


def build_watching_noise(args: TrainArgs) -> Built:
    """The model, which must be given a hash of seed, step and row, and nothing in evaluation."""
    built, steps = build(args), itertools.count(1)

    def forward_pre(module: Any, inputs: Any, named: dict[str, Any]) -> None:
        if not module.training:
            assert named.get("noise") is None
            return
        step = next(steps)
        rows = GLOBAL_BATCH * (step - 1) + torch.arange(GLOBAL_BATCH)
        assert torch.equal(named["noise"], hash_bits(key_of(args.seed, "noise", step), rows))

    built.module.register_forward_pre_hook(forward_pre, with_kwargs=True)
    return built


def test_the_noise_of_a_row_is_a_hash_of_seed_step_and_row_and_evaluation_has_none(runs, alone):
    run = runs.train((1, 1, 1), MEASURED | {"model.dropout": 0.1}, build=build_watching_noise)
    assert run.held_out and set(differs(run, alone)) == TOLERANCES.keys()


def build_watched(args: TrainArgs) -> Built:
    """The model, which may be initialised only where each of 4 ranks has just its part of it."""
    built = build(args)
    module = built.module
    reset, n = module.reset_parameters, sum(p.numel() for p in module.parameters())

    def reset_a_part() -> None:
        if sum(local(p).numel() for p in module.parameters()) > n / 3:
            raise UserError("this rank has more than its part")
        reset()

    module.reset_parameters = reset_a_part
    assert all(p.is_meta for p in module.parameters())
    return built


def test_no_rank_ever_holds_an_unsharded_model(runs):
    runs.train((1, 2, 2), {"stop_at": 1}, build=build_watched)
    run = runs.train((1, 1, 1), {"stop_at": 1}, build=build_watched, refused=True)
    assert run.error == "this rank has more than its part"


def test_views_that_the_model_does_not_predict_are_refused(runs):
    run = runs.train((1, 1, 2), {"data.n_views": 3}, refused=True)
    assert run.error.startswith("data.n_views = 3: the model predicts 1 of the 2 views")


def test_more_ranks_than_rows_train_the_same_run(runs):
    two_rows = {"data.global_batch_size": 2, "stop_at": 3}
    assert differs(runs.train((3, 1, 1), two_rows), runs.train((1, 1, 1), two_rows)) == []


@pytest.mark.parametrize(
    ("twist", "seen"),
    [
        (Twist(), []),
        (Twist(shift=1), ["batch_hash", "loss", "first grad_norm", "grad_norm"]),
        (Twist(wrong_token_on=-1), ["batch_hash", "loss", "grad_norm"]),
        # The loss that is logged has the divisor of its gradient.
        (Twist(own_divisor=True), ["loss", "first grad_norm", "grad_norm"]),
    ],
    ids=["nothing", "rows shifted by one", "a wrong row", "a wrong divisor"],
)
def test_a_run_that_differs_is_seen_to_differ(runs, alone, twist, seen):
    run = runs.train((1, 2, 1), {"stop_at": STEPS}, twist=twist)
    assert differs(run, alone) == seen
    assert differs(run, alone, margin=100) == seen  # a tolerance that is too wide would hide them


@pytest.mark.parametrize(
    ("sizes", "rank"), [((1, 1, 2), 1), pytest.param((1, 2, 2), 3, marks=pytest.mark.soak)]
)
def test_one_wrong_row_on_any_rank_changes_the_hash_of_its_step(runs, alone, sizes, rank):
    run = runs.train(sizes, {"stop_at": 4}, twist=Twist(wrong_token_on=rank))
    pairs = zip(run.column("batch_hash"), alone.column("batch_hash")[:4], strict=True)
    assert [found == expected for found, expected in pairs] == [True, True, False, True]


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


def build_balanced(args: TrainArgs) -> Built:
    built = build(args, block=balanced)
    # The experts' logits stay a DTensor, and so does the term, whatever of it a rank has.
    gate = {"": ColwiseParallel(use_local_output=False)}
    return replace(built, plan=built.plan.with_part("layers.*.feed_forward.gate", gate))


@pytest.fixture(scope="module")
def expected(runs: Runs) -> dict[str, Tensor]:
    """Of the first global batch with uneven masks, by plain torch from the whole of it at once: the
    loss of the logits, the term from the inputs of the gates, the gradients of their sum."""
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
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return gradients | {"loss": loss.detach(), "balance": term.detach()}


def worst(run: Outcome, expected: dict[str, Tensor]) -> float:
    """The largest difference, relative: of the loss, the term and the gradient of a parameter. With
    beta1 = 0 the first moment is the gradient of the last step."""
    moments = {n: t for n, t in run.tensors(1).items() if n.startswith("optim.exp_avg.")}
    found = {name.removeprefix("optim.exp_avg."): t for name, t in moments.items()}
    found |= {name: torch.tensor(run.lines[0][name]) for name in ("loss", "balance")}
    assert found.keys() == expected.keys()
    return max(float((found[k] - e).norm() / e.norm()) for k, e in expected.items())


UNEVEN = {"stop_at": 1, "optim.beta1": 0, "optim.clip": ".inf", "data.batch_size": 1}
MODES = ("last", "replica_last", "every")
CLOSE = 1e-5  # of losses, terms and gradients, as `worst` measures
KINDS: list[tuple[Sizes, str, dict[str, Any]]] = [
    ((2, 2, 1), "replica_last", {}),
    ((2, 2, 1), "every", {CHECKPOINTING: "full"}),
    ((1, 2, 2), "last", {CHECKPOINTING: "selective", "data.batch_size": 3}),
]
SOAK: list[tuple[Sizes, str, dict[str, Any]]] = [
    *(((2, 2, 2), mode, {}) for mode in MODES),
    ((1, 1, 1), "last", {CHECKPOINTING: "selective", COMPILE: True, "data.batch_size": 3}),
    ((1, 1, 2), "last", {CHECKPOINTING: "full", COMPILE: True, "data.batch_size": 4}),
]


@pytest.mark.parametrize(
    ("sizes", "mode", "settings"),
    KINDS + [pytest.param(*kind, marks=pytest.mark.soak) for kind in SOAK],
    ids=lambda value: name_of(value) if isinstance(value, tuple) else None,
)
def test_loss_and_gradient_are_those_of_plain_torch(runs, expected, sizes, mode, settings):
    """Under uneven masks, and in any micro-batches."""
    settings = UNEVEN | {"distributed.grad_sync": mode} | settings
    run = runs.train(sizes, settings, build=build_balanced, twist=Twist(some_targets=True))
    assert worst(run, expected) < CLOSE
    # A graph for all blocks and micro-steps, and two for the loss where tp splits the vocabulary.
    graphs = settings.get(COMPILE, 0) * (1 + 2 * (sizes[2] > 1))
    assert [rank["compiled"] for rank in run.ranks] == [graphs] * len(run.ranks)


def test_a_global_batch_without_a_valid_target_is_an_error(runs):
    two_rows = {"data.global_batch_size": 2}
    run = runs.train((1, 2, 1), two_rows, twist=Twist(some_targets=True), refused=True)
    assert "step 1: all targets are ignored in its global batch (rows 0 to 1 of" in run.error
    stop = run.events[-1]
    assert (stop["event"], stop["step"]) == ("stop", 0)
    assert stop["error"].startswith("UserError: step 1: all targets are ignored")


@pytest.mark.parametrize("fault", ["own_divisor", "count_padding"])
def test_a_gradient_with_a_wrong_divisor_and_padding_that_counts_are_seen(runs, expected, fault):
    twist = Twist(some_targets=True, **{fault: True})
    settings = UNEVEN | {"data.batch_size": 2}
    run = runs.train((1, 2, 1), settings, build=build_balanced, twist=twist)
    assert worst(run, expected) > 1000 * CLOSE


def test_the_factor_of_the_gradient_does_not_depend_on_precision(runs, expected):
    settings = UNEVEN | {"distributed.model_dtype": "bf16"}
    twist = Twist(some_targets=True)
    run = runs.train((2, 2, 1), settings, build=build_balanced, twist=twist)
    assert worst(run, expected) < 0.05


def counted(runs: Runs, sizes: Sizes, **settings: Any) -> tuple[Outcome, list[dict[str, Any]]]:
    """A run, and the collectives of its second step: kind, axis, backward, count, bytes."""
    count = {"profiling.run": True, "profiling.profile_warmup": 2, "stop_at": 2}
    run = runs.train(sizes, count | settings)
    path = run.dump_dir / "profiling" / "collectives_step2.json"
    return run, json.loads(path.read_text())["collectives"]


@on_meshes((2, 2, 1), soak=[(1, 2, 2)])
def test_gradients_travel_once_a_step_or_with_every_micro_step(runs, sizes):
    degree = sizes[0] * sizes[1]
    n_bytes: dict[str, int] = {}

    def of(mode: str, n_micro: int) -> dict[str, int]:
        """Gradient reduce-scatters and all-reduces over data-parallel axes."""
        rows = {"data.global_batch_size": 4 * degree, "data.batch_size": 4 // n_micro}
        model = {"model.n_layers": 1, "distributed.grad_sync": mode}
        run, found = counted(runs, sizes, **rows, **model)
        kinds = {"reduce_scatter": 0, "all_reduce": 0}
        reduced = [r for r in found if r["backward"] and r["kind"] in kinds and r["axis"] != "tp"]
        n_bytes[mode] = sum(row["bytes"] for row in reduced)
        logs[mode] = run.log
        return {kind: sum(r["count"] for r in reduced if r["kind"] == kind) for kind in kinds}

    logs: dict[str, str] = {}
    units = 3  # the block, the embedding, and norm with head
    once = {"reduce_scatter": units, "all_reduce": units if sizes[0] > 1 else 0}
    assert of("last", 4) == once
    assert of("every", 4) == {kind: 4 * n for kind, n in once.items()}
    assert n_bytes["every"] == 4 * n_bytes["last"]
    kept, saved = of_log(logs["last"])
    assert saved == pytest.approx(3 * n_bytes["last"], rel=0.1)  # no padding
    n_parameters = re.search(r"([\d,]+) parameters on", logs["last"])[1].replace(",", "")
    assert kept == pytest.approx(4 * int(n_parameters) / sizes[2], rel=0.1)  # norms are not split
    assert of_log(logs["every"]) == (0, 0)
    if sizes[0] > 1:
        assert of("replica_last", 4) == {"reduce_scatter": 4 * units, "all_reduce": units}
        kept_of_shards, saved = of_log(logs["replica_last"])
        assert saved == pytest.approx(n_bytes["every"] - n_bytes["replica_last"], rel=0.1)
        assert kept_of_shards == pytest.approx(kept / sizes[1], rel=0.01)


def of_log(log: str) -> tuple[float, float]:
    """Bytes that the chosen sync keeps between micro-steps, and saves a step, by the log."""
    size = r"([\d.]+) (B|KiB|MiB)"
    found = re.search(rf"keeps {size} of gradients .* saves {size} of gradient traffic a step", log)
    kept, unit, saved, unit_saved = found.groups()
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20}
    return float(kept) * units[unit], float(saved) * units[unit_saved]


def test_checkpointed_blocks_recompute_what_they_did_not_keep(runs):
    alone = runs.train((1, 1, 1), {"stop_at": 2})
    counts = {}
    for kind in ("none", "full", "selective"):
        run, found = counted(runs, (1, 1, 2), **{CHECKPOINTING: kind})
        assert run.weights == alone.weights and differs(run, alone) == []
        counts[kind] = {
            name: sum(r["count"] for r in found if r["backward"] and r["kind"] == name)
            for name in ("all_gather", "reduce_scatter")
        }
    # Each of 2 layers gathers the positions twice, and scatters the sum of the heads again unless
    # it is kept; what comes last in a block is not needed again.
    none, full, selective = counts["none"], counts["full"], counts["selective"]
    assert full["all_gather"] - none["all_gather"] == 4
    assert full["reduce_scatter"] - none["reduce_scatter"] == 2
    assert selective["all_gather"] - none["all_gather"] == 4
    assert selective["reduce_scatter"] == none["reduce_scatter"]


def test_the_log_ends_with_the_plan_and_what_was_sent(runs, tmp_path):
    sizes, once = (1, 2, 1), {"profiling.run": True, "profiling.profile_warmup": 2, "stop_at": 2}
    words = (SMALL | runs.config(sizes, once)).items()
    plan, _ = make_plan(["ngpu=2", "gpu=h100", *(f"{key}={value}" for key, value in words)])
    (tmp_path / PLAN).write_text(json.dumps(plan.as_json()))
    run = runs.train(sizes, once, dump_dir=tmp_path)
    [planned] = re.findall(r"planned: a step .* s, was .*; sent (.*), was (.*)", run.log)
    assert planned[0] == planned[1]
