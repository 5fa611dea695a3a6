"""`deterministic: mesh`: the same run to the last bit on every data-parallel mesh, and over stops.

A step has 7 rows: in grains of 2 more than some meshes have ranks, in grains of 1 more than all,
and in one grain of 7 fewer than all. One run has steps of both kinds on each mesh.
"""

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from apps.main import app as main
from apps.main.train import Objective
from lingua.app import App
from lingua.base.errors import UserError
from lingua.checkpoint.digest import digest
from lingua.data.loader import MicroBatch
from lingua.parallel.args import DistributedArgs
from lingua.parallel.exact import GradientSums, check_ranks, exact_norm
from lingua.parallel.gradients import set_gradient_sync
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.parallelize import parallelize_model
from lingua.parallel.plan import ParallelPlan
from lingua.parallel.tensors import local, whole
from tests.apps.meshes import Sizes, name_of, on_meshes
from tests.apps.runs import SMALL, Outcome, Twist, digests
from tests.apps.test_matrix import SOAK as FEATURES
from tests.apps.test_matrix import Feature
from tests.ranks import free_port

NATIVE = torch.backends.cpu.get_cpu_capability()
END = 4
ONE: Sizes = (1, 1, 1)
MESHES: tuple[Sizes, ...] = ((1, 2, 1), (2, 1, 1), (1, 3, 1), (2, 2, 1), (1, 5, 1))
EXACT = {"deterministic": "mesh", "stop_at": END, "validation.every": 2, "data.batch_size": 2}
TIMES = {"step_time_s", "data_time_s", "tokens_per_s", "tokens_per_s_per_device", "created_at"}
TIMES |= {"host_time_s", "slowest_rank", "slowest_ratio", "peak_mem_gib", "start_number"}
BF16 = {"distributed.model_dtype": "bf16"}
NOISE = {"model.dropout": 0.1}
# Features of test_matrix.py, or of this file, with settings more than there.
DEFAULT: dict[str, tuple[dict[str, Any], Sizes]] = {
    "document masks": (NOISE, (2, 1, 1)),
    "muon": (BF16, (1, 3, 1)),
    "an optimizer of torch": ({}, (2, 2, 1)),
    "pairs": (BF16, (1, 5, 1)),
}
SOAK: dict[str, dict[str, Any]] = {name: settings for name, (settings, _) in DEFAULT.items()} | {
    "recurrences": NOISE,
    "state spaces": BF16,
    "several tokens": {},
    "conversations": {},
    "blocks that run twice": {},
    "Kronecker factors": {},
    "a curriculum": {},
    "changes of a frozen model": NOISE,
    "a model that is partly frozen": BF16,
    "compiled": {"distributed.compile": True},
    "tied": {"model.weight_tying": True} | BF16,
    "grains of a row": {"data.batch_size": 1},
    "one grain": {"data.batch_size": 7},
    "adapters": BF16,
}


def results(run: Outcome) -> dict[str, Any]:
    """Everything that must be equal to the bit."""
    lines = [*run.lines, *run.held_out, *run.samples]
    kept = [{key: value for key, value in line.items() if key not in TIMES} for line in lines]
    path = run.dump_dir / "reference.json"  # of pairs
    reference = path.read_text() if path.exists() else ""
    return {"lines": kept, "reference": reference, "tensors": digests(run.tensors(END))}


class FlippedBit(Objective):
    """Changes the last bit of an element of a gradient on one rank."""

    def gradients(self, batch: list[MicroBatch], counts: Tensor) -> tuple[Tensor, Tensor]:
        result = super().gradients(batch, counts)
        if self.run.progress.step == 1 and os.environ["RANK"] == "0":
            grad = local(next(self.run.model.parameters()).grad).view(-1)
            grad.view(torch.int32)[grad.abs().argmax()] ^= 1
        return result


