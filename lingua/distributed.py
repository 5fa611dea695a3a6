"""Processes, mesh and parallelism: from a launched process to a model sharded over a DeviceMesh.

`launch` finds this process's place, `build_mesh` lays the processes out as
(dp_replicate, dp_shard, tp), and `parallelize_model` applies tensor parallelism, activation
checkpointing, compilation and FSDP2 to a plain module. The mesh always has all three axes, each of
any size, 1 included, so that no caller needs a special case.
"""

import os
import pickle
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatch
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, loss_parallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lingua.args import Announced, Free
from lingua.collectives import human_bytes
from lingua.errors import UserError
from lingua.init import ties_kept

T = TypeVar("T")
R = TypeVar("R")
AXES = ("dp_replicate", "dp_shard", "tp")


@dataclass
class DistributedArgs:
    dp_replicate: Free[int | None] = 1  # copies of the sharded model; null takes what remains
    dp_shard: Free[int | None] = None  # ranks each copy is sharded over; null takes what remains
    tp_size: Free[int] = 1  # ranks a layer is split over (tensor parallelism)
    # when gradients travel: `last` micro-step only, `replica_last` reduce-scatters each micro-step
    # and all-reduces across replicas on the last, `every` does both each time; all give the same
    # gradient
    grad_sync: Free[Literal["last", "replica_last", "every"]] = "last"
    # dtype of forward and backward; parameters, gradients and their reduction stay float32
    model_dtype: Announced[Literal["bf16", "fp32"]] = "bf16"
    compile: Announced[bool] = False  # compile each block with torch.compile
    matmul_allow_tf32: Announced[bool] = False  # TF32 in float32 matrix products on CUDA
    # what a block keeps for its backward: `none` all, `full` its input only, `selective` the
    # results of matrix products and attention
    activation_checkpointing: Announced[Literal["none", "full", "selective"]] = "none"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of forward and backward."""
        return torch.bfloat16 if self.model_dtype == "bf16" else torch.float32

    def problems(self) -> Iterator[tuple[str, str]]:
        for key in ("dp_replicate", "dp_shard"):
            size = getattr(self, key)
            if size is not None and size < 1:
                yield key, "must be at least 1, or null for what remains"
        if self.tp_size < 1:
            yield "tp_size", "must be at least 1"
        if self.dp_replicate is None and self.dp_shard is None:
            yield "dp_replicate", "must be given when distributed.dp_shard is null"


# ------------------------------------------------------------------------------------- launch


@dataclass(frozen=True)
class Launch:
    """Where this process stands among the processes of the run."""

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
    """Point torch at the first host of the step, on a port that differs from job to job, below
    those that systems give to whoever asks for any."""
    names = env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"]
    first = _scontrol("show", "hostnames", names).split()[0]
    # A node's name is Slurm's own; where it is to be reached is another matter.
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


# --------------------------------------------------------------------------------------- mesh


def mesh_sizes(args: DistributedArgs, world_size: int) -> tuple[int, int, int]:
    """(dp_replicate, dp_shard, tp) for `world_size` processes, the null axis filled in."""
    replicate, shard, tp = args.dp_replicate, args.dp_shard, args.tp_size
    known = (replicate or 1) * (shard or 1) * tp
    shown = f"distributed.dp_replicate = {replicate}, dp_shard = {shard}, tp_size = {tp}"
    shown = shown.replace("None", "null")
    if replicate is not None and shard is not None and known != world_size:
        raise UserError(f"{shown}: their product is {known}, but {world_size} processes run")
    if world_size % known:
        raise UserError(f"{shown}: {known} does not divide the number of processes, {world_size}")
    rest = world_size // known
    return (replicate or rest, shard or rest if replicate is not None else shard or 1, tp)


def dp_rank(mesh: DeviceMesh) -> int:
    """This process's data-parallel rank, the same for every tp rank of a group.

    `replicate_rank * dp_shard + shard_rank`, in `0 ... dp_degree(mesh) - 1`. Everything that
    differs from one data-parallel rank to the next uses this number.
    """
    replicate, shard = mesh.get_local_rank("dp_replicate"), mesh.get_local_rank("dp_shard")
    return replicate * mesh["dp_shard"].size() + shard


def dp_degree(mesh: DeviceMesh) -> int:
    """The number of data-parallel ranks."""
    replicate, shard, _ = mesh.shape  # asked for with each token: mesh["dp_shard"] takes 60 us
    return replicate * shard


def dp_sum_(t: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum `t` over the data-parallel ranks, in place. int64 wraps modulo 2^64."""
    for axis in ("dp_shard", "dp_replicate"):
        if mesh[axis].size() > 1:
            dist.all_reduce(t, group=mesh.get_group(axis))
    return t


def world_sum_(t: Tensor) -> Tensor:
    """Sum a CPU tensor over all ranks, in place. It goes over gloo, past the device's queue."""
    if dist.get_world_size() > 1:
        dist.all_reduce(t)
    return t


