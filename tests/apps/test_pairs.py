"""Every pair of options that touch gradients, against the plain run of the same precision.

Each run makes the program's own steps, of several micro-steps; those of a mesh are made in one
process group, and the mesh is an option too. The plain run is one process with one micro-step. Of
the options it has those without which it would be another run: a precision, an optimizer, the
clipping of gradients, a step without targets.

By default a few runs of many options have all pairs between them. The soak tests also have each
pair in a run of its own, except those with an option that hides what the other does wrong.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from apps.main import app as main
from apps.main.train import Objective, build_run, take_steps
from lingua.app import App
from lingua.base.errors import UserError
from lingua.checkpoint.saver import Saver
from lingua.data.loader import MicroBatch
from lingua.data.sources import TextData
from lingua.parallel.args import DistributedArgs
from lingua.parallel.init import canonical_name
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.signals import StopRequest
from lingua.parallel.tensors import whole
from lingua.run.run import Run
from lingua.run.start import Started, check_run
from tests.apps.meshes import Sizes, name_of
from tests.apps.runs import Outcome, Runs, Twist, TwistedData, arguments
from tests.forks import optimizer, soap

STEPS = 2
CPU = torch.device("cpu")
ONE, REPLICAS, SHARDS, TP = (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)
BASE = {"model.n_layers": 1, "steps": 20, "stop_at": STEPS + 1, "data.workers": 0}
MICRO_STEPS = {"data.batch_size": 2}  # of 7 rows: 4 on one rank, 2 on two


@dataclass(frozen=True)
class Option:
    settings: dict[str, Any]
    app: dict[str, Any] = field(default_factory=dict)  # what it replaces of apps.main
    in_plain: bool = False  # the plain run has it too, since without it it is another run


CHECKPOINTING, SYNC = "distributed.activation_checkpointing", "distributed.grad_sync"
FLOAT8 = {"distributed.float8": "tensorwise", "model.dim": 64, "model.head_dim": 16}
FLOAT8 |= {"model.ffn_dim_multiplier": 1, "model.multiple_of": 32}
ASYNC = {"checkpoint.async_save": True, "checkpoint.dump.every": 1, "checkpoint.dump.keep": 0}
MUON = {"optim.name": "muon", "optim.muon.dtype": "fp32"}
NO_TARGETS = TwistedData(Twist(without_targets=1), TextData())
OPTIONS = {
    "deterministic": Option({"deterministic": True}),
    "exact": Option({"deterministic": "mesh"}),
    "reshard": Option({"distributed.reshard": "step"}),
    "replica_last": Option({SYNC: "replica_last"}),
    "every": Option({SYNC: "every"}),
    "full": Option({CHECKPOINTING: "full"}),
    "selective": Option({CHECKPOINTING: "selective"}),
    "async_save": Option(ASYNC),
    "compile": Option({"distributed.compile": True}),
    "bf16": Option({"distributed.model_dtype": "bf16"}, in_plain=True),
    "float8": Option(FLOAT8, in_plain=True),
    "clip": Option({"optim.clip": 0.3}, in_plain=True),
    "muon": Option(MUON, in_plain=True),
    "NAdam": Option({}, {"optimizer": optimizer.build_nadam}, in_plain=True),
    "SOAP": Option({"optim.epsilon": 1e-3}, {"optimizer": soap.app.optimizer}, in_plain=True),
    "no targets": Option({"data.on_no_targets": "skip"}, {"data": NO_TARGETS}, in_plain=True),
}
# Of each line at most one can be chosen.
EXCLUSIVE = {"deterministic", "exact"}, {"replica_last", "every"}, {"full", "selective"}
EXCLUSIVE += ({"muon", "NAdam", "SOAP"},)
# They hide what is less than their rounding, or what is left of a step for the next one.
HIDING = "bf16", "float8", "no targets"
# What is refused, and the key that the message names.
REFUSED = {("exact", "replica_last"): SYNC, ("exact", "float8"): "distributed.float8"}

Case = tuple[str, ...]
Arrays = dict[str, np.ndarray]  # float64
SINGLES: list[Case] = [(), *((name,) for name in OPTIONS)]
PAIRS: list[Case] = [
    pair for pair in combinations(OPTIONS, 2) if not any({*pair} <= kind for kind in EXCLUSIVE)
]
# How far a tensor of the gradients or weights may be from that of the plain run: the norm of the
# difference relative to its norm, and by which factor it is larger or smaller, less 1. Products in
# float8 have 2 or 3 bits of a number, each scaled by the largest of its micro-batch.
TOLERANCES = {"float8": (0.5, 0.1), "bf16": (5e-2, 2e-2), "fp32": (1e-5, 1e-5)}


def fit(names: set[str]) -> bool:
    """Whether one run can have all these options."""
    chosen_twice = any(len(kind & names) > 1 for kind in EXCLUSIVE)
    return not chosen_twice and not any({*pair} <= names for pair in REFUSED)


def covering(names: Sequence[str], each_with: str | None = None) -> list[Case]:
    """Few runs of many of these options, such that every pair of them, or every one with the
    option `each_with`, is in a run unless it is refused."""
    pairs = combinations(names, 2) if each_with is None else ((name, each_with) for name in names)
    todo = {frozenset(pair) for pair in pairs if fit({*pair})}
    cases: list[Case] = []
    while todo:
        case = set(min(todo, key=sorted))

        def gain(name: str, case: set[str] = case, todo: set[frozenset[str]] = todo) -> int:
            return sum(name in pair and pair <= case | {name} for pair in todo)

        while others := [n for n in names if n not in case and fit(case | {n}) and gain(n)]:
            case.add(max(others, key=gain))
        todo = {pair for pair in todo if not pair <= case}
        cases.append(tuple(name for name in OPTIONS if name in case))
    return cases


def together(sizes: Sizes, compiled: bool = False) -> list[Case]:
    """Runs that have every pair of options between them, all with compiled blocks or none. Few have
    an option that hides what others do wrong."""
    refused = {"exact"} if sizes[2] > 1 else set()
    names = [name for name in OPTIONS if name not in {"compile", *HIDING} | refused]
    if compiled:
        return [*covering(names, "compile"), *(("compile", name) for name in HIDING)]
    hidden = [case for name in HIDING for case in covering(names, name)]
    return [(), *covering(names), *hidden, *combinations(HIDING, 2), *REFUSED]


@dataclass
class Trained:
    """Whole tensors by name, of each step: gradients, and the weights after it, which are those of
    the last step alone where neither a checkpoint has others nor one process all."""

    gradients: dict[int, Arrays] = field(default_factory=dict)
    weights: dict[int, Arrays] = field(default_factory=dict)


def settings_of(case: Case) -> dict[str, Any]:
    return {key: value for name in case for key, value in OPTIONS[name].settings.items()}


def app_of(case: Case) -> App:
    return replace(main, **{k: v for name in case for k, v in OPTIONS[name].app.items()})


def copies(tensors: Iterable[tuple[str, Tensor]]) -> Arrays:
    return {canonical_name(name): whole(t.detach()).double().numpy() for name, t in tensors}


def train_each(sizes: Sizes, runs: dict[Case, tuple[App, dict[str, Any]]]) -> dict[Case, Any]:
    """What each run has trained, one after another in this rank, or why it is refused."""
    mesh = start(CPU, detect_launch(), DistributedArgs(*sizes))
    trained: dict[Case, Any] = {}
    for case, (app, settings) in runs.items():
        try:
            trained[case] = train(app, settings, mesh)
        except UserError as error:
            trained[case] = str(error)
        except Exception as error:
            error.add_note(f"in the case {case}")
            raise
    return trained if dist.get_rank() == 0 else {}


def train(app: App, settings: dict[str, Any], mesh: DeviceMesh) -> Trained:
    """The steps of a run in the process group that this rank has."""
    trained, args = Trained(), arguments(settings, app)

    def record(run: Run) -> None:
        step = run.progress.step + 1
        if args.data.on_no_targets == "stop" or step > 1:
            grads = ((n, p.grad) for n, p in run.model.named_parameters() if p.grad is not None)
            trained.gradients[step] = copies(grads)

    args.folder.mkdir(exist_ok=True)
    args.distributed.resolve(args.exact)
    torch.use_deterministic_algorithms(bool(args.deterministic))
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with StopRequest() as stop, ExitStack() as open_parts:
        saver = open_parts.enter_context(Saver(args.checkpoint_folder, args.checkpoint))
        started = Started(mesh, CPU, saver, check_run(app, args, mesh.shape, "cpu"))
        run = build_run(replace(app, probe=record), args, started, stop, open_parts)
        steps = take_steps(run, stop)
        while run.progress.step < STEPS:
            if next(steps) == STEPS or mesh.size() == 1:
                trained.weights[run.progress.step] = copies(run.model.named_parameters())
        steps.close()
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs
    assert compiled == args.distributed.compile
    if args.checkpoint.async_save and dist.get_rank() == 0:  # of which the next step knew nothing
        saved = Outcome(args.folder, []).tensors(1)
        trained.weights[1] = copies((n, saved[f"model.{n}"]) for n in trained.weights[STEPS])
    return trained


def train_on(
    runs: Runs,
    sizes: Sizes,
    cases: Sequence[Case],
    more: dict[str, Any],
    fault: Callable[[App], App] = lambda app: app,
    at_once: int = 30,
) -> dict[Case, Any]:
    """What these options give on a mesh, with further settings and, perhaps, a fault."""
    made = {}
    for case in cases:
        settings = BASE | more | settings_of(case)
        settings["dump_dir"] = runs.folder / f"pair{next(runs.numbers)}"
        made[case] = fault(app_of(case)), runs.config(sizes, settings)
    trained: dict[Case, Any] = {}
    for i in range(0, len(cases), at_once):  # ranks must answer after some time
        part = {case: made[case] for case in cases[i : i + at_once]}
        trained |= runs.ranks.run(prod(sizes), train_each, sizes, part)[0]
    return trained


def plain_of(case: Case) -> Case:
    return tuple(name for name in case if OPTIONS[name].in_plain)


@pytest.fixture(scope="module")
def plain(runs: Runs) -> Callable[[Iterable[Case]], dict[Case, Trained]]:
    """The plain run of each case, by what it has of the options."""
    trained: dict[Case, Trained] = {}

    def of(cases: Iterable[Case]) -> dict[Case, Trained]:
        new = [case for case in dict.fromkeys(map(plain_of, cases)) if case not in trained]
        trained.update(train_on(runs, ONE, new, {}))
        return trained

    return of


def differences(run: Trained, plain: Trained) -> dict[str, list[float]]:
    """Of the tensor that is farthest: its distance and its factor, as in TOLERANCES."""
    apart = {}
    for kind in ("gradients", "weights"):
        each = []
        for step, ours in vars(run)[kind].items():
            expected = vars(plain)[kind][step]
            assert ours.keys() == expected.keys()
            for a, b in ((ours[name].ravel(), expected[name].ravel()) for name in expected):
                distance = np.linalg.norm(a - b) / np.linalg.norm(b)
                each.append((distance, abs(a @ b / (b @ b) - 1)))
        apart[kind] = np.max(each, axis=0).tolist()
    return apart


def beyond(case: Case, apart: dict[str, list[float]], margin: float = 1) -> bool:
    """Whether something is farther from the plain run than `margin` times its tolerance."""
    limits = TOLERANCES[next((name for name in TOLERANCES if name in case), "fp32")]
    pairs = ((v, limit) for kind in apart.values() for v, limit in zip(kind, limits, strict=True))
    return any(not value <= margin * limit for value, limit in pairs)  # nor is NaN within


def key_refused(sizes: Sizes, case: Case) -> str | None:
    """The key by which a run is refused."""
    if "exact" in case and sizes[2] > 1:
        return "distributed.tp_size"
    return next((key for pair, key in REFUSED.items() if {*pair} <= {*case}), None)


ALONE = [case for case in SINGLES if case != ("compile",)]
ALONE += [pair for pair in PAIRS if not {*pair} & {"compile", *HIDING}]
SOAK = pytest.mark.soak
MESHES, MIXED = (ONE, REPLICAS, SHARDS, TP), ((2, 2, 1), (1, 2, 2))


def param(sizes: Sizes, name: str, cases: list[Case], more: dict[str, Any], *marks: Any) -> Any:
    return pytest.param(sizes, cases, more, id=f"{name_of(sizes)} {name}", marks=marks)


@pytest.mark.parametrize(
    ("sizes", "cases", "more"),
    [param(sizes, "micro-steps", together(sizes), MICRO_STEPS) for sizes in MESHES[:3]]
    + [param(TP, "micro-steps", together(TP), MICRO_STEPS, SOAK)]  # for time
    + [param(sizes, "one micro-step", together(sizes), {}, SOAK) for sizes in (SHARDS, TP)]
    + [param(sizes, "compiled", together(sizes, True), MICRO_STEPS, SOAK) for sizes in (SHARDS, TP)]
    + [param(sizes, "micro-steps", together(sizes), MICRO_STEPS, SOAK) for sizes in MIXED]
    + [param(SHARDS, "each pair alone", ALONE, MICRO_STEPS, SOAK)],
)
def test_every_pair_of_options_trains_as_the_plain_run(runs, plain, sizes, cases, more):
    trained = train_on(runs, sizes, cases, more, at_once=3 if "compile" in cases[0] else 30)
    expected, wrong = plain(cases), {}
    for case, run in trained.items():
        key = key_refused(sizes, case)
        if isinstance(run, str) or key is not None:
            assert isinstance(run, str) and key is not None and key in run, (case, run)
        elif beyond(case, apart := differences(run, expected[plain_of(case)])):
            wrong[case] = apart
    assert wrong == {}


class Twice(Objective):
    """Adds the gradient of the first micro-batch twice."""

    def gradients(self, batch: list[MicroBatch], counts: Tensor) -> tuple[Tensor, Tensor]:
        return super().gradients([batch[0], *batch], counts)


@pytest.mark.parametrize(
    "fault",
    [
        Twist(shift=1).apply,
        Twist(own_divisor=True).apply,
        lambda app: replace(app, objective=Twice),
    ],
    ids=["rows shifted by one", "a wrong divisor", "a micro-batch that counts twice"],
)
def test_the_tolerance_of_each_precision_notices_a_fault(runs, plain, fault):
    cases: list[Case] = [(), ("bf16",), ("float8",), ("bf16", "float8")]
    trained = train_on(runs, SHARDS, cases, MICRO_STEPS, fault)
    expected = plain(cases)
    for case, run in trained.items():
        assert beyond(case, differences(run, expected[plain_of(case)]), margin=1.5), case
