"""Ranks that divide the positions of rows, against the plain model on one process; and what they
refuse. Runs, with every feature: tests/apps/test_matrix.py, "divided positions"."""

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apps.fastrnn import app as fastrnn
from apps.lora import app as adapters
from apps.main import app as main
from apps.main.config import ModelArgs
from apps.main.train import Objective
from apps.main.transformer import Transformer, build_transformer, parallel_plan
from apps.main.transformer import build as main_build
from apps.mamba import app as mamba
from lingua.app import Built
from lingua.data import IGNORE
from lingua.data.loader import MicroBatch
from lingua.model import Losses, as_losses
from lingua.model.args import TransformerArgs
from lingua.model.transformer import Context, FeedForward, TransformerBlock
from lingua.parallel.init import init_parameters
from lingua.parallel.mesh import dp_degree, dp_gather, dp_rank, dp_sum_
from lingua.parallel.tensors import whole
from lingua.run.run import Run
from tests.apps.meshes import Sizes, name_of, on_mesh
from tests.apps.runs import Twist, arguments, differs
from tests.forks import latent, looped, mingru, moe
from tests.mistakes import refused

STATES = {"model.layers": "[mamba, attention]"}
STATES |= {"model.mamba": "{expand: 2, head_dim: 11, state_dim: 5, n_groups: 2}"}
SEQ = 16  # data.seq_len of the runs
ROWS = 8  # as many as the positions of a rank: rows and positions must not be confused
CP, CP_4, CP_TP, CP_DP = (1, 2, 1, 2), (1, 4, 1, 4), (1, 2, 2, 2), (2, 2, 1, 2)


