"""Processes: the rank of this process, its device and its process group."""

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lingua.errors import UserError
from lingua.parallel.mesh import AXES, DistributedArgs, mesh_sizes


@dataclass(frozen=True)
class Launch:
    """The place of this process among the processes of the run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    by: str = "python"  # "python", "torchrun" or "slurm"


def detect_launch(env: dict[str, str] | None = None) -> Launch:
    """Read the place of this process from torchrun's variables, else from those of a Slurm step."""
    env = dict(os.environ) if env is None else env
    if "RANK" in env and "WORLD_SIZE" in env:
        return Launch(
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_rank=int(env.get("LOCAL_RANK", 0)),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", 1)),
            by="torchrun",
        )
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:  # a task of srun, not the batch script
        tasks = int(env["SLURM_STEP_NUM_TASKS"])
        nodes = int(env.get("SLURM_STEP_NUM_NODES", 1))
        return Launch(
            rank=int(env["SLURM_PROCID"]),
            world_size=tasks,
            local_rank=int(env["SLURM_LOCALID"]),
            local_world_size=-(-tasks // nodes),
            by="slurm",
        )
    return Launch()


def _slurm_rendezvous(env: dict[str, str]) -> None:
    """Set the rendezvous address to the first host of the step, and a port that differs from job to
    job and is below the ephemeral ports."""
    names = env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"]
    first = _scontrol("show", "hostnames", names).split()[0]
    # A node's name in Slurm need not be its address.
    shown = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", "--oneliner", first))
    job, step = int(env["SLURM_JOB_ID"]), int(env["SLURM_STEP_ID"])
    os.environ.setdefault("MASTER_ADDR", shown[1] if shown else first)
    os.environ.setdefault("MASTER_PORT", str(20000 + (job + 997 * step) % 12000))


def _scontrol(*words: str) -> str:
    return subprocess.run(["scontrol", *words], check=True, capture_output=True, text=True).stdout


def pick_device(name: str, launch: Launch) -> torch.device:
    """The device of this process for `device: auto | cpu | cuda`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("device = cuda: torch finds no CUDA device on this machine", local=True)
    count = torch.cuda.device_count()
    bound = count == 1 and launch.by == "slurm"  # which can show each task one of its own
    if not bound and launch.local_rank >= count:
        raise UserError(
            f"device = cuda: {launch.local_world_size} processes on a node with {count} devices",
            local=True,
        )
    return torch.device("cuda", 0 if bound else launch.local_rank)


def start(
    device: torch.device, launch: Launch, args: DistributedArgs, deterministic: bool = False
) -> DeviceMesh:
    """Start the process group (gloo for CPU tensors, NCCL for CUDA ones) and build the mesh.

    A single process has a group of one, so that nothing else asks how it was launched.

    Raises:
        UserError: the sizes of the mesh do not multiply to the number of processes.
    """
    sizes = mesh_sizes(args, launch.world_size)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if deterministic != torch.are_deterministic_algorithms_enabled():  # the call imports inductor
        torch.use_deterministic_algorithms(deterministic)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = args.matmul_allow_tf32
    elif "OMP_NUM_THREADS" not in os.environ and launch.local_world_size > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // launch.local_world_size))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if launch.by == "python":
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        if launch.by == "slurm":
            _slurm_rendezvous(dict(os.environ))
        dist.init_process_group(
            backend,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(minutes=30),
        )
    return init_device_mesh(device.type, sizes, mesh_dim_names=AXES)


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of this process alone, for functions that ranks call together."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def leave(patience_s: float) -> None:
    """End the process group. Rank 0 first waits up to `patience_s` seconds for the other ranks to
    call this: its process may hold the store, which they may still read."""
    store = dist.distributed_c10d._get_default_store()
    store.add("lingua/left", 1)
    deadline = time.monotonic() + patience_s
    while dist.get_rank() == 0 and store.add("lingua/left", 0) < dist.get_world_size():
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    dist.destroy_process_group()
