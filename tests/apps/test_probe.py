"""A probe sees the hidden states and the gradients that plain torch has, and cannot change the step
that it looks at."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from apps.main import app
from apps.main.transformer import build_transformer
from lingua.monitor.means import Means
from lingua.parallel.init import init_parameters
from lingua.parallel.plan import ParallelPlan
from lingua.run.hidden import recorded
from lingua.run.run import Run
from tests.apps.meshes import Sizes, name_of, on_mesh
from tests.apps.runs import GLOBAL_BATCH, Runs, arguments

CHECKPOINTING, COMPILE = "distributed.activation_checkpointing", "distributed.compile"
# Outputs that are whole, split over positions or over features, and not yet summed over ranks.
MODULES = ("tok_embeddings", "layers.*", "layers.*.attention", "layers.*.attention.w[qo]")
MODULES += ("layers.*.feed_forward.w*", "norm")
Numbers = dict[str, float]


def squares(states: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.float().square().mean((1, 2)) for name, x in states.items()}


def look(run: Run) -> None:
    means, padded = Means(), Means()
    for micro, states in run.hidden(*MODULES):
        means.add(squares(states), micro)
        padded.add(squares(states), replace(micro, row_ids=micro.row_ids.clamp(min=0)))
    norms = run.grad_norms("", "layers.*", f"layers.*{WQ}", "norm")
    rms = means.read(run.mesh)
    run.report.event("look", 1, rms=rms, norms=norms, padded=padded.read(run.mesh))


def plain(runs: Runs) -> tuple[Numbers, Numbers]:
    """By plain torch, from the whole global batch at once."""
    args = arguments({})
    model = build_transformer(args.model)
    init_parameters(model, args.seed, torch.device("cpu"))
    names = [f"layers.{i}{part}" for i in range(2) for part in PARTS]
    states: dict[str, Tensor] = {}
    for name in ("tok_embeddings", *names, "norm"):
        module = model.get_submodule(name)
        module.register_forward_hook(lambda m, x, out, name=name: states.update({name: out}))
    tokens = torch.from_numpy(runs.stream().rows(range(GLOBAL_BATCH)).astype("int64"))
    logits = model(tokens[:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    norms = {}
    for name in ("", "norm", *(f"layers.{i}{part}" for i in range(2) for part in ("", WQ))):
        grads = [p.grad.flatten() for p in model.get_submodule(name).parameters()]
        norms[name] = torch.cat(grads).norm().item()
    return {name: x.square().mean().item() for name, x in states.items()}, norms


WQ = ".attention.wq"
PARTS = ("", ".attention", WQ, ".attention.wo")
PARTS += (".feed_forward.w1", ".feed_forward.w2", ".feed_forward.w3")
CASES: list[tuple[Sizes, dict[str, Any]]] = [
    ((1, 1, 1), {}),
    ((1, 2, 1), {CHECKPOINTING: "selective"}),
    ((1, 1, 2), {CHECKPOINTING: "full"}),
]
COMPILED = {COMPILE: True, CHECKPOINTING: "selective"}
SOAK: list[tuple[Sizes, dict[str, Any]]] = [((1, 1, 1), {COMPILE: True}), ((1, 2, 2), COMPILED)]
SOAK.append(((2, 1, 1), {CHECKPOINTING: "full"}))


def far(found: Numbers, expected: Numbers) -> float:
    assert found.keys() == expected.keys()
    return max(abs(found[name] / value - 1) for name, value in expected.items())


@pytest.mark.parametrize(
    ("sizes", "settings"),
    CASES + [pytest.param(*case, marks=pytest.mark.soak) for case in SOAK],
    ids=lambda value: name_of(value) if isinstance(value, tuple) else "",
)
def test_hidden_states_and_gradients_are_those_of_plain_torch(runs, sizes, settings):
    settings = settings | {"stop_at": 1, "data.batch_size": 2, "validation.every": 0}
    run = runs.train(sizes, settings, app=replace(app, probe=look))
    [event] = [line for line in run.events if line["event"] == "look"]
    rms, norms = plain(runs)
    assert far(event["rms"], rms) < 1e-5 and far(event["norms"], norms) < 1e-5
    assert far(event["padded"], rms) > 1e-3  # rows that do not count are seen


def scale(run: Run) -> None:
    run.model.norm.weight.grad.mul_(2)


def drop(run: Run) -> None:
    run.model.norm.weight.grad = None


def move(run: Run) -> None:
    run.model.norm.weight.add_(1)


def evaluate(run: Run) -> None:
    run.model.norm.eval()


def leave_a_hook(run: Run) -> None:
    run.model.norm.register_forward_hook(lambda module, args, out: 2 * out)


def misname(run: Run) -> None:
    list(run.hidden("layer.*"))


ONE, SHARDS = (1, 1, 1), (1, 2, 1)
FAULTS = [
    (scale, SHARDS, "the gradient of norm.weight"),
    (drop, ONE, "the gradient of norm.weight"),
    (move, SHARDS, "changed norm.weight"),
    (evaluate, ONE, "the training mode of norm"),
    (leave_a_hook, ONE, "the hooks of norm"),
    (misname, ONE, "layer.*"),
]


@pytest.mark.parametrize(("fault", "sizes", "named"), FAULTS)
def test_a_probe_that_changes_a_step_ends_the_run_before_it(runs, fault, sizes, named):
    settings = {"stop_at": 3, "probe.every": 2, "checkpoint.dump.every": 1}
    run = runs.train(sizes, settings, app=replace(app, probe=fault), refused=True)
    assert named in run.error
    assert [path.name for path in sorted(run.dump_dir.glob("checkpoints/00*"))] == ["0000000001"]


def hidden_here(pattern: str) -> Tensor:
    layers = nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 4))
    plan = ParallelPlan(tp={"0": ColwiseParallel(), "2": RowwiseParallel()})
    model, mesh = on_mesh(layers, plan, (1, 1, 2))
    args = arguments({"data.seq_len": 5})
    with torch.no_grad(), recorded(model, [pattern], args, mesh) as states:
        model(torch.ones(3, 5, 4))
    return states[pattern]


def test_a_part_that_cannot_be_made_whole_is_refused_by_name(ranks):
    whole = ranks.run(2, hidden_here, "0")
    assert whole[0].shape == (3, 5, 6) and torch.equal(*whole)
    with pytest.raises(AssertionError, match="have different parts of 1, split by no style"):
        ranks.run(2, hidden_here, "1")
