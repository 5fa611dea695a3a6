"""`distributed.check_every`: a rank that computes wrongly is named, and a run without one is the
same run."""

import json
import os
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from apps.main import app as main
from apps.main.train import Objective
from lingua.app import App
from lingua.data.loader import MicroBatch
from lingua.model import Losses
from lingua.parallel.tensors import local
from lingua.run.run import Run
from lingua.tools.elastic.recheck import outvoted
from tests.apps.meshes import Sizes, name_of
from tests.apps.runs import SMALL
from tests.apps.test_exact import EXACT, ONE, SOAK, results
from tests.apps.test_matrix import SOAK as FEATURES
from tests.apps.test_matrix import Feature
from tests.programs import python
from tests.ranks import free_port

# Seven grains: three micro-steps on three ranks, of which the k-th comparison takes k modulo 3.
CHECKED = EXACT | {"data.batch_size": 1, "distributed.check_every": 2}
THREE: Sizes = (1, 3, 1)


def flip(t: Tensor, bit: int = 0) -> None:
    """Change a bit of the largest element of float32 [n]: 0 is its last."""
    t.view(torch.int32)[t.abs().argmax()] ^= 1 << bit


@dataclass
class Fault:
    """What is wrong with the gradients of a rank."""

    rank: int
    step: int | None = None  # None: always
    micro_step: int | None = None  # of its own grains; None: of any that it computes
    scale: float = 1.0  # of the loss, and so of the gradient
    bit: int | None = None  # this bit of an element of the gradient of a grain, 0: the last
    sum: bool = False  # one bit of the sum over all grains
    weights: bool = False  # one bit of what it holds of the weights

    def app(self) -> App:
        return replace(main, objective=partial(Faulty, self))


class Faulty(Objective):
    def __init__(self, fault: Fault, run: Run) -> None:
        super().__init__(run)
        self.fault = fault
        self.is_faulty = os.environ["RANK"] == str(fault.rank)

    def is_due(self) -> bool:
        return self.is_faulty and self.fault.step in (None, self.run.progress.step + 1)

    def loss(self, micro: MicroBatch) -> Losses:
        losses = super().loss(micro)
        return losses._replace(sums=losses.sums * self.fault.scale) if self.is_due() else losses

    def gradients(self, batch: list[MicroBatch], counts: Tensor) -> tuple[Tensor, Tensor]:
        sums, recheck, fault = self.run.model.gradient_sums, self.run.recheck, self.fault
        parameter = self.run.model.layers[0].attention.wo.weight  # that every row uses
        observe: Callable[[Tensor], bool] = sums.observe
        if self.is_due() and fault.weights:
            flip(local(parameter.data).view(-1), bit=12)

        def spoil(grads: Tensor) -> bool:
            if not recheck.only_hash and sums.micro_step == fault.micro_step:
                flip(grads, bit=fault.bit)
                sums.observe = observe
            return observe(grads)

        if self.is_due() and fault.bit is not None:
            sums.observe = spoil
        result = super().gradients(batch, counts)
        sums.observe = observe
        if self.is_due() and fault.sum:
            flip(local(parameter.grad).view(-1), bit=12)
        return result


def hosts(run: Any) -> list[dict[str, Any]]:
    path = run.dump_dir / "wrong_hosts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


COMPARED = ("document masks", "several tokens", "pairs", "compiled", "tied", "one grain")
COMPARED += ("a model that is partly frozen",)
OTHERS = {"padding": {"data.batch_size": 4}, "probe": {}}


@pytest.mark.parametrize(
    ("name", "settings", "sizes"),
    [
        pytest.param("muon", {"distributed.reshard": "step"}, THREE, id="muon"),
        pytest.param("plain", {}, ONE, id="one rank", marks=pytest.mark.soak),
    ]
    + [
        pytest.param(*case, mesh, id=f"{case[0]} on {name_of(mesh)}", marks=pytest.mark.soak)
        for case, mesh in zip(
            ({name: SOAK[name] for name in COMPARED} | OTHERS).items(),
            cycle(((2, 1, 1), (2, 2, 1), THREE)),
            strict=False,
        )
    ],
)
def test_a_run_that_is_compared_is_the_same_run(runs, request, name, settings, sizes):
    """Each step of the second one is compared."""
    feature = FEATURES.get(name, Feature(ONE, sizes))
    settings = EXACT | {"data.batch_size": 1} | feature.settings | settings
    settings |= request.getfixturevalue(feature.reads) if feature.reads else {}
    plain, compared = (
        runs.train(sizes, settings | {"distributed.check_every": every}, app=feature.app)
        for every in ("null", 1)
    )
    assert results(compared) == results(plain) and not hosts(compared)
    assert ("no other rank to compare with" in compared.log) == (sizes == ONE)


CAUGHT = {
    "a bit, once": (Fault(0, step=4, micro_step=2, bit=0), THREE, 4),
    "a scale": (Fault(2, scale=1 + 1e-6), THREE, 2),
    "weights of a replica": (Fault(0, step=3, weights=True), (3, 1, 1), 4),
}


