"""Muon against the singular value decomposition, against torch's own, and sharded against whole."""

import math
from collections.abc import Iterable
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lingua.base.errors import UserError
from lingua.monitor.collectives import CollectiveCounter
from lingua.optim import muon
from lingua.optim.args import MuonArgs, OptimArgs
from lingua.optim.muon import orthogonalise
from lingua.optim.optimizer import build_optimizer, update

TRUE, ONE = torch.tensor(True), torch.tensor(1.0)
BLOCKS = ("layers.*",)
MATRICES = ["layers.0.up.weight", "layers.0.down.weight", "layers.1.up.weight"]
MATRICES += ["layers.1.down.weight"]


class Block(nn.Module):
    """A wide and a tall matrix whose sides no mesh divides, a bias and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.up, self.down = nn.Linear(5, 7, bias=False), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    """Also matrices that are not hidden: an embedding, a head, and an embedding inside a block."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(11, 5)
        self.layers = nn.ModuleList([checkpoint_wrapper(Block()), Block()])
        self.layers[1].register_module("place", nn.Embedding(3, 5))
        self.output = nn.Linear(5, 11, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.output(h + self.layers[1].place.weight.sum(0))


def a_model(**kind) -> Model:
    torch.manual_seed(0)
    return Model(**kind)


def gradients(model: nn.Module, step: int) -> None:
    tokens = torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(step))
    model(tokens).logsumexp(-1).mean().backward()


def muon_args(**settings) -> OptimArgs:
    shared = OptimArgs(name="muon", weight_decay=0.2, beta1=0.8, beta2=0.9, epsilon=1e-6)
    return replace(shared, muon=MuonArgs(**settings))


# ------------------------------------------------------------------------------ orthogonalise


def by_svd(matrix: Tensor, steps: int) -> Tensor:
    """The iteration by what it does to the singular values, in float64."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (40, 40), (30, 70), (1, 6), (6, 1)])
def test_it_is_the_polynomial_of_the_singular_values(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for steps in (1, 3, 5, 8):
        expected = by_svd(matrix, steps)
        found = orthogonalise(matrix, steps).double()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        assert (found - by_svd(matrix, steps + 1)).abs().max() > 1e-2  # what the tolerance tells
        coarse = orthogonalise(matrix.bfloat16(), steps)
        assert coarse.dtype == torch.bfloat16
        assert (coarse.double() - expected).norm() < 0.05 * expected.norm()


def test_a_gradient_of_zeros_is_no_update():
    assert not orthogonalise(torch.zeros(3, 4), 5).any()


# -------------------------------------------------------------------------- what it works on


@pytest.mark.parametrize("tied", [False, True])
def test_muon_has_the_matrices_inside_the_blocks_and_adamw_the_rest(tied):
    model = a_model(tied=tied)
    groups = build_optimizer(model, muon_args(), BLOCKS).param_groups
    names = {group["algorithm"]: [] for group in groups}
    for group in groups:
        names[group["algorithm"]] += group["param_names"]
    assert names["muon"] == MATRICES
    head = [] if tied else ["output.weight"]
    assert {"tok_embeddings.weight", "layers.1.place.weight", *head} <= set(names["adamw"])
    assert sum(map(len, names.values())) == len(list(model.parameters()))
    decayed = {n for g in groups if g["weight_decay"] for n in g["param_names"]}
    assert decayed == {*MATRICES, *head}


@pytest.mark.parametrize("blocks", [(), ("stages.*",)])
def test_a_model_without_blocks_has_nothing_for_muon(blocks):
    with pytest.raises(UserError, match=r"optim.name = muon: .* must be adamw"):
        build_optimizer(a_model(), muon_args(), blocks)


# ----------------------------------------------------------------------------- against torch


def trained_by_torch(steps: int, momentum: float, nesterov: bool, ns_steps: int) -> Model:
    """What update promises, written down with torch's two optimizers."""
    model = a_model()
    own = dict(model.named_parameters())
    hidden = [p for n, p in own.items() if n.replace("_checkpoint_wrapped_module.", "") in MATRICES]
    ids = {id(p) for p in hidden} | {id(own["output.weight"])}
    muon = torch.optim.Muon(
        hidden,
        weight_decay=0.2,
        momentum=momentum,
        nesterov=nesterov,
        ns_steps=ns_steps,
        adjust_lr_fn="match_rms_adamw",
    )
    plain = [p for p in own.values() if id(p) not in ids]
    groups = [
        {"params": plain, "weight_decay": 0.0},
        {"params": [own["output.weight"]], "weight_decay": 0.2},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-6, fused=True)
    for step in range(steps):
        gradients(model, step)
        for optimizer in (muon, adamw):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)
            optimizer.step()
            optimizer.zero_grad()
    return model


