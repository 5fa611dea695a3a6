"""Every feature on two meshes and over a stop: the run that one process makes without a stop.

A feature is a line of FEATURES. Its run is stopped on one mesh and goes on on another, with other
micro-batches. What that run restores, the rows that it reads, and its losses, gradient norms,
weights and measurements are those of one process that never stopped; with each of FAULTS they are
not, of which a feature has one in the soak tests, in turn. In PAIRS one of each two meshes goes on
from what the other saved.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from apps.dpo import app as dpo
from apps.fastrnn import app as fastrnn
from apps.lora import app as adapters
from apps.lora.dpo import app as adapters_dpo
from apps.lora.sft import app as adapters_sft
from apps.main import app as main
from apps.mamba import app as mamba
from apps.mtp import app as mtp
from apps.sft import app as sft
from apps.speedrun import app as speedrun
from lingua.app import App, Built
from lingua.parallel.plan import ParallelPlan
from lingua.run.run import Run
from tests.apps.meshes import Sizes, name_of, on_its_own, on_meshes
from tests.apps.plain import build_plain, build_split
from tests.apps.runs import GLOBAL_BATCH, Outcome, Twist, digests, relative
from tests.forks import (
    adafactor,
    curriculum,
    distillation,
    frozen,
    latent,
    looped,
    lora,
    mingru,
    modular,
    moe,
    optimizer,
    probe,
    simpo,
    soap,
    synthetic,
)

K, END = 2, 5  # where the run is stopped, and where it ends
ONE, REPLICAS, SHARDS, TP = (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)
FOUR: tuple[Sizes, Sizes] = ((2, 2, 1), (1, 2, 2))  # the meshes of the soak tests
Build = Callable[[Any], Built]
CHECKPOINTING, COMPILE = "distributed.activation_checkpointing", "distributed.compile"


@dataclass(frozen=True)
class Feature:
    stopped: Sizes  # the mesh that trains K steps
    resumed: Sizes  # the one that trains the others
    settings: dict[str, Any] = field(default_factory=dict)
    app: App = main
    edited: dict[str, Any] = field(default_factory=dict)  # settings that the first start lacks
    # settings and model of the second start alone, which train the same run
    other: dict[str, Any] = field(default_factory=dict)
    build: Build | None = None
    reads: str | None = None  # the fixture that gives the settings of its data
    faults: tuple[str, ...] = ()  # with which it is tried too
    rounding: float = 1  # times the tolerance of what is computed from the restored state and rows


@dataclass(frozen=True)
class Fault:
    twist: Twist
    seen: set[str]  # the differences that it must make
    sizes: Sizes = ONE


FAULTS = {
    "rows shifted by one": Fault(Twist(shift=1), {"rows", "loss"}),
    "moments lost": Fault(Twist(lose_moments=True), {"restored", "loss", "weights"}),
    "a wrong divisor": Fault(Twist(own_divisor=True), {"loss", "grad_norm"}, SHARDS),
}


def run_model(run: Run) -> None:
    """A probe that runs the model before it reads the gradients, and again before the update."""
    for _ in range(2):
        run.model(*run.on_device(run.batch[0]).inputs())
        probe.probe(run)


def build_on_dtensors(model: nn.Module, args: Any, plan: ParallelPlan | None) -> Optimizer:
    return torch.optim.SGD(model.parameters(), args.optim.lr, momentum=0.9, foreach=False)


STAGES = {"data.stages": f"[{{from_step: {K + 1}, sources: {{one: 1, two: 3}}}}]"}
HEADS = {"data.n_views": 3, "model.n_layers": 3, "model.head_layers": 2}  # of two blocks, trunk one
ADDITION = {"data.sources": "{}", "data.seq_len": 4}
SCALES = "{tok_embeddings: 3, layers.*.attention.value_embedding: 0.5, layers.1.*.w*: 2}"
LOOPED = {"model.dropout": 0.1, CHECKPOINTING: "full", "optim.lr_scale": SCALES}
ADAPTERS = {"lora.rank": 3, "lora.dropout": 0.1, CHECKPOINTING: "full"}
LATENT = {"data.document_mask": "ignore", "optim.epsilon": 1e-5}
CELL = {"model.n_kv_heads": "null", "model.dropout": 0.1}
STATES = {"model.layers": "[mamba, attention]", "data.document_mask": "ignore"}
STATES |= {"model.mamba": "{expand: 2, head_dim: 11, state_dim: 5, n_groups: 2}"}
SPEEDRUN = {"model.ngrams": 3, "model.ngram_rows": 97, "model.smear": True}
SPEEDRUN |= {"model.value_embeddings": True, "model.residual_scales": True}
SPEEDRUN |= {"model.activation": "relu2", "model.logit_cap": 15, "data.document_mask": "keep"}
FEATURES = {
    "dropout": Feature(TP, REPLICAS, {"model.dropout": 0.1, CHECKPOINTING: "full"}),
    "document masks": Feature(SHARDS, TP, {"data.document_mask": "ignore", CHECKPOINTING: "full"}),
    "stages edited": Feature(REPLICAS, SHARDS, {"data.sources": "{one: 1}"}, edited=STAGES),
    "muon": Feature((1, 3, 1), TP, {"optim.name": "muon", "optim.muon.dtype": "fp32"}),
    "modules of torch": Feature(
        (1, 3, 1),
        (1, 2, 2),
        {"optim.clip": 0.3},
        replace(main, build=build_plain),
        build=build_split,
    ),
    "several tokens": Feature(SHARDS, TP, HEADS | {"model.dropout": 0.1}, mtp),
    "conversations": Feature(SHARDS, TP, {}, sft, reads="talk"),
    "files of tokens": Feature(SHARDS, TP, {}, reads="token_files"),
    "pairs": Feature(REPLICAS, TP, {}, dpo, reads="pairs"),
    "pairs without a reference": Feature(SHARDS, TP, {}, simpo.app, reads="pairs"),
    "another task": Feature(TP, SHARDS, ADDITION, modular.app),
    "a teacher": Feature(REPLICAS, TP, {}, distillation.app, reads="taught"),
    "a curriculum": Feature(SHARDS, TP, {}, curriculum.app),
    "changes of a frozen model": Feature(SHARDS, TP, {}, lora.app, reads="based"),
    "adapters": Feature(SHARDS, TP, ADAPTERS, adapters, reads="based_alone"),
    "adapters on conversations": Feature(TP, SHARDS, ADAPTERS, adapters_sft, reads="talk_based"),
    "adapters on pairs": Feature(TP, REPLICAS, ADAPTERS, adapters_dpo, reads="pairs"),
    "a model that is partly frozen": Feature(TP, SHARDS, {}, frozen.app),
    "latent attention": Feature(SHARDS, TP, LATENT, latent.app),
    "another block": Feature(TP, SHARDS, {}, mingru.app),
    "recurrences": Feature(TP, SHARDS, CELL | {"data.document_mask": "ignore"}, fastrnn),
    "state spaces": Feature(REPLICAS, TP, STATES, mamba, other={CHECKPOINTING: "selective"}),
    "experts": Feature(SHARDS, TP, {}, moe.app),
    "blocks that run twice": Feature(TP, SHARDS, LOOPED, looped.app, other={CHECKPOINTING: "none"}),
    "a speedrun": Feature(SHARDS, TP, SPEEDRUN, speedrun),
    "an optimizer of torch": Feature(SHARDS, TP, {}, optimizer.app),
    "an optimizer of torch on DTensors": Feature(
        TP, REPLICAS, {}, replace(main, optimizer=build_on_dtensors)
    ),
    "row and column statistics": Feature(SHARDS, TP, {}, adafactor.app),
    "Kronecker factors": Feature(
        TP, (1, 3, 1), {"optim.epsilon": 1e-3, "checkpoint.async_save": True}, soap.app
    ),
    "rows made by code": Feature(REPLICAS, TP, {"data.sources": "{}"}, synthetic.app),
    "a probe": Feature(SHARDS, TP, {"probe.every": 2}, probe.app),
    "a probe that runs the model": Feature(
        SHARDS, REPLICAS, {}, replace(probe.app, probe=run_model)
    ),
}
FLOAT8 = {"distributed.float8": "tensorwise", "model.dim": 64, "model.head_dim": 16}
FLOAT8 |= {"model.n_kv_heads": 2, "model.ffn_dim_multiplier": 1, "model.multiple_of": 32}
COMPILED = {COMPILE: True, CHECKPOINTING: "selective"}
four = {"stopped": FOUR[0], "resumed": FOUR[1]}
SOAK = {
    name: replace(feature, **four, faults=(fault,))
    for (name, feature), fault in zip(FEATURES.items(), cycle(FAULTS))
}
CONTROLLED = ("dropout", "muon", "conversations", "rows made by code")
FEATURES |= {name: replace(FEATURES[name], faults=tuple(FAULTS)) for name in CONTROLLED}
for name in (
    "a speedrun", "another block", "an optimizer of torch on DTensors", "experts", "a teacher",
    "row and column statistics", "a probe that runs the model", "a probe", "another task",
    "pairs without a reference", "blocks that run twice", "Kronecker factors",
    "a model that is partly frozen", "adapters on conversations",
):  # fmt: skip
    del FEATURES[name]  # for time
SOAK |= {c: Feature(SHARDS, TP, CELL | {"model.cell": c}, fastrnn) for c in ("mingru", "minlstm")}
SOAK["products in float8"] = Feature(SHARDS, TP, FLOAT8, rounding=3000)
NOISE_AND_MASKS = {"model.dropout": 0.1, "data.document_mask": "ignore"}
SOAK["compiled"] = Feature(TP, (1, 2, 2), NOISE_AND_MASKS, other=COMPILED)
SOAK["compiled, keeping all"] = Feature(SHARDS, REPLICAS, other={COMPILE: True})
SOAK["compiled blocks that run twice"] = Feature(REPLICAS, TP, LOOPED, looped.app, other=COMPILED)


# One process, then replicated, sharded, tensor-parallel, and their mixes up to eight ranks.
MESHES: list[Sizes] = [ONE, REPLICAS, (1, 3, 1), TP, (2, 2, 1), (1, 2, 2), (2, 2, 2)]

# Neighbours of a shard group that divide the positions of their rows: 2, 4, and 2 with tp.
CP, CP_4, CP_TP, CP_DP = (1, 2, 1, 2), (1, 4, 1, 4), (1, 2, 2, 2), (1, 4, 1, 2)
WINDOW = {"data.document_mask": "ignore", "model.sliding_window": 5, "model.dropout": 0.1}
ALL_NORMED = {"model.qk_norm": "all_heads", "model.qkv_bias": True, CHECKPOINTING: "selective"}
FEATURES["divided positions"] = Feature(CP, TP, WINDOW | {CHECKPOINTING: "full"})
UNEVEN = WINDOW | {"data.seq_len": 13, "probe.every": 2}
SOAK["divided positions with padding"] = Feature(
    CP_4, CP, UNEVEN, replace(probe.app, probe=run_model)
)
FEATURES["positions and heads divided"] = Feature(SHARDS, CP_TP, ALL_NORMED)
DIVIDED = (
    "dropout", "document masks", "stages edited", "muon", "several tokens", "conversations",
    "files of tokens", "pairs", "pairs without a reference", "a teacher", "a speedrun", "adapters",
    "adapters on pairs", "a probe that runs the model", "a curriculum", "compiled",
    "a model that is partly frozen", "compiled, keeping all", "products in float8",
    "rows made by code", "row and column statistics",
)  # fmt: skip
for name, sizes in zip(DIVIDED, cycle([(CP, CP_TP), (CP_4, CP_DP), (CP_TP, CP)])):
    stopped, resumed = sizes
    without_noise = {"lora.dropout": 0, "optim.epsilon": 1e-5}  # of whole rows, and refused
    long_rows = {"data.seq_len": 32} if "float8" in name else {}  # of 16 positions a rank
    keys = SOAK[name].settings | (without_noise if "adapters" in name else long_rows)
    divided = replace(SOAK[name], stopped=stopped, resumed=resumed, settings=keys)
    SOAK[f"{name}, divided positions"] = divided
SOAK["divided in chains"] = Feature((2, 2, 1, 2), CP_4, WINDOW)


def pair(saved: Sizes, loaded: Sizes, muon: bool, tied: bool) -> Feature:
    name = "muon" if muon else "adamw"
    settings = {"optim.name": name, "optim.muon.dtype": "fp32", "model.weight_tying": tied}
    return Feature(saved, loaded, settings)


# (saved, loaded, muon, tied): together of every kind, and the mixes that are in no other pair.
DEFAULT = [((1, 3, 1), (1, 2, 2), True, True), ((1, 2, 2), (1, 3, 1), False, False)]
DEFAULT += [((2, 2, 1), TP, True, False), ((2, 1, 2), ONE, False, True)]
# Of every two of the seven meshes one goes on from the other: from the second to the first, or from
# the first to the second, it is 1, 2 or 4 steps around the circle of them. Each saves and loads
# both optimizers, tied weights and others.
AROUND = [(mesh, MESHES[i:] + MESHES[:i]) for i, mesh in enumerate(MESHES)]
PAIRS = [(a, after[n], n == 2, n == 4) for a, after in AROUND for n in (1, 2, 4)]
PAIRS.append(((3, 1, 2), SHARDS, True, True))
FEATURES |= {f"{name_of(a)} to {name_of(b)}": pair(a, b, *how) for a, b, *how in DEFAULT}
SOAK |= {f"{name_of(a)} to {name_of(b)}": pair(a, b, *how) for a, b, *how in PAIRS}


# How far, relative, two runs that are the same one may be from each other.
TOLERANCES = {"rows": 0, "lr": 0, "restored": 0, "loss": 1e-5, "grad_norm": 1e-5, "weights": 1e-5}
TOLERANCES |= {"measured": 1e-4}
MEASURED = {"nats_per_token", "loss", "accuracy", "margin", "balance", "norms", "rms", "agreement"}


def measured(run: Outcome) -> torch.Tensor:
    """All that a run measures: losses, also held-out, and the numbers of its app, in order."""
    lines = [line for line in (*run.lines, *run.events, *run.held_out) if line.keys() & MEASURED]
    numbers = [line[key] for line in lines for key in sorted(line.keys() & MEASURED)]
    flat = [n.values() if isinstance(n, dict) else [n] for n in numbers]
    return torch.tensor([number for part in flat for number in part])


def differences(run: Outcome, alone: Outcome, saved: dict[str, Any]) -> dict[str, float]:
    """Of a resumed run from the one that never stopped, named as in TOLERANCES. `saved`: digests of
    the checkpoint that was resumed, and its progress."""
    weights = [{n: t for n, t in r.tensors(END).items() if "model." in n} for r in (run, alone)]
    assert weights[0].keys() == weights[1].keys() and len(run.lines) == END
    apart = [float((weights[0][n] - t).norm() / t.norm()) for n, t in weights[1].items()]
    numbers, expected = measured(run), measured(alone)
    return {
        "rows": run.column("batch_hash") != alone.column("batch_hash"),
        "lr": run.column("lr") != alone.column("lr"),
        "restored": any(run.restored[part] != content for part, content in saved.items()),
        "loss": max(relative(run.column("loss"), alone.column("loss"))),
        "grad_norm": max(relative(run.column("grad_norm"), alone.column("grad_norm"))),
        "weights": max(apart),
        "measured": float(((numbers - expected) / expected.abs().clamp(min=0.1)).abs().max()),
    }


def beyond(apart: dict[str, float], margin: float) -> set[str]:
    """What differs by more than `margin` times its tolerance."""
    return {name for name, value in apart.items() if value > margin * TOLERANCES[name]}


def case(name: str, feature: Feature, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(feature, id=name, marks=marks)


@pytest.fixture(scope="module")
def once(runs):
    """`runs.train` of a mesh, settings and app, of which several features need the same run."""
    made: dict[str, Outcome] = {}

    def train(sizes: Sizes, settings: dict[str, Any], app: App) -> Outcome:
        key = repr((sizes, sorted(settings.items()), app))
        if key not in made:
            made[key] = runs.train(sizes, settings, app=app)
        return made[key]

    return train


@pytest.mark.parametrize(
    "feature",
    [case(name, feature) for name, feature in FEATURES.items()]
    + [case(f"{name}, soak", f, pytest.mark.soak) for name, f in SOAK.items()],
)
def test_a_run_resumed_on_another_mesh_is_that_of_one_process(
    runs, once, tmp_path, request, feature
):
    settings = {"stop_at": END, "validation.every": END} | feature.settings
    if feature.reads:
        settings |= request.getfixturevalue(feature.reads)
    first = settings | on_its_own(feature.stopped) | {"stop_at": K}
    stopped = once(feature.stopped, first, feature.app)
    settings |= feature.edited
    alone = once(ONE, settings, feature.app)
    assert stopped.weights == alone.weights
    state = stopped.state(K)
    assert state["schedule"] == {"step": K, "lr": alone.lines[K]["lr"]}
    assert state["progress"]["position"] == K * GLOBAL_BATCH
    saved = {"tensors": digests(stopped.tensors(K)), "progress": state["progress"]}

    def resume(name: str, sizes: Sizes, twist: Twist, other: Any, build: Build | None) -> Any:
        """Go on from a copy; how far it is then from the run of one process."""
        copy = stopped.copy(tmp_path / name).dump_dir
        start = {"app": feature.app, "build": build, "twist": twist, "look": True}
        keys = settings | on_its_own(sizes) | other
        run = runs.train(sizes, keys, dump_dir=copy, **start)
        assert all(bool(rank["compiled"]) == keys.get(COMPILE, False) for rank in run.ranks)
        moved = [(line["old"], line["new"]) for line in run.events if line["event"] == "topology"]
        assert moved == [(list(feature.stopped), list(sizes))][: sizes != feature.stopped]
        return differences(run, alone, saved)

    right = resume("right", feature.resumed, Twist(), feature.other, feature.build)
    assert beyond(right, margin=feature.rounding) == set(), right
    for name in feature.faults:
        fault = FAULTS[name]
        found = beyond(resume(name, fault.sizes, fault.twist, {}, None), margin=10)
        assert fault.seen <= found, name
        assert found & {"rows", "restored"} == fault.seen & {"rows", "restored"}, name


@on_meshes((1, 2, 2), soak=MESHES[:-1])
def test_the_same_mesh_goes_on_bitwise_with_deterministic(runs, sizes):
    i = MESHES.index(sizes)
    settings = pair(sizes, sizes, i % 2 == 1, i % 3 == 1).settings
    settings |= {"deterministic": True, "stop_at": END, "checkpoint.dump.keep": 0}
    through = runs.train(sizes, settings)
    stopped = runs.train(sizes, settings | {"stop_at": K})
    run = runs.train(sizes, settings, dump_dir=stopped.dump_dir)
    for key in ("loss", "grad_norm", "lr", "batch_hash"):
        assert run.column(key) == through.column(key)
    assert digests(run.tensors(END)) == digests(through.tensors(END))
