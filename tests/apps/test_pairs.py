"""What one topology saves another goes on from: every pair of seven of them, with both optimizers,
tied weights and not. The state is what was saved to the bit, and the run is the run that one
process makes without a stop."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.apps.meshes import Sizes, name_of, on_its_own
from tests.apps.runs import Outcome, Runs, Twist, differs, digests

K, END = 3, 6  # where the run is saved, and where it ends

# One process, then replicated, sharded, tensor-parallel, and their mixes up to eight ranks.
MESHES: list[Sizes] = [
    (1, 1, 1), (2, 1, 1), (1, 3, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 2, 2),
]  # fmt: skip
EIGHT: Sizes = (2, 2, 2)


@dataclass(frozen=True)
class Kind:
    """What is trained: every topology saves both optimizers, every one loads all four kinds."""

    optimizer: str
    tied: bool

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "optim.name": self.optimizer,
            "optim.muon.dtype": "fp32",  # in bf16 rounding may decide
            "model.weight_tying": self.tied,
            "stop_at": END,
            "checkpoint.dump.every": K,
            "checkpoint.dump.keep": 0,
        }


def kind_of(saved: Sizes, loaded: Sizes) -> Kind:
    i, j = MESHES.index(saved), MESHES.index(loaded)
    return Kind(("adamw", "muon")[(i // 2 + j) % 2], tied=i % 2 == 1)


# Four of them each save and resume a run, together of every kind; the other pairs are for soak.
DEFAULT: list[tuple[Sizes, Sizes]] = [
    ((1, 3, 1), (1, 2, 2)),
    ((1, 2, 2), (1, 3, 1)),
    ((2, 2, 1), (1, 1, 2)),
    ((1, 1, 2), (1, 1, 1)),
]
PAIRS = [(saved, loaded) for loaded in MESHES for saved in MESHES if saved != loaded]
PAIRS = [pair for pair in PAIRS if pair[1] != EIGHT or pair[0] in MESHES[:4]]  # for time


def case(saved: Sizes, loaded: Sizes) -> Any:
    marks = () if (saved, loaded) in DEFAULT else pytest.mark.soak
    return pytest.param(saved, loaded, id=f"{name_of(saved)}-to-{name_of(loaded)}", marks=marks)


@dataclass
class Whole:
    """Runs that did not stop before END, each made when it is first asked for."""

    runs: Runs
    made: dict[tuple[Sizes, Kind], Outcome]

    def __call__(self, sizes: Sizes, kind: Kind) -> Outcome:
        if (sizes, kind) not in self.made:
            settings = kind.settings | {"deterministic": True}
            if sizes == EIGHT:  # slow on two cores, and needed no further
                settings |= {"stop_at": K}
            self.made[sizes, kind] = self.runs.train(sizes, settings)
        return self.made[sizes, kind]


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Whole:
    return Whole(runs, {})


def stopped(run: Outcome, folder: Path) -> Outcome:
    """A copy of a run as it was when it had just saved step K."""
    copy = run.copy(folder / "run")
    shutil.rmtree(copy.checkpoint(END), ignore_errors=True)
    return copy


def resume(
    runs: Runs, sizes: Sizes, run: Outcome, settings: dict[str, Any], twist: Twist | None = None
) -> dict[str, Any]:
    """Go on to END; the state before the first step."""
    return runs.train(sizes, settings, dump_dir=run.dump_dir, twist=twist, look=True).restored


@pytest.mark.parametrize(("saved", "loaded"), [case(*pair) for pair in PAIRS])
def test_what_one_topology_saves_another_goes_on_from(runs, whole, tmp_path, saved, loaded):
    kind = kind_of(saved, loaded)
    run = stopped(whole(saved, kind), tmp_path)
    tensors = run.tensors(K)
    assert all(t.any() for name, t in tensors.items() if name.startswith(("optim.exp", "optim.m")))
    restored = resume(runs, loaded, run, kind.settings | on_its_own(loaded))
    assert restored["tensors"] == digests(tensors)
    assert restored["progress"] == run.state(K)["progress"]
    assert restored["progress"]["position"] == K * 7
    assert run.column("step") == list(range(1, END + 1))
    assert run.state(K)["schedule"] == {"step": K, "lr": run.lines[K]["lr"]}
    moved = [line for line in run.events if line["event"] == "topology"]
    assert [(line["old"], line["new"]) for line in moved] == [(list(saved), list(loaded))]
    assert differs(run, whole((1, 1, 1), kind)) == []


def bitwise_case(sizes: Sizes) -> Any:
    marks = () if sizes == (1, 2, 2) else pytest.mark.soak
    return pytest.param(sizes, id=name_of(sizes), marks=marks)


@pytest.mark.parametrize("sizes", [bitwise_case(sizes) for sizes in MESHES if sizes != EIGHT])
def test_the_same_topology_goes_on_bitwise_with_deterministic(runs, whole, tmp_path, sizes):
    kind = kind_of(sizes, MESHES[MESHES.index(sizes) - 1])  # a run that is made above
    through = whole(sizes, kind)
    run = stopped(through, tmp_path)
    tensors = run.tensors(K)
    restored = resume(runs, sizes, run, kind.settings | {"deterministic": True})
    assert restored["tensors"] == digests(tensors)
    for key in ("loss", "grad_norm", "lr", "batch_hash"):
        assert run.column(key) == through.column(key)
    assert digests(run.tensors(END)) == digests(through.tensors(END))


@pytest.mark.parametrize(("optimizer", "saved"), [("adamw", (1, 2, 2)), ("muon", (1, 1, 2))])
@pytest.mark.parametrize(
    "twist", [Twist(lose_moments=True), Twist(shift=1)], ids=["moments", "rows"]
)
def test_lost_moments_and_shifted_rows_are_seen(runs, whole, tmp_path, optimizer, saved, twist):
    kind = Kind(optimizer, tied=True)
    run = stopped(whole(saved, kind), tmp_path)
    tensors = run.tensors(K)
    restored = resume(runs, (1, 1, 1), run, kind.settings, twist)
    assert (restored["tensors"] == digests(tensors)) == (not twist.lose_moments)
    seen = differs(run, whole((1, 1, 1), kind), margin=10)
    assert "loss" in seen and ("batch_hash" in seen) == bool(twist.shift)