def cases(faults: dict[str, Any], default: str = "") -> list[Any]:
    """Parameters of a test; those that are not the default are soak tests."""
    values = {name: case if isinstance(case, tuple) else (case,) for name, case in faults.items()}
    marks = {name: () if name == default else (pytest.mark.soak,) for name in faults}
    return [pytest.param(*v, id=name, marks=marks[name]) for name, v in values.items()]


@pytest.mark.parametrize(("fault", "sizes", "step"), cases(CAUGHT, "a bit, once"))
def test_a_rank_that_computes_wrongly_is_named_and_nothing_is_saved(runs, fault, sizes, step):
    settings = CHECKED | {"checkpoint.dump.every": 1}
    run = runs.train(sizes, settings, app=fault.app(), refused=True)
    here = f"rank {fault.rank} on {socket.gethostname()}"
    assert f"step {step}: {here}: other gradients than two ranks" in run.error
    [line] = hosts(run)
    expected = {"host": socket.gethostname(), "rank": fault.rank, "step": step}
    assert {key: line[key] for key in expected} == expected and {"created_at", "why"} < line.keys()
    assert len(run.lines) == step - 1
    assert run.checkpoint(step - 1).exists() and not run.checkpoint(step).exists()


NOT_DECIDED = {
    "two ranks": (Fault(1, scale=1 + 1e-6), (1, 2, 1), {0, 1}),
    "two replicas": (Fault(1, step=1, weights=True), (2, 2, 1), {0, 1, 2, 3}),
}


@pytest.mark.parametrize(
    ("fault", "sizes", "suspects"), NOT_DECIDED.values(), ids=list(NOT_DECIDED)
)
def test_where_no_majority_agrees_all_are_named_and_no_host_is_written(
    runs, fault, sizes, suspects
):
    run = runs.train(sizes, CHECKED, app=fault.app(), refused=True)
    assert all(f"rank {rank} on {socket.gethostname()}" in run.error for rank in suspects)
    assert "No host is written" in run.error and not hosts(run)


NOT_SEEN = {
    "a bit in a step that is not due": Fault(0, step=3, micro_step=2, bit=12),
    "a bit in another micro-step": Fault(0, step=4, micro_step=0, bit=12),
    "a sum": Fault(1, step=2, sum=True),
    "a shard of the weights, which all ranks gather": Fault(1, step=3, weights=True),
}


@pytest.fixture(scope="module")
def correct(runs):
    return results(runs.train(THREE, CHECKED))


@pytest.mark.parametrize("fault", cases(NOT_SEEN))
def test_what_is_not_seen_changes_the_run_which_an_audit_would_find(runs, correct, fault):
    run = runs.train(THREE, CHECKED, app=fault.app())
    assert results(run)["tensors"] != correct["tensors"] and not hosts(run)


@pytest.mark.soak
def test_no_false_alarm_in_2000_grains(runs):
    settings = CHECKED | {"model.dim": 12, "model.n_layers": 1, "model.n_heads": 2}
    settings |= {"distributed.check_every": 1, "validation.every": 0, "logging.freq": 100}
    settings |= {"data.global_batch_size": 2, "steps": 1000, "stop_at": 1000}
    run = runs.train((1, 2, 1), settings)
    assert run.lines[-1]["step"] == 1000 and not hosts(run)


@pytest.mark.soak
def test_every_rank_leaves_with_code_3_and_one_says_why(runs):
    keys = SMALL | runs.config(THREE, CHECKED | {"dump_dir": runs.folder / "left"})
    words = [f"app={__name__}", *(f"{key}={value}" for key, value in keys.items())]
    command = [*python(), "-m", "apps.main.train", *words]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [3, 3, 3], errors
    assert "error: distributed.check_every: step 2: rank 1 on " in errors[0]
    assert "error" not in errors[1] + errors[2] and "Traceback" not in "".join(errors)


app = replace(Fault(1, scale=1 + 1e-6).app(), path=__name__)  # of that test


def test_the_rank_is_named_that_two_others_contradict():
    ring = [0, 2, 1, 3, 4]

    def votes(**wrong: str) -> list[list[str]]:
        """By rank, of its own grain, of the next one's, and of the one after."""
        after = {r: [ring[(p + d) % len(ring)] for d in range(3)] for p, r in enumerate(ring)}
        of_rank = [[f"{g}{wrong.get(f'r{r}', '')}" for g in after[r]] for r in range(len(ring))]
        return [list(column) for column in zip(*of_rank, strict=True)]

    assert outvoted(ring, votes()) == (set(), set())
    for rank in ring:
        named, suspects = outvoted(ring, votes(**{f"r{rank}": "x"}))
        assert named == {rank} and suspects == set(ring)
    assert outvoted(ring, votes(r0="x", r1="y"))[0] == {0, 1}
    assert outvoted(ring, votes(r0="x", r1="y", r2="z")) == ({0, 1}, set(ring))  # 2 had no majority
    once = votes()
    once[0][1] = "other"
    assert outvoted(ring, once) == ({1}, {1, 2, 0})
    assert outvoted([0, 1], [["a", "c"], ["b", "a"], ["a", "c"]]) == (set(), {0, 1})
