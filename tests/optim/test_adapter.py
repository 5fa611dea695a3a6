"""Optimizers in the loop, each against torch's own on one process, past gradients that are
not finite and a resume, and what is refused. Sharded ones: tests/apps/test_matrix.py."""

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lingua.base.errors import UserError
from lingua.checkpoint.tensors import settings_of, tensors_of
from lingua.optim.adapter import adapt, on_shards
from lingua.optim.args import OptimArgs
from lingua.optim.optimizer import LoopOptimizer, build_optimizer, split_by_decay, update
from lingua.optim.whole import on_whole
from lingua.parallel.init import canonical_name
from lingua.parallel.tensors import whole
from tests.apps.meshes import Sizes, on_meshes
from tests.forks.soap import SOAP
from tests.optim import test_muon

Build = Callable[[Any], Optimizer]


O = torch.optim  # noqa: E741


class Scaled(O.SGD):
    """Divides each gradient by its largest singular value. This raises where it is not finite."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    grad = p.grad.reshape(len(p), -1)
                    p.grad /= torch.linalg.eigvalsh(grad @ grad.T)[-1].abs().sqrt() + 1e-3
        super().step()


ELEMENTWISE: dict[str, Build] = {
    "NAdam": lambda g: O.NAdam(g, lr=7.0, eps=1e-2, weight_decay=0.1, momentum_decay=0.1),
    "SGD": lambda g: O.SGD(g, lr=7.0, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda g: O.Adagrad(g, lr=7.0, lr_decay=0.1, initial_accumulator_value=0.1),
    "fused SGD": lambda g: O.SGD(g, lr=7.0, momentum=0.9, fused=True),
    "fused AdamW": lambda g: O.AdamW(g, lr=7.0, eps=1e-2, amsgrad=True, fused=True),
    "Nesterov": lambda g: O.SGD(g, lr=7.0, momentum=0.9, nesterov=True),
    "RAdam": lambda g: O.RAdam(g, lr=7.0),
    "RMSprop": lambda g: O.RMSprop(g, lr=7.0, centered=True, momentum=0.5),
    "fused Adagrad": lambda g: O.Adagrad(g, lr=7.0, initial_accumulator_value=0.1, fused=True),
}
WHOLE: dict[str, Build] = {
    "Adafactor": lambda g: O.Adafactor(g, lr=7.0, weight_decay=0.1),
    "SOAP": lambda g: SOAP(g, 7.0, (0.8, 0.9), eps=1e-3),
    "singular values": lambda g: Scaled(g, lr=7.0, momentum=0.9),
    "state from the constructor": ELEMENTWISE["Adagrad"],
    "fused": ELEMENTWISE["fused AdamW"],
}
LATE = 5  # the first step in which the parameter `late` has a gradient
ONE = torch.tensor(1.0)
BAD = (0, 3)  # steps whose gradient is not a number
SAVED, END = 4, 8  # steps that are done when it is saved, and at the end


def rate(step: int) -> float:
    return 0.1 / (step + 1)


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


def trained_by_torch(build: Build, steps: Iterable[int], late: int = LATE) -> Any:
    model = Given()
    optimizer = build(model.parameters())
    for step in steps:
        give_gradients(model, step, late=late)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
    return model, optimizer


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies of all tensors, by their names in a checkpoint."""
    return {name: t.clone() for name, t in tensors_of(model, optimizer).items()}


