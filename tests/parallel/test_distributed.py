"""Launch detection, mesh and ranks, what parallelism refuses, clipping, work on rank 0."""

import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from lingua.base.errors import UserError
from lingua.data.loader import MicroBatch, agree
from lingua.parallel.args import DistributedArgs, mesh_sizes
from lingua.parallel.launch import Launch, detect_launch, pick_device, start
from lingua.parallel.mesh import AXES, dp_degree, dp_rank, on_rank_0
from lingua.parallel.slurm import set_rendezvous
from tests.checkpoint.test_checkpoint_load import Evil

CPU = torch.device("cpu")


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "n[1-3]",
}


@pytest.mark.parametrize(
    ("env", "launch"),
    [
        ({"HOME": "/"}, Launch(0, 1, 0, 1, "python")),
        (TORCHRUN, Launch(5, 8, 1, 4, "torchrun")),
        (SLURM, Launch(9, 12, 1, 4, "slurm")),
        # torchrun inside a task of srun, one a node: its variables are the inner ones
        (SLURM | TORCHRUN, Launch(5, 8, 1, 4, "torchrun")),
        # plain Python in a batch script or an salloc shell: a job, but no step of it
        ({"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, Launch()),
    ],
    ids=["python", "torchrun", "slurm", "torchrun in slurm", "batch script"],
)
def test_a_process_finds_its_place(env, launch):
    assert detect_launch(env) == launch


def test_slurm_tasks_meet_at_their_first_host_on_a_port_of_their_step(tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        '"show hostnames n[1-3]") printf "n1\\nn2\\nn3\\n" ;;\n'
        '"show node --oneliner n1") echo "NodeName=n1 NodeAddr=10.0.0.7 Port=1" ;;\n'
        "*) exit 1 ;;\nesac\n"
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ports = set()
    for step in ("3", "4"):
        for key in ("MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(key, "")
            monkeypatch.delenv(key)
        set_rendezvous(SLURM | {"SLURM_STEP_ID": step})
        assert os.environ["MASTER_ADDR"] == "10.0.0.7"
        ports.add(int(os.environ["MASTER_PORT"]))
    assert len(ports) == 2 and all(1024 < port < 2**16 for port in ports)
    given = {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4000"}
    monkeypatch.setenv("PATH", "")  # without Slurm's commands
    set_rendezvous(SLURM | given)  # which the caller has set


def test_a_task_of_slurm_alone_needs_no_command_of_slurm(ranks, monkeypatch):
    assert ranks.run(1, start_alone) == [1]


def start_alone() -> int:
    launch = Launch(by="slurm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "")
        patch.delenv("MASTER_ADDR")
        return start(CPU, launch, DistributedArgs()).size()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the test asks for")
def test_a_device_that_is_not_there_is_refused_by_the_machine_that_lacks_it():
    assert pick_device("cpu", Launch()) == pick_device("auto", Launch()) == CPU
    with pytest.raises(UserError, match="device = cuda: torch finds no CUDA device") as raised:
        pick_device("cuda", Launch())
    assert raised.value.local


@pytest.mark.parametrize(
    ("by", "local_rank", "visible", "taken"),
    [
        ("python", 0, 1, "cuda:0"),
        ("torchrun", 1, 2, "cuda:1"),
        ("torchrun", 1, 1, None),  # two processes on one device
        ("slurm", 3, 4, "cuda:3"),  # all visible
        ("slurm", 3, 1, "cuda:0"),  # one bound to each task
        ("slurm", 3, 2, None),
    ],
)
def test_the_device_is_of_the_local_rank(monkeypatch, by, local_rank, visible, taken):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    launch = Launch(local_rank, 4, local_rank, 4, by)
    if taken is None:
        with pytest.raises(UserError, match=f"4 processes on a node with {visible} devices"):
            pick_device("auto", launch)
    else:
        assert pick_device("auto", launch) == torch.device(taken)


@pytest.mark.parametrize(
    ("given", "world", "sizes"),
    [
        ((1, None, 1), 1, (1, 1, 1)),
        ((1, None, 1), 8, (1, 8, 1)),
        ((2, None, 2), 8, (2, 2, 2)),
        ((None, 1, 1), 4, (4, 1, 1)),
        ((None, 2, 3), 12, (2, 2, 3)),
        ((3, 1, 2), 6, (3, 1, 2)),
    ],
)
def test_the_axis_left_open_takes_what_remains(given, world, sizes):
    args = DistributedArgs(dp_replicate=given[0], dp_shard=given[1], tp_size=given[2])
    assert list(args.validate()) == []
    assert mesh_sizes(args, world) == sizes


MANY_MESHES = [
    (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2),
    (1, 3, 1), (3, 1, 2), (1, 5, 1), (4, 2, 1), (2, 4, 1), (2, 3, 4), (3, 2, 2), (8, 1, 8),
]  # fmt: skip


@pytest.mark.parametrize("sizes", MANY_MESHES, ids=lambda s: "x".join(map(str, s)))
def test_the_dp_rank_of_every_coordinate(sizes):
    """Tensor-parallel ranks are neighbours: a group of them has one dp rank, counted in order."""
    replicas, shards, tp = sizes
    n = replicas * shards * tp
    for rank in range(n):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=n)
        try:
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
            assert dp_rank(mesh) == rank // tp
            assert dp_degree(mesh) == replicas * shards
            # The definition, from the coordinate.
            replicate, shard, _ = mesh.get_coordinate()
            assert dp_rank(mesh) == replicate * shards + shard
        finally:
            dist.destroy_process_group()


def shared_work() -> list[Any]:
    start(CPU, detect_launch(), DistributedArgs())
    rank = dist.get_rank()

    def refuse() -> None:
        raise UserError("not so", local=True)

    def fail() -> None:
        raise FileNotFoundError("gone")

    seen: list[Any] = [on_rank_0(lambda: {"rank": rank, "rows": (1, None)})]
    for work in (refuse, fail, lambda: Path("a")):
        try:
            on_rank_0(work)
        except Exception as error:
            seen.append((isinstance(error, UserError), str(error)))
    return [*seen, on_rank_0(lambda: rank)]


def test_the_result_or_error_of_rank_0_is_that_of_all(ranks):
    """Also where a rank did more such work before, in another process group."""
    ranks.run(1, shared_work)
    not_json = "Object of type PosixPath is not JSON serializable"
    expected = [{"rank": 0, "rows": [1, None]}, (True, "not so"), (False, "gone")]
    expected += [(False, not_json), 0]
    assert ranks.run(3, shared_work) == [expected] * 3


def agree_with_a_late_rank() -> tuple[float, int, bool, bool]:
    """The seconds in which an agreement begins that rank 1 joins half a second late, and it."""
    mesh, ids = start(CPU, detect_launch(), DistributedArgs()), torch.arange(4)
    on_rank_0(lambda: None)
    late = dist.get_rank() == 1
    time.sleep(0.5 * late)
    began = time.monotonic()
    batch = [MicroBatch(ids, ids, ids)]
    agreement = agree(batch, lambda m: m.row_ids.sum()[None], mesh, late, False)
    seconds, ahead = time.monotonic() - began, agreement.wait()
    return seconds, ahead.counts.item(), ahead.stopping, ahead.save_overdue


def test_an_agreement_that_has_begun_waits_for_nobody(ranks):
    for seconds, *agreed in ranks.run(3, agree_with_a_late_rank):
        assert seconds < 0.25 and agreed == [18, True, False]


def read_what_was_planted(path: Path) -> str:
    start(CPU, detect_launch(), DistributedArgs())
    if dist.get_rank() == 0:
        store = dist.distributed_c10d._get_default_store()
        store.set("lingua/on_rank_0/MainThread/1", pickle.dumps(Evil(path)))
        return ""
    try:
        return on_rank_0(lambda: "")
    except ValueError:
        return "refused"


def test_what_another_program_puts_into_the_store_is_not_executed(ranks, tmp_path):
    assert ranks.run(2, read_what_was_planted, tmp_path / "made")[1] == "refused"
    pickle.loads(pickle.dumps(Evil(tmp_path / "control")))
    assert [file.name for file in tmp_path.iterdir()] == ["control"]
