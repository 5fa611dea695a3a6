"""Processes: the device of this process and its process group."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lingua.base.dump_dir import WRONG_HOSTS
from lingua.base.errors import UserError, tool_needed_by
from lingua.parallel.args import DistributedArgs, fitting, mesh_sizes
from lingua.parallel.environment import Launch, restarts_in_torchrun
from lingua.parallel.environment import detect_launch as detect_launch  # callers need it to start
from lingua.parallel.heartbeat import ABORT_S, Heartbeat
from lingua.parallel.mesh import AXES, LEFT, all_call, cp_group, share, share_rows, world_sum_
from lingua.parallel.torch_private import set_group_timeout


def pick_device(name: str, launch: Launch) -> torch.device:
    """The device of this process for `device: auto | cpu | cuda | mps`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cuda":
        return torch.device(name)
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
    heart: Heartbeat | None = None,
) -> DeviceMesh:
    """Start the process group (gloo for CPU tensors, NCCL for CUDA ones) and build the mesh.

    A single process has a group of one, so that nothing else asks how it was launched. With a
    `dump_dir`, an NCCL collective that times out leaves there what each rank's last ones were. The
    caller states by `heart` where this rank is. An error that ends this rank, one of several, is
    reported by `lingua.parallel.failure`.
    `model_dtype`, `grad_sync` and `threads` that `args` leave open are filled in.

    Raises:
        UserError: the number of processes does not fit the sizes of the mesh, the processes cannot
            meet, or, with `deterministic: mesh`, are not alike.
    """
    if not (args.spare or restarts_in_torchrun()):
        mesh_sizes(args, launch.world_size)  # an error here is one before ranks have met
    args.model_dtype = args.model_dtype or ("bf16" if device.type == "cuda" else "fp32")
    args.resolve(deterministic == "mesh")
    _set_up_torch(device, launch, args, bool(deterministic), dump_dir)
    # Groups of gloo connect ranks that send to each other, neighbours in a ring, not all with all.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    store: dist.Store = dist.HashStore()
    if launch.world_size > 1 or launch.by == "torchrun":  # whose agent may have the store
        from lingua.parallel.rendezvous import meet

        store = meet(launch, args)
        launch = _choose_rank(launch, args, store, dump_dir)
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
        timeout=timedelta(seconds=args.timeout_s),
        # With it communicators are made here, and not in the first step.
        device_id=device if device.type == "cuda" else None,
    )
    world_sum_(torch.zeros(1))  # connects: the first wait for a rank that has left has no end
    heart = heart or Heartbeat()
    if launch.world_size > 1:
        from lingua.parallel.rendezvous import watch

        watch(heart, store, launch)
    sizes = mesh_sizes(args, launch.world_size)
    mesh = init_device_mesh(device.type.replace("mps", "cpu"), sizes, mesh_dim_names=AXES)
    if device.type == "mps":
        from lingua.parallel.mps import adopt

        adopt(mesh)
    share_rows(mesh, args.cp_size)
    set_timeout(mesh, args.timeout_s, heart)  # a mesh's groups do not inherit it
    return mesh


def _choose_rank(
    launch: Launch, args: DistributedArgs, store: dist.Store, dump_dir: Path | None
) -> Launch:
    """The place of this process among those that are used, where these need not be all."""
    file, place = Path(dump_dir or "/dev/null", WRONG_HOSTS), (launch.rank, launch.world_size)
    wrong_hosts = share(lambda: os.path.exists(file), store, "lingua/wrong", *place)
    fits = fitting(args, launch.world_size) == launch.world_size
    if fits and not (args.spare or wrong_hosts or args.gpu is not None):
        return launch
    with tool_needed_by("choosing the ranks of a run"):
        from lingua.tools.elastic.seats import take_seat
    return take_seat(launch, args, store, dump_dir)


def _set_up_torch(
    device: torch.device,
    launch: Launch,
    args: DistributedArgs,
    deterministic: bool,
    dump_dir: Path | None,
) -> None:
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    enabled = torch.are_deterministic_algorithms_enabled()
    if deterministic != enabled:  # the call imports inductor
        torch.use_deterministic_algorithms(deterministic)
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


def _set_cuda_defaults(dump_dir: Path | None) -> None:
    """Variables that torch reads when CUDA and NCCL start. What the user has set stays."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the old name takes precedence
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if dump_dir is not None:  # NCCL's flight recorder
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that a rank remembers
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{dump_dir.absolute()}/nccl_rank_")


def set_timeout(mesh: DeviceMesh, seconds: float, heart: Heartbeat) -> None:
    """Set how long later collectives of the device wait for another rank."""
    heart.patience_s = seconds
    abort_s = seconds + (ABORT_S if mesh.device_type == "cuda" else 0)
    for group in filter(None, (*mesh.get_all_groups(), cp_group(mesh))):
        set_group_timeout(group, mesh.device_type, timedelta(seconds=abort_s))


def leave(patience_s: float) -> None:
    """End the process group. Rank 0 first waits up to `patience_s` seconds for the other ranks, and
    for those that are idle, to call this: its process may hold the store, which they may read."""
    n = max(detect_launch().world_size, dist.get_world_size())
    all_call(LEFT, 0.0 if dist.get_rank() else patience_s, n)
    dist.destroy_process_group()