def build_fused(model: nn.Module, args: Any, plan: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


@pytest.fixture(scope="module")
def alone(runs, request):
    """(the results of a feature in one process, its settings in all runs), by its name."""
    made: dict[str, Any] = {}

    def make(name: str, feature: Feature, settings: dict[str, Any]) -> Any:
        if name not in made:
            settings = EXACT | feature.settings | settings
            settings |= request.getfixturevalue(feature.reads) if feature.reads else {}
            made[name] = results(runs.train(ONE, settings, app=feature.app)), settings
        return made[name]

    return make


@pytest.mark.parametrize(
    ("name", "settings", "sizes"),
    [pytest.param(name, *case, id=name) for name, case in DEFAULT.items()]
    + [
        pytest.param(*case, mesh, id=f"{case[0]} on {name_of(mesh)}", marks=pytest.mark.soak)
        for i, case in enumerate(SOAK.items())
        for mesh in islice(cycle(MESHES), 3 * i + 1, 3 * i + 3)
    ],
)
def test_a_run_is_equal_to_the_bit_on_every_mesh(runs, alone, name, settings, sizes):
    feature = FEATURES.get(name, Feature(ONE, sizes))
    expected, settings = alone(name, feature, settings)
    assert results(runs.train(sizes, settings, app=feature.app)) == expected


def test_stops_on_other_meshes_change_no_bit_and_faults_change_some(runs, tmp_path):
    alone = runs.train(ONE, EXACT)
    run = runs.train((1, 2, 1), EXACT | {"stop_at": 1})
    for end, sizes in ((2, (2, 2, 1)), (4, (1, 3, 1))):
        run = runs.train(sizes, EXACT | {"stop_at": end}, dump_dir=run.dump_dir)
    assert results(run) == results(alone)

    for fault in ({"twist": Twist(shift=1)}, {"app": replace(main, objective=FlippedBit)}):
        other = results(runs.train((1, 2, 1), EXACT, **fault))
        assert other["tensors"] != results(alone)["tensors"], fault
    in_float = [runs.train(sizes, EXACT | {"deterministic": True}) for sizes in (ONE, (1, 2, 1))]
    assert results(in_float[0])["tensors"] != results(in_float[1])["tensors"]
    copy = alone.copy(tmp_path / "copy").dump_dir
    more = EXACT | {"stop_at": END + 1}
    for key in ("data.batch_size", "distributed.threads"):
        error = runs.train(ONE, more | {key: 3}, dump_dir=copy, refused=True).error
        assert key in error and "checkpoint.allow_change" in error


@on_meshes((1, 3, 1), soak=MESHES)
def test_steps_of_a_run_may_have_more_grains_than_ranks_and_fewer(runs, sizes):
    """Steps 1 and 2 have 7 grains, more than any mesh has ranks; 3 and 4 have one, fewer."""
    more = EXACT | {"data.batch_size": 1, "stop_at": 2}
    fewer = more | {"data.global_batch_size": 1, "stop_at": END}
    fewer |= {"checkpoint.allow_change": "[data.global_batch_size]"}

    def result(sizes: Sizes) -> dict[str, Any]:
        run = runs.train(sizes, more)
        return results(runs.train(sizes, fewer, dump_dir=run.dump_dir))

    assert result(sizes) == result(ONE)


def test_a_step_that_is_skipped_for_its_targets_changes_no_bit(runs):
    settings, twist = EXACT | {"data.on_no_targets": "skip"}, Twist(without_targets=2)
    alone, run = (runs.train(sizes, settings, twist=twist) for sizes in (ONE, (1, 3, 1)))
    assert results(run) == results(alone) and run.column("skipped_steps") == [0, 1, 1, 1]


def test_what_cannot_be_exact_is_refused_by_name(runs):
    """Keys that exclude each other: tests/mistakes.txt."""

    def message(settings: dict[str, Any], sizes: Sizes = ONE, app: App = main) -> str | None:
        return runs.train(sizes, EXACT | settings, app=app, refused=True).error

    fused = replace(main, optimizer=build_fused)
    assert "fused=True" in message({}, app=fused)
    assert "grad_acc_steps = 3: must be 4" in message({"grad_acc_steps": 3})


def test_ranks_that_are_not_alike_are_refused_on_all_of_them():
    def messages(*threads: int) -> list[str]:
        store, n = dist.HashStore(), len(threads)

        def check(rank: int) -> str:
            try:
                check_ranks(store, rank, n, device="cpu", threads=threads[rank])
            except UserError as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(n) as pool:
            return list(pool.map(check, range(n)))

    assert messages(1, 1, 1) == ["", "", ""]
    [message] = set(messages(1, 2, 2))
    assert "threads: 1 on rank 0, 2 on rank 1" in message and "device" not in message


@pytest.mark.soak
@pytest.mark.skipif(NATIVE == "DEFAULT", reason="this CPU has one vector width")
def test_the_vector_width_is_refused_in_a_mix_announced_recorded_and_named_as_the_cause(runs):
    """In processes of their own, since torch chooses its kernels once."""

    def start(*words: str, width: str | None = None, **env: str) -> subprocess.Popen[str]:
        env |= {"ATEN_CPU_CAPABILITY": width} if width else {}
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([sys.executable, "-m", *words], env=os.environ | env, **pipes)

    def train(sizes: Sizes, folder: str, **settings: Any) -> list[str]:
        keys = SMALL | runs.config(sizes, EXACT | {"dump_dir": runs.folder / folder} | settings)
        return ["apps.main.train", *(f"{key}={value}" for key, value in keys.items())]

    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    mixed = [
        start(*train((1, 2, 1), "mixed"), width=width, RANK=str(i), LOCAL_RANK=str(i), **meeting)
        for i, width in enumerate(("default", None))
    ]
    words = train(ONE, "width", stop_at=2)
    narrow = start(*words, width="default")
    printed = [process.communicate()[0] for process in (*mixed, narrow)]
    assert [process.returncode for process in (*mixed, narrow)] == [2, 2, 0], printed
    assert "cpu with DEFAULT on rank 0" in printed[0] and f"{NATIVE} on rank 1" in printed[0]

    audit = start("lingua", "audit", str(runs.folder / "width"), "device=cpu")
    assert f"cpu_capability: DEFAULT recorded, {NATIVE} here" in audit.communicate()[0]
    run = runs.train(ONE, EXACT, dump_dir=runs.folder / "width")
    table = [line.split()[1:] for line in run.log.splitlines()]
    assert ["cpu_capability", "DEFAULT", NATIVE, "announced"] in table
    starts = [event for event in run.events if event["event"] == "start"]
    assert [event["cpu_capability"] for event in starts] == ["DEFAULT", NATIVE]
    assert results(run)["tensors"] != results(runs.train(ONE, EXACT))["tensors"]


# ---------------------------------------------------------------------------------- the sums


def sums_here(sizes: Sizes, grads: torch.Tensor) -> tuple[Any, ...]:
    """The gradient of a weight that is summed over grains [n, rows, columns], its norm, and the
    digest of it."""
    launch, args = detect_launch(), DistributedArgs(*sizes[:2], model_dtype="fp32")
    mesh = start(torch.device("cpu"), launch, args, "mesh")
    torch.use_deterministic_algorithms(False)
    model = nn.Linear(grads.shape[2], grads.shape[1], bias=False)
    parallelize_model(model, mesh, ParallelPlan(), args, exact=True)
    assert isinstance(model, FSDPModule)
    model.gradient_sums = GradientSums(model, mesh, len(grads), torch.float32)
    steps = range(0, len(grads), launch.world_size)
    for first in steps:
        set_gradient_sync(model, "every", first == steps[-1])
        i = first + launch.rank
        # The gradient of the weight for an identity as input is that of the output.
        out = model(torch.eye(grads.shape[2])).T
        grad = grads[i] if i < len(grads) else torch.full_like(grads[0], torch.nan)
        out.backward(grad)
    [p] = model.parameters()
    return whole(p.grad), exact_norm([p]), digest({"grad": p.grad.detach()})


def test_sums_have_the_precision_of_float64_and_no_order(ranks):
    generator = torch.Generator().manual_seed(1)
    exponents = torch.empty(7, 5, 11).uniform_(-12, 3, generator=generator)
    grads = 10**exponents * torch.randn(7, 5, 11, generator=generator).sign()
    grads[:, 4, 10] = torch.tensor([2.0**60, -(2.0**60), 1, 0, 0, 0, 0])  # 0 in another order
    terms = grads.flatten(1).T.tolist()
    exact = torch.tensor([math.fsum(row) for row in terms], dtype=torch.float64).view(5, 11)
    outcomes = {
        sizes: ranks.run(sizes[0] * sizes[1], sums_here, sizes, grads)
        for sizes in (ONE, (1, 2, 1), (2, 2, 1), (3, 1, 1))
    }
    expected, norm, hashed = outcomes[ONE][0]
    assert ((expected.double() - exact).abs() <= exact.abs() * 2.0**-24).all()
    assert float(norm) == pytest.approx(float(exact.norm()), rel=2**-23)
    assert all(
        torch.equal(grad, expected) and value == norm and text == hashed
        for outcome in outcomes.values()
        for grad, value, text in outcome
    )
    for bad in (torch.inf, torch.nan, 3e38):  # the last one overflows in the sum
        spoiled = grads.clone()
        spoiled[:3, 2, 2] = bad
        for sizes in (ONE, (1, 2, 1)):
            for _, value, _ in ranks.run(sizes[1], sums_here, sizes, spoiled):
                assert value == torch.inf