def trained(args: OptimArgs, steps: int, model: nn.Module | None = None) -> Model:
    model = model or a_model()
    optimizer = build_optimizer(model, args, BLOCKS)
    for step in range(steps):
        gradients(model, step)
        for p in model.parameters():
            p.grad *= 4
        update(optimizer, 0.1 / (step + 1), TRUE, torch.tensor(4.0))
        optimizer.zero_grad()
    return model


def apart(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize(
    ("momentum", "nesterov", "ns_steps"), [(0.95, True, 5), (0.8, False, 5), (0.0, True, 3)]
)
def test_in_bfloat16_it_is_torchs_muon_beside_torchs_adamw(momentum, nesterov, ns_steps):
    settings = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
    theirs = trained_by_torch(4, **settings)
    assert apart(trained(muon_args(**settings), 4), theirs) < 1e-6
    for other in ({"momentum": 0.9}, {"ns_steps": 4}, {"rms": 0.21}, {"dtype": "fp32"}):
        assert apart(trained(muon_args(**settings | other), 4), theirs) > 1e-4, other


# ------------------------------------------------------------------------------------ sharded


def on_a_mesh(shape: tuple[int, int, int]) -> Model:
    """The model on a mesh (dp_replicate, dp_shard, tp). The first block is not tensor-parallel; in
    the second, FSDP splits the rows of `up` that tensor parallelism has split, both unevenly."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    model = a_model()
    if shape[2] > 1:
        plan = {"layers.1.up": ColwiseParallel(), "layers.1.down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp_replicate", "dp_shard"])
    return model


def give_gradients(parameters: Iterable[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)
        if isinstance(p, DTensor):
            p.grad = distribute_tensor(p.grad, p.device_mesh, p.placements, src_data_rank=None)


def given_updates(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """(Parameter, momentum) of each matrix after three updates by given gradients, gathered."""
    optimizer = build_optimizer(model, muon_args(), BLOCKS)
    [group] = [g for g in optimizer.param_groups if g["algorithm"] == "muon"]
    for step in range(3):
        give_gradients(group["params"], step)
        update(optimizer, 0.1, TRUE, ONE)
    found = {}
    for name, p in zip(group["param_names"], group["params"], strict=True):
        pair = (p.detach(), optimizer.state[p]["momentum_buffer"])
        found[name] = tuple(t.full_tensor() if isinstance(t, DTensor) else t for t in pair)
    return found


def in_ranks(shape: tuple[int, int, int]) -> dict[str, tuple[Tensor, Tensor]]:
    dist.init_process_group("gloo")
    return given_updates(on_a_mesh(shape))


def traffic_of_an_update(n: int) -> tuple[list[tuple[str, int]], list[tuple[int, ...]], int]:
    """Of Muon on n ranks: (kind, bytes) of the collectives of an update, the shapes of the matrices
    that this rank orthogonalised, and the bytes of all matrices in bfloat16."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("dp_shard",))
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, 12, bias=False) for _ in range(6))})
    for layer in model["layers"]:
        fully_shard(layer, mesh=mesh)
    optimizer = build_optimizer(model, muon_args(), BLOCKS)
    give_gradients(model.parameters(), 0)
    worked_on: list[tuple[int, ...]] = []

    def noted(matrix: Tensor, steps: int) -> Tensor:
        worked_on.append(tuple(matrix.shape))
        return orthogonalise(matrix, steps)

    with CollectiveCounter(mesh) as counter, patch.object(muon, "orthogonalise", noted):
        update(optimizer, 0.1, TRUE, ONE)
    sent = [(total["kind"], total["bytes"]) for total in counter.totals]
    return sent, worked_on, 2 * sum(p.numel() for p in model.parameters())


def test_each_matrix_is_whole_on_one_rank_and_less_is_sent_than_to_gather_all(ranks):
    """6 matrices on 4 ranks: 4 at once, then 2."""
    results = ranks.run(4, traffic_of_an_update, 4)
    assert [len(worked_on) for _, worked_on, _ in results] == [2, 2, 1, 1]
    for sent, worked_on, whole_bytes in results:
        assert set(worked_on) == {(12, 8)}
        # Of each bucket as much as one matrix there and back; an owner of two has two.
        [(kind, n_bytes)] = sent
        assert kind == "all_to_all" and n_bytes <= 4 * whole_bytes / 6


SOAK = [pytest.param(shape, marks=pytest.mark.soak) for shape in ((2, 2, 1), (2, 1, 2))]


@pytest.mark.parametrize("shape", [(1, 4, 1), (1, 2, 2), *SOAK])  # 5 rows on 4 ranks: one has none
def test_a_sharded_matrix_is_updated_bit_for_bit_as_the_whole_one_is(ranks, shape):
    expected = given_updates(a_model())
    assert list(expected) == MATRICES
    for found in ranks.run(math.prod(shape), in_ranks, shape):
        assert found.keys() == expected.keys()
        for name, pair in found.items():
            assert all(torch.equal(a, b) for a, b in zip(pair, expected[name], strict=True)), name