def memory_of(model: nn.Module, optimizer: LoopOptimizer) -> dict[str, int]:
    return {name: t.data_ptr() for name, t in tensors_of(model, optimizer).items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def direct(groups: Any, build: Build) -> Optimizer:
    return build(groups)


def adapted(model: nn.Module, build: Build, route: Any) -> LoopOptimizer:
    return adapt(route([{"params": list(model.parameters())}], build), model)


ROUTES = [(route, kind) for route in (on_shards, direct) for kind in ELEMENTWISE]
ROUTES += [(on_whole, kind) for kind in WHOLE]


@pytest.mark.parametrize(("route", "kind"), ROUTES)
def test_every_bit_is_that_of_torchs_own_past_bad_gradients_and_a_resume(route, kind):
    build = (ELEMENTWISE | WHOLE)[kind]
    late = 0 if kind == "fused SGD" else LATE  # torch's fails where only some have a buffer
    good = [step for step in range(END) if step not in BAD]
    expected, theirs = trained_by_torch(build, good, late)
    another, _ = trained_by_torch(build, good[1:], late)
    assert not torch.equal(expected.matrix, another.matrix)

    model, fresh = Given(), Given().state_dict()
    optimizer = adapted(model, build, route)
    assert equal(model.state_dict(), fresh)
    assert all(p.grad is None for p in model.parameters())
    assert {group["lr"] for group in optimizer.param_groups} == {7.0}
    for step in range(END):
        if step == SAVED:
            saved = everything(model, optimizer)
            model = Given()
            optimizer = adapted(model, build, route)
            for name, t in tensors_of(model, optimizer).items():
                t.copy_(saved.pop(name))
            assert not saved
        bad = step in BAD
        give_gradients(model, step, math.nan if bad else 0.0, late)
        before, live = everything(model, optimizer), memory_of(model, optimizer)
        for p in model.parameters():
            if p.grad is not None:
                p.grad *= 4
        update(optimizer, rate(step), torch.tensor(not bad), 4 * ONE)
        optimizer.zero_grad()
        assert live == memory_of(model, optimizer)  # also where the step replaces its state
        assert equal(before, everything(model, optimizer)) == bad
    assert equal(model.state_dict(), expected.state_dict())
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        if p.requires_grad:
            assert equal(optimizer.state.get(p, {}), theirs.state.get(q, {}))


@pytest.mark.parametrize(("decay", "same"), [(0.2, True), (0.19, False)])
def test_adamw_is_torchs_own_bit_for_bit_past_bad_gradients(decay, same):
    """What build_optimizer promises, written down once more without it."""
    model, expected = Given(), Given()
    args = OptimArgs(weight_decay=0.2, beta1=0.8, beta2=0.9, epsilon=1e-6)
    optimizer = build_optimizer(model, args)
    groups = [{"params": [expected.matrix, expected.late], "weight_decay": decay}]
    groups.append({"params": [expected.vector], "weight_decay": 0.0})
    theirs = O.AdamW(groups, betas=(0.8, 0.9), eps=1e-6, fused=True)
    for step in range(END):
        bad = step in BAD
        give_gradients(model, step, math.inf if bad else 0.0)
        for p in model.parameters():
            if p.grad is not None:
                p.grad *= 4
        before = everything(model, optimizer)
        update(optimizer, rate(step), torch.tensor(not bad), 4 * ONE)
        assert equal(before, everything(model, optimizer)) == bad
        if not bad:
            give_gradients(expected, step)
            for group in theirs.param_groups:
                group["lr"] = rate(step)
            theirs.step()
    assert equal(model.state_dict(), expected.state_dict()) == same
    assert {group["lr"] for group in optimizer.param_groups} == {rate(END - 1)}


def test_a_checkpoint_from_before_the_first_update_resumes_as_a_new_optimizer():
    for kind in ("SGD", "Adagrad"):
        expected, _ = trained_by_torch(ELEMENTWISE[kind], [1, 2])
        saved = everything(model := Given(), adapted(model, ELEMENTWISE[kind], on_shards))
        optimizer = adapted(model, ELEMENTWISE[kind], on_shards)
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


def on_ranks(shape: Sizes) -> dict[str, dict[str, Tensor | tuple[int, ...]]]:
    """By optimizer what a rank has after three updates, one of which is suppressed: whole tensors,
    and the shapes of those that another has."""
    dist.init_process_group("gloo")
    result = {}
    for kind, build in WHOLE.items():
        model = test_muon.on_a_mesh(shape)
        optimizer = adapted(model, build, on_whole)
        for step in range(4):
            test_muon.give_gradients(model.parameters(), step)
            update(optimizer, rate(step), torch.tensor(step != 2), ONE)
        tensors = tensors_of(model, optimizer).items()
        held = [t for state in optimizer.state.values() for t in state.values()]
        assert len(held) == sum("optim." in n and not t.is_meta for n, t in tensors)
        result[kind] = {n: tuple(t.shape) if t.is_meta else whole(t) for n, t in tensors}
    return result


def on_one_process(build: Build, steps: Iterable[int]) -> dict[str, Tensor]:
    model = test_muon.a_model()
    optimizer = build(model.parameters())
    for step in steps:
        test_muon.give_gradients(model.parameters(), step)
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
    named = [(canonical_name(name), p) for name, p in model.named_parameters()]
    state = {f"optim.{key}.{n}": t for n, p in named for key, t in optimizer.state[p].items()}
    return {f"model.{n}": p.detach() for n, p in named} | state


@on_meshes((2, 1, 1), (1, 2, 2), soak=[(1, 2, 1), (1, 1, 2), (1, 3, 1), (2, 1, 2)])
def test_a_whole_parameter_is_updated_bit_for_bit_on_a_rank_that_alone_has_its_state(ranks, sizes):
    everyone = ranks.run(math.prod(sizes), on_ranks, sizes)
    for kind, build in WHOLE.items():
        expected = on_one_process(build, (0, 1, 3))
        assert not equal(expected, on_one_process(build, (0, 1, 2, 3)))
        shapes = {name: tuple(t.shape) for name, t in expected.items()}
        for name, shape in shapes.items():
            held = [rank[kind][name] for rank in everyone]
            tensors = [t for t in held if isinstance(t, Tensor)]
            assert all(torch.equal(t, expected[name]) for t in tensors), (kind, name)
            assert {t for t in held if not isinstance(t, Tensor)} <= {shape}
            assert len(tensors) == (1 if name.startswith("optim.") else len(everyone))
        for rank in everyone:
            own = [t for n, t in rank[kind].items() if "optim." in n and isinstance(t, Tensor)]
            total = sum(t.numel() for n, t in expected.items() if "optim." in n)
            assert sum(t.numel() for t in own) < 0.7 * total
            assert rank[kind].keys() == expected.keys()


class Counting(O.SGD):
    """Keeps, as `where` says, something that a checkpoint cannot hold."""

    def __init__(self, groups: Any, where: str) -> None:
        super().__init__(groups, lr=0.1, momentum=0.9)
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
                state["count"] = [torch.zeros(())]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda g: O.Adafactor(g, lr=7.0), "Adafactor .*state row_var of matrix: must .*on_whole"),
        (lambda g: Counting(g, "state"), "Counting .*state count of matrix: must be"),
        (lambda g: Counting(g, "group"), "Counting .*its step changes k of its parameter groups"),
        (lambda g: Counting(g, "optimizer"), "Counting .*belongs to no parameter: count"),
    ],
)
def test_an_optimizer_that_cannot_be_resumed_is_refused_at_the_start(build, message):
    for route in (direct, on_shards, on_whole)[: 2 if "on_whole" in message else 3]:
        with pytest.raises(UserError, match=f"(?s){message}"):
            adapted(Given(), build, route)
