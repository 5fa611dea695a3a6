"""The learning rate for every legal argument, what decays, and the work of an update. AdamW against
torch's own: test_adapter.py."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode

from lingua.optim.args import OptimArgs
from lingua.optim.optimizer import build_optimizer, update
from lingua.optim.schedule import lr_at
from lingua.parallel.gradients import clip_divisor, grad_norm
from lingua.parallel.init import canonical_name

SCHEDULERS = ("constant", "linear", "inv_sqrt", "cosine", "wsd")


def rates(args: OptimArgs, steps: int, extra: int = 1) -> list[float]:
    return [lr_at(step, args, steps) for step in range(steps + extra)]


def legal_arguments():
    """Every scheduler with every combination of ordinary and extreme values."""
    for scheduler in SCHEDULERS:
        ours = scheduler in ("cosine", "wsd")
        for warmup, low, cycle, shape in itertools.product(
            (0, 1, 3, 9, 10, 11, 1000),
            (0.0, 0.1, 1.0),
            (1.0, 0.5, 0.3, 0.1, 1e-9, 2.5) if ours else (1.0,),
            (1e-3, 0.5, 3.0, 700.0),
        ):
            args = OptimArgs(lr=2.0, scheduler=scheduler, warmup=warmup, lr_min_ratio=low)
            args = replace(args, cycle_length=cycle, cosine_theta=shape, exp_factor=shape)
            for fraction in (0.0, 0.1, 0.5, 1.0) if scheduler == "wsd" else (0.1,):
                yield replace(args, decay_fraction=fraction)


def test_the_rate_is_finite_positive_and_at_most_the_peak_for_every_legal_argument():
    for args in legal_arguments():
        assert not list(args.validate())
        for steps in (1, 2, 10, 37):
            run = rates(args, steps)
            assert all(math.isfinite(rate) and 0 <= rate <= args.lr for rate in run), args
            assert run[0] > 0, args  # the first update is not wasted
            if args.warmup < steps:
                assert max(run[: args.warmup + 1]) == args.lr, args
                assert min(run[args.warmup :]) >= args.lr_min_ratio * args.lr, args


def test_after_the_run_the_rate_stays_what_it_was_at_its_end():
    for args in legal_arguments():
        for steps in (1, 10):
            ends = {lr_at(step, args, steps) for step in (steps, steps + 1, 2 * steps, 10**9)}
            assert len(ends) == 1, args


def test_the_warmup_rises_linearly_and_its_last_update_has_the_peak():
    for scheduler in SCHEDULERS:
        args = OptimArgs(lr=0.5, scheduler=scheduler, warmup=5)
        assert rates(args, 20)[:6] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5])
        assert rates(args, 5) == rates(args, 20)[:6]  # warmup == steps: no decay follows
        assert rates(args, 3, extra=9)[:3] == rates(args, 20)[:3]  # warmup > steps


def reference(scheduler_of, lr: float, steps: int) -> list[float]:
    """The rates of a scheduler of torch."""
    optimizer = torch.optim.SGD([torch.zeros(())], lr=lr)
    scheduler = scheduler_of(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_schedules_agree_with_those_of_torch():
    schedulers = torch.optim.lr_scheduler
    args = OptimArgs(lr=0.3, warmup=0, lr_min_ratio=0.1)
    for theirs, ours, steps in (
        (lambda o: schedulers.LinearLR(o, 1.0, 0.1, 40), {"scheduler": "linear"}, 60),
        (lambda o: schedulers.CosineAnnealingLR(o, 40, 0.03), {"scheduler": "cosine"}, 41),
        (
            lambda o: schedulers.CosineAnnealingWarmRestarts(o, 10, eta_min=0.03),
            {"scheduler": "cosine", "cycle_length": 0.25},
            40,
        ),
    ):
        run = [lr_at(step, replace(args, **ours), 40) for step in range(steps)]
        assert run == pytest.approx(reference(theirs, 0.3, steps), rel=1e-9)


def test_inverse_square_root_and_warmup_stable_decay_by_hand():
    args = OptimArgs(lr=1.0, scheduler="inv_sqrt", warmup=4, lr_min_ratio=0.25)
    assert [lr_at(s, args, 100) for s in (4, 16, 36, 64, 90)] == [1.0, 0.5, 1 / 3, 0.25, 0.25]

    args = OptimArgs(lr=1.0, scheduler="wsd", warmup=2, lr_min_ratio=0.0, decay_fraction=0.25)
    run = rates(args, 16, extra=3)
    assert run[1:13] == [1.0] * 12  # the decay is 4 updates: 1 - sqrt(1/4), ...
    assert run[13:] == pytest.approx([0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0, 0, 0])

    args = replace(args, cycle_length=0.5, exp_factor=1.0)  # decays of 2 and 4 updates
    run = rates(args, 16, extra=1)
    assert run[5:10] == [1.0, 1.0, 0.5, 1.0, 1.0]
    assert run[11:] == [1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


class Tied(nn.Module):
    """An embedding tied to the output, a wrapped block, a norm, a bias and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(11, 4)
        self.layers = nn.ModuleList([checkpoint_wrapper(nn.Linear(4, 4))])
        self.norm = nn.LayerNorm(4)
        self.output = nn.Linear(4, 11, bias=False)
        self.output.weight = self.tok_embeddings.weight
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)


