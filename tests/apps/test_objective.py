"""What an objective is given: the step of its rows, held-out text, and divisors that are no whole
numbers."""

import json
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from apps.main import app as main
from apps.main.train import Objective
from lingua.base.errors import UserError
from lingua.data.loader import MicroBatch, agree
from lingua.model import Losses
from lingua.parallel.args import DistributedArgs
from lingua.parallel.launch import detect_launch, start
from tests.apps.meshes import Sizes
from tests.forks.curriculum import Curriculum, app

SIZES: Sizes = (1, 2, 1)
SETTINGS = {"data.batch_size": 4, "validation.every": 2}  # a micro-step of each rank


class Recorded(Curriculum):
    """Writes what each function of rank 0 was given."""

    def note(self, name: str, micro: MicroBatch) -> None:
        if os.environ["RANK"] == "0":
            with (self.run.args.folder / "seen.jsonl").open("a") as f:
                print(json.dumps([name, micro.step, micro.held_out]), file=f)

    def count(self, micro: MicroBatch) -> torch.Tensor:
        self.note("count", micro)
        return super().count(micro)

    def loss(self, micro: MicroBatch) -> Losses:
        assert micro.fields["weights"].shape[0] == len(micro.row_ids)
        self.note("loss", micro)
        return super().loss(micro)


def test_rows_have_the_step_that_trains_on_them_also_the_first_ones_of_a_start(runs):
    recorded = replace(app, objective=Recorded)
    run = runs.train(SIZES, SETTINGS | {"stop_at": 2}, app=recorded)
    runs.train(SIZES, SETTINGS | {"stop_at": 5}, app=recorded, dump_dir=run.dump_dir)
    lines = [json.loads(line) for line in (run.dump_dir / "seen.jsonl").read_text().splitlines()]
    counted = [step for name, step, _ in lines if name == "count"]
    assert [*dict.fromkeys(counted)] == [1, 2, 3, 4, 5] and counted == sorted(counted)
    assert [line[1:] for line in lines if line[0] == "loss"] == [
        [0, True], [1, False], [2, False], [2, True], [2, True],  # before the first step, after two
        [2, True], [3, False], [4, False], [4, True], [4, True], [5, False],
    ]  # fmt: skip


class Unmeasurable(Objective):
    def loss(self, micro: MicroBatch) -> Losses:
        if micro.held_out:
            raise UserError("what is held out has no weights")
        return super().loss(micro)


class HalfCounts(Objective):
    def count(self, micro: MicroBatch) -> torch.Tensor:
        return super().count(micro).float()


def test_a_loss_that_fails_on_held_out_text_does_so_before_the_first_step(runs):
    broken = replace(main, objective=Unmeasurable)
    run = runs.train(SIZES, SETTINGS, app=broken, refused=True)
    assert run.error == "what is held out has no weights" and not run.lines
    never = {"validation.every": 0, "stop_at": 2}
    assert runs.train(SIZES, SETTINGS | never, app=broken).column("step") == [1, 2]
    error = runs.train(SIZES, SETTINGS, app=replace(main, objective=HalfCounts), refused=True).error
    assert "HalfCounts.count: float32 [1] on cpu; must be int64 or float64 [any]" in error


def agree_on_tenths(n: int) -> torch.Tensor:
    """What ranks agree on that have counted 0.1 for each of n rows, in micro-batches of one row."""
    mesh = start(torch.device("cpu"), detect_launch(), DistributedArgs())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ids = [torch.tensor([i]) for i in range(n) if i % ranks == rank]
    batch = [MicroBatch(i, i, i) for i in ids]
    counts = lambda micro: torch.tensor([0.1, 1e6 / 3], dtype=torch.float64)  # noqa: E731
    return agree(batch, counts, mesh, False, False).wait().counts


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_fractional_counts_are_added_up_exactly(ranks, n_ranks):
    for counts in ranks.run(n_ranks, agree_on_tenths, 600):
        assert torch.equal(counts, torch.tensor([60.0, 2e8]))


def agree_on_nothing(case: str) -> str:
    """What ranks say of counts of which those of rank 1 are of another kind."""
    mesh = start(torch.device("cpu"), detect_launch(), DistributedArgs())
    odd = {"int64": torch.tensor([3]), "nan": torch.tensor([torch.nan], dtype=torch.float64)}
    odd["2^32"] = torch.tensor([2.0**31], dtype=torch.float64)
    counts = odd[case] if dist.get_rank() else torch.tensor([0.5], dtype=torch.float64)
    ids = torch.zeros(1, dtype=torch.int64)
    try:
        agree([MicroBatch(ids, ids, ids)], lambda micro: counts, mesh, False, False).wait()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", ["int64", "nan", "2^32"])
def test_counts_that_cannot_be_added_up_are_refused_on_all_ranks(ranks, case):
    errors = ranks.run(2, agree_on_nothing, case)
    assert errors[0] == errors[1] and "must be all int64, or all float64, finite and" in errors[0]