def sizes_of(**changed: Any) -> ModelArgs:
    small = {"dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 61, "multiple_of": 8}
    return ModelArgs(**(small | changed))


def inputs(seq_len: int) -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(3)
    tokens = torch.randint(61, (ROWS, seq_len + 1), generator=chance)
    targets = tokens[None, :, 1:].clone()
    targets[0, :3, 4:9] = IGNORE
    return tokens[:, :-1], targets, torch.tensor([[0, 5 + row, seq_len] for row in range(ROWS)])


def results(model: nn.Module, seq_len: int) -> dict[str, Tensor]:
    """What leaves a model, and gradients of a function of each: one that is not their sum too."""
    tokens, targets, documents = inputs(seq_len)
    parts: dict[str, Tensor] = {"logits": model(tokens, None, documents)}
    parts["losses of the start"] = model(tokens[:, :6], targets[..., :6], None, per_token=True)
    parts["losses"] = model(tokens, targets, documents, per_token=True)
    parts["sums"] = model(tokens, targets, documents).sums
    rows = parts["losses"].sum((0, 2))
    start = parts["losses of the start"].square().sum()  # of 6 positions: the last rank has none
    objective = (
        start + parts["sums"].sum() + rows.square().sum() + whole(parts["logits"])[:, 3, 5].sum()
    )
    objective.backward()
    gradients = {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
    return {name: whole(t).detach() for name, t in (parts | gradients).items()}


def divided(args: ModelArgs, sizes: Sizes, seq_len: int) -> tuple[dict[str, Tensor], int]:
    model, mesh = on_mesh(build_transformer(args), parallel_plan(args, seq_len), sizes)
    return results(model, seq_len), dp_degree(mesh)


@pytest.mark.parametrize("sizes", [CP, CP_4, CP_TP, CP_DP], ids=name_of)
@pytest.mark.parametrize(
    "changed",
    [{}, {"n_kv_heads": 1, "sliding_window": 5}, {"qk_norm": "all_heads", "weight_tying": True}],
    ids=["plain", "one head of keys", "all heads normed"],
)
def test_what_leaves_the_model_is_that_of_one_process(ranks, sizes, changed):
    if sizes == CP_TP and "n_kv_heads" in changed:
        changed = changed | {"n_kv_heads": 2}  # tp must divide them
    args = sizes_of(**changed)
    model = build_transformer(args)
    init_parameters(model, 1, torch.device("cpu"))
    seq_len = 16 if sizes[2] > 1 else 15  # which tp must divide, and cp not
    expected = results(model, seq_len)
    for found, degree in ranks.run(prod(sizes[:3]), divided, args, sizes, seq_len):
        for name, t in expected.items():
            factor = degree if name.startswith("gradient") else 1  # each dp rank had the same rows
            apart = (found[name] - factor * t).norm() / (factor * t).norm()
            assert found[name].shape == t.shape and apart < 2e-6, name


def ranks_of(sizes: Sizes) -> tuple[int, int, list[float], list[float]]:
    from lingua.parallel.args import DistributedArgs
    from lingua.parallel.launch import detect_launch, start

    mesh = start(torch.device("cpu"), detect_launch(), DistributedArgs(*sizes))
    own = torch.tensor([1.0 + dp_rank(mesh)])
    gathered = dp_gather(own, mesh).flatten().tolist()
    return dp_rank(mesh), dp_degree(mesh), dp_sum_(own, mesh).tolist(), gathered


def test_neighbours_on_dp_shard_are_one_data_parallel_rank(ranks):
    for sizes, numbers in (
        ((2, 4, 1, 2), [0, 0, 1, 1, 2, 2, 3, 3]),
        ((1, 4, 2, 2), [0, 0, 0, 0, 1, 1, 1, 1]),
        ((1, 4, 1, 4), [0, 0, 0, 0]),
    ):
        found = ranks.run(len(numbers), ranks_of, sizes)
        n = max(numbers) + 1
        counted = [float(i) for i in range(1, n + 1)]
        assert found == [(number, n, [sum(counted)], counted) for number in numbers]


def test_a_rank_that_has_other_rows_than_its_neighbour_is_seen(runs):
    settings = {"stop_at": 3}
    alone = runs.train((1, 1, 1), settings)
    assert differs(runs.train(CP, settings), alone) == []
    for rank in (0, 1):
        run = runs.train(CP, settings, twist=Twist(wrong_token_on=rank))
        assert "batch_hash" in differs(run, alone)


def test_samples_and_measurements_are_those_of_one_process(runs):
    settings = {"steps": 4, "stop_at": 4, "samples.every": 2, "validation.every": 2}
    alone, run = (runs.train(sizes, settings) for sizes in ((1, 1, 1), CP_4))
    texts = [[(line["step"], line["text"]) for line in r.samples] for r in (alone, run)]
    assert texts[0] == texts[1] != []
    losses = [[line["nats_per_token"] for line in r.held_out] for r in (alone, run)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize(
    ("app", "name"),
    [
        (fastrnn, "Hawk"),
        (mamba, "Mamba"),
        (latent.app, "LatentAttention"),
        (mingru.app, "MinGRU"),
        (moe.app, "Experts"),
        (looped.app, "Looped"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_class_that_does_not_say_what_it_computes_is_refused_by_name(runs, app, name):
    keys = {"model.n_kv_heads": "null"} | (STATES if app is mamba else {})
    run = runs.train(CP, keys, app=app, refused=True)
    assert name in run.error and "distributed.cp_size = 2" in run.error


class Shifted(FeedForward):
    """It adds the position before: what its class inherits says nothing of this."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.roll(1, dims=1))


class WithTerms(FeedForward):
    over_positions = "pointwise"

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), {"size": x.float().square().mean((1, 2))}


def build(kind: type[FeedForward], args: Any) -> Built:
    def block(args: TransformerArgs, depth: int) -> TransformerBlock:
        return TransformerBlock(args, depth, feed_forward=kind)

    return main_build(args, block=block)


def test_a_derived_class_and_terms_per_row_are_refused_by_name(runs):
    for kind, name in ((Shifted, "Shifted"), (WithTerms, "terms per row")):
        run = runs.train(CP, {}, build=partial(build, kind), refused=True)
        assert name in run.error and "cp_size = 2" in run.error


def test_what_cannot_be_divided_is_refused_with_what_can(runs):
    run = runs.train((1, 3, 1, 3), {"data.seq_len": 18}, refused=True)
    assert "must divide 4 heads: 1, 2, 4" in run.error
    for keys, names in (
        ({"deterministic": "mesh"}, ("cp_size", "deterministic = mesh")),
        ({"distributed.dp_shard": 3}, ("cp_size", "dp_shard = 3")),
    ):
        refused(lambda k=keys: arguments({"distributed.cp_size": 2} | k), *names)
    keys = {"distributed.cp_size": 2, "lora.dropout": 0.1, "checkpoint.init_from": "x"}
    refused(lambda: arguments(keys, adapters), "cp_size", "lora.dropout")


class TwoLengths(Objective):
    """Its loss runs the model on the start of the rows too, and looks at it again."""

    def loss(self, micro: MicroBatch) -> Losses:
        model, losses = self.run.model, super().loss(micro)
        start = as_losses(model(micro.tokens[:, :6], micro.targets[..., :6], **micro.random()), 1)
        with torch.no_grad():
            model(micro.tokens[:, :3])
        return losses._replace(sums=losses.sums + start.sums)


@pytest.mark.parametrize("kind", ["none", "full", "selective"])
def test_blocks_are_computed_again_as_in_their_own_forward(runs, kind):
    settings = {"model.dropout": 0.1, "stop_at": 3}
    app = replace(main, objective=TwoLengths)
    alone = runs.train((1, 1, 1), settings, app=app)
    again = settings | {"distributed.activation_checkpointing": kind}
    assert differs(runs.train(CP, again, app=app), alone) == []


class WithPlaces(Transformer):
    """Learned positions, which do not differ from row to row."""

    over_positions = "pointwise"

    def __init__(self, args: Any, **parts: Any) -> None:
        super().__init__(args, **parts)
        self.places = nn.Embedding(SEQ, args.dim)

    def embed(self, tokens: Tensor, ctx: Context) -> Tensor:
        return super().embed(tokens, ctx) + self.places(ctx.positions)


def head_norm(run: Run) -> None:
    losses = [states["output"] for _, states in run.hidden("output")]
    run.report.event("probe", run.progress.step + 1, size=sum(t.numel() for t in losses))


def test_learned_positions_and_a_probe_of_the_head(runs):
    settings = {"stop_at": 3, "probe.every": 1}
    app = replace(main, build=partial(main_build, kind=WithPlaces), probe=head_norm)
    alone, run = (runs.train(sizes, settings, app=app) for sizes in ((1, 1, 1), CP_4))
    assert differs(run, alone) == []
    sizes = [[e["size"] for e in r.events if e["event"] == "probe"] for r in (alone, run)]
    assert sizes[0] == sizes[1] == [1, 1, 1]
