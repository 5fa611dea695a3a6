"""Processes: the device of this process and its process group."""

import os
import resource
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lingua.base.errors import UserError
from lingua.parallel.args import DistributedArgs, mesh_sizes
from lingua.parallel.environment import Launch
from lingua.parallel.environment import detect_launch as detect_launch  # callers need it to start
from lingua.parallel.heartbeat import ABORT_S, HEARTBEAT
from lingua.parallel.mesh import AXES, all_call, world_sum_
from lingua.parallel.torch_private import set_group_timeout

FILES = 256  # open files and connections of a process beside one for each rank


def pick_device(name: str, launch: Launch) -> torch.device:
    """The device of this process for `device: auto | cpu | cuda`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("device = cuda: torch finds no CUDA device on this machine", local=True)
    count = torch.cuda.device_count()
    bound = count == 1 and launch.by == "slurm"  # Slurm can show each task one device
    if not bound and launch.local_rank >= count:
        raise UserError(
            f"device = cuda: {launch.local_world_size} processes on a node with {count} devices",
            local=True,
        )
    return torch.device("cuda", 0 if bound else launch.local_rank)


def start(
    device: torch.device,
    launch: Launch,
    args: DistributedArgs,
    deterministic: bool | Literal["mesh"] = False,
    dump_dir: Path | None = None,
) -> DeviceMesh:
    """Start the process group (gloo for CPU tensors, NCCL for CUDA ones) and build the mesh.

    A single process has a group of one, so that nothing else asks how it was launched. With a
    `dump_dir`, an NCCL collective that times out leaves there what each rank's last ones were.
    `model_dtype`, `grad_sync` and `threads` that `args` leave open are filled in.

    Raises:
        UserError: the sizes of the mesh do not multiply to the number of processes, the processes
            cannot meet, or, with `deterministic: mesh`, are not alike.
    """
    sizes = mesh_sizes(args, launch.world_size)
    args.model_dtype = args.model_dtype or ("bf16" if device.type == "cuda" else "fp32")
    args.resolve(deterministic == "mesh")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    enabled = torch.are_deterministic_algorithms_enabled()
    if bool(deterministic) != enabled:  # the call imports inductor
        torch.use_deterministic_algorithms(bool(deterministic))
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if device.type == "cuda":
        _set_cuda_defaults(dump_dir)
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = args.matmul_allow_tf32
    elif (
        args.threads is None and "OMP_NUM_THREADS" not in os.environ and launch.local_world_size > 1
    ):
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // launch.local_world_size))
    timeout = timedelta(seconds=args.timeout_s)
    single = launch.world_size == 1 and launch.by != "torchrun"  # whose agent may have the store
    if not single:
        _allow_files(FILES + launch.world_size)
    # Groups of gloo connect ranks that send to each other, neighbours in a ring, not all with all.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    store = dist.HashStore() if single else _meet(launch, args.rendezvous_s, timeout)
    if deterministic == "mesh":
        from lingua.parallel.exact import check_ranks

        vectors = f"cpu with {torch.backends.cpu.get_cpu_capability()}"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else vectors
        facts = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        check_ranks(store, launch.rank, launch.world_size, device=name, **facts)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
        # With it communicators are made here, and not in the first step.
        device_id=device if device.type == "cuda" else None,
    )
    world_sum_(torch.zeros(1))  # connects: the first wait for a rank that has left has no end
    HEARTBEAT.start(store, launch.rank, launch.world_size)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    set_timeout(mesh, args.timeout_s)  # a mesh's groups do not inherit it
    return mesh


def _set_cuda_defaults(dump_dir: Path | None) -> None:
    """Variables that torch reads when CUDA and NCCL start. What the user has set stays."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the old name takes precedence
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if dump_dir is not None:  # NCCL's flight recorder
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that a rank remembers
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{dump_dir.absolute()}/nccl_rank_")


def _allow_files(n: int) -> None:
    """Raise the limit of open files to the hard one. Raises UserError where that is below `n`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < n:
        raise UserError(
            f"this process may open {hard} files and connections and needs up to {n}: raise the "
            "hard limit (ulimit -Hn; LimitNOFILE of a systemd service; under Slurm that of slurmd, "
            "with PropagateResourceLimitsExcept=NOFILE)",
            local=True,
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def set_timeout(mesh: DeviceMesh, seconds: float) -> None:
    """Set how long later collectives of the device wait for another rank."""
    HEARTBEAT.patience_s = seconds
    abort_s = seconds + (ABORT_S if mesh.device_type == "cuda" else 0)
    for group in mesh.get_all_groups():
        set_group_timeout(group, mesh.device_type, timedelta(seconds=abort_s))


def _meet(launch: Launch, patience_s: float, timeout: timedelta) -> dist.Store:
    """The store of rank 0, with this timeout, once all processes have reached it. Raises UserError
    if they do not."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by all starts of torchrun
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if shared and restarts and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        raise UserError(
            "torchrun --max-restarts on several machines needs the environment variable "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it, a restart would find what the start "
            "before has left in the store"
        )
    try:
        if launch.by == "slurm":
            from lingua.parallel.slurm import set_rendezvous

            set_rendezvous(dict(os.environ))
        if launch.rank:
            _wait_for_rank_0(patience_s)
        patience = timedelta(seconds=patience_s)
        rendezvous = dist.rendezvous("env://", launch.rank, launch.world_size, timeout=patience)
        store: dist.Store = next(rendezvous)[0]
        if shared:  # what an earlier start wrote is still there
            store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    except (dist.DistError, UserError, OSError, ValueError, KeyError) as error:
        place = ":".join(os.environ.get(f"MASTER_{part}", "?") for part in ("ADDR", "PORT"))
        reason = f"{str(error).splitlines()[0]} (distributed.rendezvous_s = {patience_s:g})"
        if "EADDRINUSE" in reason:
            reason = "another program uses this port; set MASTER_PORT to a free one"
        elif isinstance(error, KeyError):
            reason = f"the environment variable {error} is not set"
        raise UserError(
            f"rank {launch.rank} of {launch.world_size} cannot meet the others at MASTER_ADDR:"
            f"MASTER_PORT = {place}: {reason}",
            local=True,
        ) from None
    store.set_timeout(timeout)
    return store


def _wait_for_rank_0(patience_s: float) -> None:
    """Wait until rank 0 listens: torch's own attempts fill the console with stack traces. Raises
    the OSError of the last attempt."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    deadline, pause_s = time.monotonic() + patience_s, 0.01
    while True:
        try:
            socket.create_connection(address, timeout=patience_s).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)


def leave(patience_s: float) -> None:
    """End the process group. Rank 0 first waits up to `patience_s` seconds for the other ranks to
    call this: its process may hold the store, which they may still read."""
    HEARTBEAT.stopped.set()
    all_call("left", 0.0 if dist.get_rank() else patience_s)
    dist.destroy_process_group()
