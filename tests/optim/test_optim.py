"""The learning rate for every legal argument, and AdamW against torch's own on one process."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

from lingua.optim.args import OptimArgs
from lingua.optim.optimizer import build_optimizer, update
from lingua.optim.schedule import lr_at, schedule_warnings
from lingua.parallel.gradients import clip_divisor, grad_norm

SCHEDULERS = ("constant", "linear", "inv_sqrt", "cosine", "wsd")
TENSORS = ("step", "exp_avg", "exp_avg_sq")
ONE = torch.tensor(1.0)


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


def test_without_cycles_the_rate_never_rises_after_the_warmup_and_ends_at_the_lowest():
    for scheduler, warmup, low in itertools.product(SCHEDULERS, (0, 7), (0.0, 0.25)):
        args = OptimArgs(lr=1.0, scheduler=scheduler, warmup=warmup, lr_min_ratio=low)
        run = rates(args, 400)[warmup:]
        assert all(b <= a for a, b in itertools.pairwise(run)), args
        if scheduler in ("linear", "cosine", "wsd"):
            assert run[-1] == low and run[-2] > low, args


def test_the_rate_is_continuous_where_no_cycle_starts_again():
    """In a long run no update changes the rate by much; only the start of a new cycle jumps, up."""
    product = itertools.product
    cases = [{"scheduler": name} for name in ("constant", "linear", "inv_sqrt")]
    cases += [
        {"scheduler": "cosine", "cycle_length": cycle, "cosine_theta": theta}
        for cycle, theta in product((1.0, 0.5, 0.3), (1.0, 2.0))
    ]
    cases += [
        {"scheduler": "wsd", "cycle_length": cycle, "decay_fraction": fraction}
        for cycle, fraction in product((1.0, 0.5, 0.3), (0.0, 0.2, 1.0))
    ]
    for case, low in product(cases, (0.0, 0.1)):
        args = OptimArgs(lr=1.0, warmup=500, lr_min_ratio=low, **case)
        changes = [b - a for a, b in itertools.pairwise(rates(args, 5000, extra=100))]
        jumps = [change for change in changes if change > 0.003]
        assert min(changes) > -0.06, args  # the first update of wsd's decay over 300: 300 ** -0.5
        starts = math.ceil(1 / args.cycle_length) - 1
        if args.scheduler == "wsd" and args.decay_fraction == 0:
            starts = 0
        assert len(jumps) == starts and all(jump > 0.5 for jump in jumps), args


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


def test_a_warmup_longer_than_the_run_is_a_warning_and_no_error():
    (line,) = schedule_warnings(OptimArgs(warmup=2000), steps=1000)
    assert "optim.warmup = 2000" in line and "50 %" in line
    assert not list(schedule_warnings(OptimArgs(warmup=2000), steps=2000))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("lr", (-1e-9, math.nan, math.inf)),
        ("weight_decay", (-0.1, math.nan)),
        ("beta1", (-0.1, 1.0, math.nan)),
        ("beta2", (1.5,)),
        ("epsilon", (0.0, -1.0, math.nan)),
        ("clip", (0.0, -1.0, math.nan)),
        ("warmup", (-1,)),
        ("lr_min_ratio", (-0.1, 1.1, math.nan)),
        ("cycle_length", (0.0, -1.0, math.inf)),
        ("cosine_theta", (0.0, math.nan)),
        ("decay_fraction", (-0.1, 1.1)),
        ("exp_factor", (0.0, math.inf)),
    ],
)
def test_a_value_out_of_range_is_named(field, values):
    for value in values:
        (problem,) = replace(OptimArgs(), **{field: value}).validate()
        assert problem[0] == field and problem[1].startswith("must be ")


# ---- the optimizer


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

    def forward(self, tokens):
        return self.output(self.norm(self.layers[0](self.tok_embeddings(tokens))))


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


def test_compiled_blocks_keep_their_plain_names():
    model = nn.Sequential(torch.compile(nn.Linear(3, 3)), nn.Linear(3, 3))
    decay, no_decay = build_optimizer(model, OptimArgs()).param_groups
    assert decay["param_names"] == ["0.weight", "1.weight"]
    assert no_decay["param_names"] == ["0.bias", "1.bias"]


def test_all_state_exists_before_the_first_step():
    model = Tied()
    optimizer = build_optimizer(model, OptimArgs())
    trained = [p for p in model.parameters() if p.requires_grad]
    assert list(optimizer.state) == [p for g in optimizer.param_groups for p in g["params"]]
    assert len(optimizer.state) == len(trained)
    for parameter in trained:
        state = optimizer.state[parameter]
        assert set(state) == set(TENSORS)
        assert state["step"].shape == () and state["step"].dtype == torch.float32
        assert all(state[name].shape == parameter.shape for name in TENSORS[1:])
        assert not any(state[name].any() for name in TENSORS)


def train(model, optimizer, take_step, steps=5):
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        tokens = torch.randint(11, (3, 7), generator=generator)
        model(tokens).logsumexp(-1).mean().backward()
        take_step(optimizer, 0.1 / (step + 1))
        optimizer.zero_grad()


def torchs_step(optimizer, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def finite_update(optimizer, lr):
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad *= 4
    update(optimizer, lr, torch.tensor(True), torch.tensor(4.0))


def two_models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    first, second = Tied(), Tied()
    second.load_state_dict(first.state_dict())
    return first, second


def plain_adamw(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """What build_optimizer promises, written down once more without it."""
    matrix = model.layers[0].weight
    rest = [p for p in model.parameters() if p is not matrix and p.requires_grad]
    groups = [
        {"params": [matrix], "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-6, fused=True)


@pytest.mark.parametrize(("decay_of_theirs", "equal"), [(0.2, True), (0.19, False)])
def test_a_finite_update_is_torchs_adamw_bit_for_bit(decay_of_theirs, equal):
    ours, theirs = two_models()
    args = OptimArgs(weight_decay=0.2, beta1=0.8, beta2=0.9, epsilon=1e-6)
    optimizer = build_optimizer(ours, args)
    train(ours, optimizer, finite_update)
    train(theirs, plain_adamw(theirs, decay_of_theirs), torchs_step)
    same = [torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)]
    assert all(same) == equal
    assert all(state["step"] == 5 for state in optimizer.state.values())
    assert optimizer.param_groups[0]["lr"] == 0.1 / 5


def everything(model: nn.Module, optimizer) -> list[torch.Tensor]:
    """Copies of this rank's parameters, moments and step counts."""
    states = [optimizer.state[p][name] for p in optimizer.state for name in TENSORS]
    tensors = [*model.parameters(), *states]
    return [getattr(t, "_local_tensor", t).detach().clone() for t in tensors]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_update_that_is_not_finite_changes_nothing_and_the_next_one_counts_on(bad):
    model = Tied()
    optimizer = build_optimizer(model, OptimArgs(weight_decay=0.5))
    train(model, optimizer, finite_update, steps=2)
    before = everything(model, optimizer)

    model(torch.tensor([[1, 2]])).sum().backward()
    model.norm.weight.grad[0] = bad
    update(optimizer, 0.1, torch.isfinite(model.norm.weight.grad.norm()), ONE)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(model, optimizer), strict=True))

    optimizer.zero_grad()
    train(model, optimizer, finite_update, steps=1)
    assert all(state["step"] == 3 for state in optimizer.state.values())
    assert all(torch.isfinite(t).all() for t in everything(model, optimizer))


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