def divide(work: Callable[[list[T]], list[R]], items: list[T], mesh: DeviceMesh) -> list[R]:
    """The results of `work`, an item each, which the data-parallel ranks divide among themselves.

    Every rank calls it with the same items and has all results; the tp ranks of a group do the same
    part. `work` is also called with no items: it may hold collectives.
    """
    parts: list[list[R]] = [[]] * dist.get_world_size()
    dist.all_gather_object(parts, work(items[dp_rank(mesh) :: dp_degree(mesh)]))
    by_dp_rank = parts[:: mesh["tp"].size()]  # a row of the mesh is a data-parallel rank
    return [by_dp_rank[i % len(by_dp_rank)][i // len(by_dp_rank)] for i in range(len(items))]


def on_rank_0(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and give its result, or the exception it raises, to every rank.

    The others wait at the store, without a limit: the work may be hours of tokenizing, which no
    collective's timeout should have to cover.
    """
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    # The number of this rank's call, counted in the store: a process may outlive its group. Threads
    # count apart, since the order between them may differ from rank to rank.
    thread = f"lingua/on_rank_0/{threading.current_thread().name}"
    key = f"{thread}/{store.add(f'{thread}/calls_of_{rank}', 1)}"
    if rank == 0:
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        # Only a UserError is meant to be read; of others the text is enough and always pickles.
        told = error if error is None or isinstance(error, UserError) else RuntimeError(str(error))
        store.set(key, pickle.dumps((result, told)))
        if error is not None:
            raise error
        return result  # type: ignore[return-value]
    pause_s = 0.001
    while not store.check([key]):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)
    result, error = pickle.loads(store.get(key))
    if error is not None:
        raise error
    return result


def leave(patience_s: float) -> None:
    """End the process group. Rank 0 first waits for the others to come here too, but no longer than
    it is told: its process may hold the store, where they still look for what it shared last."""
    store = dist.distributed_c10d._get_default_store()
    store.add("lingua/left", 1)
    deadline = time.monotonic() + patience_s
    while dist.get_rank() == 0 and store.add("lingua/left", 0) < dist.get_world_size():
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------ parallel


@dataclass(frozen=True)
class ParallelPlan:
    """How a plain module is laid out on the mesh. Names are module names; `*` matches one part.

    blocks: the repeated layers. Each is checkpointed, compiled and an FSDP unit of its own.
    units: further FSDP units, each a group of modules whose parameters travel together.
    tp: the layout of each module under tensor parallelism; None when it has none.
    tp_divides: sizes that tp must divide, by the name of their config key.
    """

    blocks: tuple[str, ...] = ()
    units: tuple[tuple[str, ...], ...] = ()
    tp: dict[str, ParallelStyle] | None = None
    tp_divides: dict[str, int] = field(default_factory=dict)


def parallelize_model(
    model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan | None, args: DistributedArgs
) -> nn.Module:
    """Apply tensor parallelism, activation checkpointing, compilation and FSDP2 to `model`.

    The model may be, and for large ones should be, on the meta device: `init_parameters` gives it
    memory and values afterwards. Tied parameters stay tied. It returns the same module, which the
    caller uses as before; its gradients are sums over the data-parallel ranks, never averages.

    Raises:
        UserError: the mesh asks for a tensor parallelism that the plan does not allow.
    """
    plan = plan or ParallelPlan()
    if mesh["tp"].size() > 1:
        _apply_tensor_parallel(model, mesh["tp"], plan)
    _wrap_blocks(model, plan, args)
    if mesh.size() == 1 and args.dtype == torch.float32:
        return model  # nothing to shard, sum or cast: FSDP's hooks would only cost time
    replicas = mesh["dp_replicate"].size() > 1
    policy = MixedPrecisionPolicy(param_dtype=args.dtype, reduce_dtype=torch.float32)
    shard = {
        "mesh": mesh["dp_replicate", "dp_shard"] if replicas else mesh["dp_shard"],
        "mp_policy": policy,
    }
    modules = _named_modules(model)
    for names in [*((block,) for block in _matching(modules, plan.blocks)), *plan.units]:
        unit = [modules[name] for name in names]
        fully_shard(unit if len(unit) > 1 else unit[0], **shard)
    fully_shard(model, **shard)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loop divides the loss by the number of targets of the whole global batch. The
            # divide factor alone is not enough: it would become a pre-multiplied sum, which gloo
            # does not have.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def _named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by the name they have in the plain model; a wrapper stands for what it wraps."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        found.setdefault(name.replace("._checkpoint_wrapped_module", ""), module)
    return found


def _matching(names: dict[str, nn.Module], patterns: tuple[str, ...]) -> list[str]:
    return [
        name
        for name in names
        if any(name.count(".") == p.count(".") and fnmatch(name, p) for p in patterns)
    ]


def check_tensor_parallel(plan: ParallelPlan, tp: int) -> None:
    """Raises UserError where the plan does not allow `tp` ranks to share every layer."""
    if tp > 1 and plan.tp is None:
        raise UserError(
            f"distributed.tp_size = {tp}: this model gives no tensor-parallel layout; set it to 1"
        )
    uneven = [f"{key} = {size}" for key, size in plan.tp_divides.items() if size % tp]
    if uneven:
        raise UserError(f"distributed.tp_size = {tp}: must divide {', '.join(uneven)}")


def _apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
    check_tensor_parallel(plan, mesh.size())
    with ties_kept(model):
        parallelize_module(model, mesh, plan.tp)
    # An asynchronous collective's result that enters a compiled block loses its gradient (torch
    # 2.13): the modules outside the blocks hand on a copy of theirs.
    modules = _named_modules(model)
    blocks = tuple(f"{block}." for block in _matching(modules, plan.blocks))
    for name in _matching(modules, tuple(plan.tp)):
        if not f"{name}.".startswith(blocks):
            modules[name].register_forward_hook(
                lambda module, args, out: out if isinstance(out, DTensor) else out.clone()
            )
    # The loss over a split vocabulary is a DTensor, equal on all tp ranks: callers get it plain.
    model.register_forward_hook(
        lambda module, args, out: tuple(_whole(t) for t in out) if isinstance(out, tuple) else out
    )


def _whole(t: Tensor) -> Tensor:
    return t.full_tensor().clone() if isinstance(t, DTensor) else t


# Results worth keeping when the rest of a block is recomputed: each costs far more to compute, or
# to communicate, than its memory is worth.
_SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def _save_expensive(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def _wrap_blocks(model: nn.Module, plan: ParallelPlan, args: DistributedArgs) -> None:
    """Activation checkpointing and compilation, block by block."""
    modules = _named_modules(model)
    for name in _matching(modules, plan.blocks):
        block = modules[name]
        parent = modules[name.rpartition(".")[0]]
        # Full checkpointing works around a compiled block but not inside one; the selective kind
        # must be inside, where it can tell the operations apart.
        if args.compile and args.activation_checkpointing != "selective":
            block.compile()
        if args.activation_checkpointing == "full":
            block = checkpoint_wrapper(block, preserve_rng_state=False)
        elif args.activation_checkpointing == "selective":
            block = checkpoint_wrapper(
                block,
                context_fn=lambda: create_selective_checkpoint_contexts(_save_expensive),
                preserve_rng_state=False,
            )
            if args.compile:
                block.compile()
        parent.register_module(name.rpartition(".")[2], block)


def loss_context(mesh: DeviceMesh) -> AbstractContextManager[None]:
    """Around forward and backward: cross-entropy over a vocabulary that tp ranks share."""
    return loss_parallel() if mesh["tp"].size() > 1 else nullcontext()


# ------------------------------------------------------------------------------------ gradients


def set_gradient_sync(model: nn.Module, mode: str, last: bool) -> None:
    """Say, before a micro-step's forward, which reductions its backward runs."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or mode != "last")
        model.set_requires_all_reduce(last or mode == "every")


def grad_sync_note(model: nn.Module, mesh: DeviceMesh, mode: str, n_micro: int) -> Iterator[str]:
    """What the choice of `grad_sync` costs in memory and saves in traffic, on each rank."""
    shards, replicas = mesh["dp_shard"].size(), mesh["dp_replicate"].size()
    if n_micro == 1 or shards * replicas == 1:
        return
    # Gradients of this rank's part under tensor parallelism, float32, before and after they are
    # split over dp_shard.
    local = sum(_local(p).numel() for p in model.parameters()) * 4
    whole = local * shards
    kept = {"last": whole, "replica_last": local if replicas > 1 else 0, "every": 0}[mode]
    scatters = whole if shards > 1 and mode == "last" else 0
    reduces = local if replicas > 1 and mode != "every" else 0
    saved = (n_micro - 1) * (scatters + reduces)
    yield (
        f"distributed.grad_sync = {mode}: keeps {human_bytes(kept)} of gradients between "
        f"micro-steps and saves {human_bytes(saved)} of gradient traffic a step"
    )


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


@torch.no_grad()
def clip_grad_norm_(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients in place so that their global norm is at most `max_norm`.

    Parameters may live on different meshes. Each group of equal layout sums the squares of its
    shards over just the axes that split it, so what an axis replicates counts once.

    Returns:
        The norm before scaling, a float32 scalar on the device, equal on every rank. When it is
        not finite the gradients are left as they are.
    """
    groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for p in parameters:
        if p.grad is None:
            continue
        if isinstance(p.grad, DTensor):
            split = tuple(
                axis for axis, place in enumerate(p.grad.placements) if not place.is_replicate()
            )
            groups.setdefault((p.grad.device_mesh, split), []).append(p.grad.to_local())
        else:
            groups.setdefault((None, ()), []).append(p.grad)
    total = torch.zeros((), device=parameters[0].device)
    for (mesh, split), grads in groups.items():
        squares = torch.stack(torch._foreach_norm(grads)).square().sum()
        for axis in split:
            if mesh.size(axis) > 1:
                dist.all_reduce(squares, group=mesh.get_group(axis))
        total = total + squares
    norm = total.sqrt()
    scale = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
    for grads in groups.values():
        torch._foreach_mul_(grads, scale)
    return norm
