"""Other optimizers in the loop: each against torch's own on one process, also sharded and resumed,
past gradients that are not finite, and what is refused."""

import json
import math
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.optim import Optimizer

from lingua.checkpoint.folder import newest
from lingua.checkpoint.save import save
from lingua.checkpoint.source import open_checkpoint
from lingua.checkpoint.tensors import settings_of, tensors_of
from lingua.dtensor import local, map_whole, whole
from lingua.errors import UserError
from lingua.init import init_parameters
from lingua.optim.adapter import adapt, on_shards
from lingua.optim.optimizer import NonFiniteGuard, split_by_decay, update
from lingua.parallel.gradients import grad_norm
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.mesh import DistributedArgs, dp_degree, dp_rank
from lingua.parallel.parallelize import ParallelPlan, parallelize_model

CPU = torch.device("cpu")
Sizes = tuple[int, int, int]  # of dp_replicate, dp_shard, tp
Build = Callable[[Any], Optimizer]


class Normalised(Optimizer):
    """An optimizer of a stranger: momentum, whose whole is brought to norm 1. It creates its state
    in its first step, replaces it in every one, and asks for whole tensors."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p.grad)
                state["mean"] = 0.9 * state["mean"] + 0.1 * p.grad
                direction = map_whole(lambda t: t / (t.norm() + 1e-3), local(state["mean"]), p)
                local(p).add_(direction, alpha=-group["lr"])


O = torch.optim  # noqa: E741
ELEMENTWISE: dict[str, Build] = {
    "NAdam": lambda g: O.NAdam(g, lr=7.0, eps=1e-2, weight_decay=0.1, momentum_decay=0.1),
    "SGD": lambda g: O.SGD(g, lr=7.0, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda g: O.Adagrad(g, lr=7.0, lr_decay=0.1, initial_accumulator_value=0.1),
    "fused SGD": lambda g: O.SGD(g, lr=7.0, momentum=0.9, fused=True),
    "fused AdamW": lambda g: O.AdamW(g, lr=7.0, eps=1e-2, amsgrad=True, fused=True),
}
MORE: dict[str, Build] = {
    "plain SGD": lambda g: O.SGD(g, lr=7.0, weight_decay=0.1),
    "Nesterov": lambda g: O.SGD(g, lr=7.0, momentum=0.9, nesterov=True),
    "foreach Adam": lambda g: O.Adam(g, lr=7.0, foreach=True),
    "RAdam": lambda g: O.RAdam(g, lr=7.0),
    "Adamax": lambda g: O.Adamax(g, lr=7.0),
    "Adadelta": lambda g: O.Adadelta(g, lr=7.0),
    "RMSprop": lambda g: O.RMSprop(g, lr=7.0, centered=True, momentum=0.5),
    "fused Adagrad": lambda g: O.Adagrad(g, lr=7.0, initial_accumulator_value=0.1, fused=True),
}
LATE = 5  # the first step in which the parameter `late` has a gradient
ONE = torch.tensor(1.0)
BAD = (0, 3)  # steps whose gradient is not a number
SAVED, END = 4, 8  # steps that are done when it is saved, and at the end


def rate(step: int) -> float:
    return 0.1 / (step + 1)


# -------------------------------------------------------- one process, gradients that are given


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.matrix = nn.Parameter(torch.randn(5, 3, generator=generator))
        self.vector = nn.Parameter(torch.randn(3, generator=generator))
        self.late = nn.Parameter(torch.randn(2, 2, generator=generator))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


def give_gradients(model: nn.Module, step: int, spoil: float = 0.0, late: int = LATE) -> None:
    generator = torch.Generator().manual_seed(step)
    for name, p in model.named_parameters():
        grad = torch.randn(p.shape, generator=generator) + spoil
        if p.requires_grad:
            p.grad = grad if name != "late" or step >= late else None


def trained_by_torch(
    build: Build, steps: Iterable[int], late: int = LATE
) -> tuple[Given, Optimizer]:
    model = Given()
    optimizer = build(model.parameters())
    for step in steps:
        give_gradients(model, step, late=late)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
    return model, optimizer


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies of what this rank holds of each tensor, by its name in a checkpoint."""
    return {name: local(t).clone() for name, t in tensors_of(model, optimizer).items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def adapted(model: nn.Module, build: Build, sharded: bool) -> Optimizer:
    parameters = list(model.parameters())
    optimizer = on_shards([{"params": parameters}], build) if sharded else build(parameters)
    return adapt(optimizer, model)


@pytest.mark.parametrize("sharded", [True, False], ids=["on shards", "direct"])
@pytest.mark.parametrize("kind", [*ELEMENTWISE, *MORE])
def test_every_bit_is_that_of_torchs_own_past_bad_gradients_and_a_resume(kind, sharded):
    build = (ELEMENTWISE | MORE)[kind]
    late = 0 if kind == "fused SGD" else LATE  # torch's fails where only some have a buffer
    good = [step for step in range(END) if step not in BAD]
    expected, theirs = trained_by_torch(build, good, late)
    another, _ = trained_by_torch(build, good[1:], late)
    assert not torch.equal(expected.matrix, another.matrix)

    model, fresh = Given(), Given().state_dict()
    optimizer = adapted(model, build, sharded)
    assert equal(model.state_dict(), fresh)
    assert all(p.grad is None for p in model.parameters())
    assert {group["lr"] for group in optimizer.param_groups} == {7.0}
    for step in range(END):
        if step == SAVED:
            saved = everything(model, optimizer)
            model = Given()
            optimizer = adapted(model, build, sharded)
            for name, t in tensors_of(model, optimizer).items():
                local(t).copy_(saved.pop(name))
            assert not saved
        bad = step in BAD
        give_gradients(model, step, math.nan if bad else 0.0, late)
        before = everything(model, optimizer)
        for p in model.parameters():
            if p.grad is not None:
                p.grad *= 4
        update(optimizer, rate(step), torch.tensor(not bad), 4 * ONE)
        optimizer.zero_grad()
        assert equal(before, everything(model, optimizer)) == bad
    assert equal(model.state_dict(), expected.state_dict())
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        if p.requires_grad:
            assert equal(optimizer.state.get(p, {}), theirs.state.get(q, {}))


def test_a_checkpoint_from_before_the_first_update_resumes_as_a_new_optimizer():
    for kind in ("SGD", "Adagrad"):
        expected, _ = trained_by_torch(ELEMENTWISE[kind], [1, 2])
        saved = everything(model := Given(), adapted(model, ELEMENTWISE[kind], True))
        optimizer = adapted(model, ELEMENTWISE[kind], True)
        for name, t in tensors_of(model, optimizer).items():
            t.copy_(saved[name])
        for step in (1, 2):
            give_gradients(model, step)
            update(optimizer, rate(step), torch.tensor(True), ONE)
        assert equal(model.state_dict(), expected.state_dict())


def test_a_group_may_scale_the_rate_and_settings_are_json():
    model, expected = Given(), Given()
    decay, rest = split_by_decay(model)
    assert [name for name, _ in decay] == ["matrix", "late"]
    groups = [{"params": decay, "lr_scale": 0.5, "weight_decay": 0.1}, {"params": rest}]
    optimizer = on_shards(groups, lambda g: O.AdamW(g, lr=torch.tensor(7.0), betas=(0.8, 0.9)))
    optimizer.param_groups[0]["rule"] = lambda: None
    optimizer = adapt(optimizer, model)
    give_gradients(model, 6)
    update(optimizer, 0.5, torch.tensor(True), ONE)
    [first, second] = json.loads(json.dumps(settings_of(optimizer)))
    assert (first["lr"], second["lr"]) == (0.25, 0.5)
    assert first["param_names"] == ["matrix", "late"] and first["betas"] == [0.8, 0.9]
    assert "rule" not in first and "params" not in first

    pairs = zip(([expected.matrix, expected.late], [expected.vector]), (0.25, 0.5), strict=True)
    plain = [{"params": parameters, "lr": lr} for parameters, lr in pairs]
    plain[0]["weight_decay"] = 0.1
    reference = O.AdamW(plain, betas=(0.8, 0.9))
    give_gradients(expected, 6)
    reference.step()
    assert equal(model.state_dict(), expected.state_dict())


# --------------------------------------------------------------------------- what is refused


class Counting(Normalised):
    """Keeps, as `where` says, something that a checkpoint cannot hold."""

    def __init__(self, groups: Any, where: str) -> None:
        super().__init__(groups, lr=0.1)
        self.where = where

    def step(self) -> None:
        super().step()
        if self.where == "group":
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
        elif self.where == "optimizer":
            self.state["count"] = torch.zeros(())
        else:
            for state in self.state.values():
                state["count"] = 1


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda g: O.Adafactor(g, lr=7.0), "Adafactor .*state row_var of matrix: must be a tensor"),
        (lambda g: Counting(g, "state"), "Counting .*state count of matrix: must be"),
        (lambda g: Counting(g, "group"), "Counting .*its step changes k of its parameter groups"),
        (lambda g: Counting(g, "optimizer"), "Counting .*belongs to no parameter: count"),
    ],
)
def test_an_optimizer_that_cannot_be_resumed_is_refused_at_the_start(build, message):
    model = Given()
    with pytest.raises(UserError, match=f"(?s){message}"):
        adapt(build(list(model.parameters())), model)