class Meshed(nn.Module):
    """Sizes that do not divide: with 2 x 2 ranks some shards are uneven, some empty."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.up, self.down = nn.Linear(5, 6), nn.Linear(6, 5)
        self.head = nn.Linear(5, 1, bias=False)

    def forward(self, tokens):
        return self.head(self.down(self.up(self.embed(tokens))))


def train_on_a_mesh() -> tuple[bool, bool, list[str], dict[str, torch.Tensor]]:
    """In each of 4 ranks: (shard is DTensor, a bad update changed nothing, names, parameters)."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    torch.manual_seed(0)
    model = Meshed()
    # the embedding and the head stay on dp_shard alone, the others are on both axes
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh["dp_shard"])
    optimizer = build_optimizer(model, OptimArgs(weight_decay=0.3))
    train(model, optimizer, finite_update)
    before = everything(model, optimizer)
    model(torch.tensor([[1, 2]])).sum().backward()
    update(optimizer, 0.1, torch.tensor(False), ONE)
    after = everything(model, optimizer)
    kept = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    sharded = all(hasattr(p, "placements") for p in optimizer.state)
    full = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    return sharded, kept, names, full


def test_shards_on_different_meshes_are_updated_as_the_whole_parameters_are(ranks):
    def trained_whole(weight_decay: float):
        torch.manual_seed(0)
        model = Meshed()
        optimizer = build_optimizer(model, OptimArgs(weight_decay=weight_decay))
        train(model, optimizer, finite_update)
        return model, optimizer

    model, optimizer = trained_whole(0.3)
    other, _ = trained_whole(0.29)
    for sharded, kept, names, full in ranks.run(4, train_on_a_mesh):
        assert sharded and kept
        assert names == [n for group in optimizer.param_groups for n in group["param_names"]]
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(full[name], parameter.detach(), rtol=1e-5, atol=1e-6)
        # the tolerance tells a slightly different weight decay
        assert not torch.allclose(full["up.weight"], other.up.weight, rtol=1e-5, atol=1e-6)