def test_only_matrices_that_are_not_embeddings_decay_and_names_are_canonical():
    model = Tied()
    decay, no_decay = build_optimizer(model, OptimArgs(weight_decay=0.3)).param_groups
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.3, 0.0)
    assert decay["param_names"] == ["layers.0.weight"]
    assert decay["params"][0] is model.layers[0].weight
    names = ["tok_embeddings.weight", "layers.0.bias", "norm.weight", "norm.bias"]
    assert no_decay["param_names"] == names

    untied = Tied()
    untied.output.weight = nn.Parameter(torch.zeros(11, 4))
    decay, _ = build_optimizer(untied, OptimArgs()).param_groups
    assert decay["param_names"] == ["layers.0.weight", "output.weight"]


@pytest.mark.parametrize("max_norm", [0.5, 1e6, math.inf])
def test_clipping_is_torchs_own(max_norm):
    ours, theirs = ([nn.Parameter(torch.ones(n)) for n in (3, 5)] for _ in range(2))
    for p in (*ours, *theirs):
        p.grad = torch.linspace(-1, 2, len(p))
    norm = nn.utils.clip_grad_norm_(theirs, max_norm)
    assert grad_norm(ours) == norm
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad / clip_divisor(norm, max_norm), q.grad)
    assert clip_divisor(torch.tensor(math.inf), max_norm) == 1  # such a step is skipped as it is


def test_the_rate_of_a_parameter_is_multiplied_by_what_its_name_matches():
    scales = {"layers": 2.0, "layers.*.bias": 3.0, "norm.weight": 0.0}
    model = Tied()
    before = {canonical_name(name): p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, OptimArgs(weight_decay=0.0, lr_scale=scales))
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    update(optimizer, 0.01, torch.tensor(True), torch.ones(()))
    # AdamW's first update of a gradient of ones is the rate.
    steps = {n: before[n] - p for n, p in zip(before, model.parameters(), strict=True)}
    expected = {"layers.0.weight": 0.02, "layers.0.bias": 0.06, "norm.weight": 0.0}
    expected |= {"frozen.weight": 0.0}
    for name, step in steps.items():
        torch.testing.assert_close(step, torch.full_like(step, expected.get(name, 0.01)), msg=name)


class Calls(TorchDispatchMode):
    """Counts the operations of torch."""

    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += 1
        return func(*args, **(kwargs or {}))


def test_clipping_and_the_update_take_as_many_operations_for_any_number_of_parameters():
    def operations(n_layers: int, one_by_one: bool = False) -> int:
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(n_layers)))
        optimizer = build_optimizer(model, OptimArgs())
        model(torch.ones(2, 3)).sum().backward()
        parameters = list(model.parameters())
        with Calls() as calls:
            for part in [[p] for p in parameters] if one_by_one else [parameters]:
                divisor = clip_divisor(grad_norm(part), 1.0)
            update(optimizer, 0.1, torch.tensor(True), divisor)
        return calls.n

    assert operations(20) == operations(2)
    assert operations(20, one_by_one=True) > operations(2, one_by_one=True)