def test_an_optimizer_that_cannot_suppress_an_update_is_not_taken():
    with pytest.raises(AssertionError, match="adapt"):
        update(ELEMENTWISE["SGD"](Given().parameters()), 0.1, torch.tensor(True), ONE)


# ------------------------------------------------------------------- real gradients, in ranks


class Model(nn.Module):
    """Sizes that no mesh divides; FSDP pads some of them in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)
        self.late = nn.Linear(5, 1, bias=False)

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        h = self.embed(tokens)
        h = h + self.down(self.up(h).relu())
        loss = h.logsumexp(-1).sum()
        return loss + self.late(h).sum() if step >= LATE else loss


SHARDED: dict[str, Build] = {name: ELEMENTWISE[name] for name in ("NAdam", "fused AdamW")}
SHARDED["Normalised"] = lambda g: Normalised(g, 7.0)


def backward(model: nn.Module, step: int, rank: int = 0, degree: int = 1) -> None:
    """The gradient of the mean over 6 rows, of which this rank has its share."""
    rows = torch.randint(11, (6, 8), generator=torch.Generator().manual_seed(step))
    (model(rows[rank::degree], step) / rows.numel()).backward()


@cache
def reference(kind: str, lose_moments: bool = False) -> dict[str, Tensor]:
    """The same optimizer, without an adapter, on a plain model and one process."""
    model = Model()
    init_parameters(model, 2, CPU)
    optimizer = SHARDED[kind](model.parameters())
    for step in range(END):
        if step == SAVED and lose_moments:
            for state in optimizer.state.values():
                for t in state.values():
                    t.zero_()
        if step not in BAD:
            backward(model, step)
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.step()
            optimizer.zero_grad()
    return everything(model, optimizer)


def in_ranks(sizes: Sizes, folder: Path, resumed: bool) -> dict[str, dict[str, Any]]:
    """All tensors at the end, gathered, by kind of optimizer. Saves into `folder` on the way, or
    begins with what it finds there."""
    replicate, shard, tp = sizes
    args = DistributedArgs(replicate, shard, tp, model_dtype="fp32")
    mesh = start(CPU, detect_launch(), args)
    plan = ParallelPlan(
        blocks=("up", "down"),
        tp={"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()},
        tp_equal=("embed", "late"),
    )
    found = {}
    for kind, build in SHARDED.items():
        with torch.device("meta"):
            model = Model()
        parallelize_model(model, mesh, plan, args)
        init_parameters(model, 2, CPU)
        optimizer = adapted(model, build, sharded=kind != "Normalised")
        guard = NonFiniteGuard("skip", CPU)
        if resumed:
            saved = open_checkpoint(newest(folder / kind, "full", print))
            saved.load(tensors_of(model, optimizer))
        for step in range(SAVED if resumed else 0, END):
            if step == SAVED and not resumed:
                save(folder / kind, step, tensors_of(model, optimizer), {}, "")
            backward(model, step, dp_rank(mesh), dp_degree(mesh))
            if step in BAD:
                model.down.weight.grad.mul_(math.nan)
            norm = grad_norm(list(model.parameters()))
            before = everything(model, optimizer)
            update(optimizer, rate(step), guard.admit(step + 1, norm), ONE)
            assert equal(before, everything(model, optimizer)) == (step in BAD), (kind, step)
            optimizer.zero_grad()
        found[kind] = {n: whole(t).numpy() for n, t in tensors_of(model, optimizer).items()}
    return found


def apart(found: dict[str, Any], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max((torch.from_numpy(found[n]) - t).abs().max().item() for n, t in expected.items())


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> tuple[Path, list[dict[str, dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, ranks.run(4, in_ranks, (1, 2, 2), folder, False)


CLOSE = 1e-5  # of a parameter


def check(found: dict[str, dict[str, Any]]) -> None:
    for kind in SHARDED:
        expected = reference(kind)
        assert apart(found[kind], expected) < CLOSE, kind
        lost = {name: t.numpy() for name, t in reference(kind, lose_moments=True).items()}
        assert apart(lost, expected) > 100 * CLOSE, kind


def test_sharded_it_is_torchs_own_on_one_process(saved):
    for found in saved[1]:
        check(found)


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (2, 2, 1), pytest.param((1, 1, 2), marks=pytest.mark.soak)]
)
def test_saved_and_resumed_elsewhere_it_is_the_same(ranks, saved, sizes):
    for found in ranks.run(math.prod(sizes), in_ranks, sizes, saved[0], True):
        check(found)
