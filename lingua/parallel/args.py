"""The layout of a run on its processes: the keys of `distributed`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lingua.base.errors import UserError
from lingua.config.schema import Additions, Announced, Operational, bounds

if TYPE_CHECKING:  # keys are read before the seconds in which torch is imported
    import torch


@dataclass
class DistributedArgs:
    dp_replicate: Additions[int | None] = 1  # copies of the sharded model; null takes what remains
    dp_shard: Additions[int | None] = (
        None  # ranks each copy is sharded over; null takes what remains
    )
    tp_size: Additions[int] = 1  # ranks a layer is split over (tensor parallelism)
    # neighbours on dp_shard with the same rows, whose positions they divide (context parallelism)
    cp_size: Additions[int] = 1
    # use as many ranks as fit the sizes above, and leave the others idle; without it, ranks that do
    # not fit wait for more where torchrun has restarts, else they are an error
    spare: Operational[bool] = False
    # a device of lingua plan, or its file: ranks do not fit either where a plan finds too little
    # memory for them, which is made at each start that torchrun may repeat; null: none is made
    gpu: Operational[str | None] = None
    rendezvous_s: Operational[float] = 600.0  # seconds to wait for the other processes at the start
    # seconds to wait for another rank in a collective; the run then ends and names it
    timeout_s: Operational[float] = 1800.0
    # the same for the device's collectives after the first step, which compiles
    step_timeout_s: Operational[float] = 240.0
    # when gradients are reduced: `last` micro-step only, `replica_last` reduce-scatters each
    # micro-step and all-reduces across replicas on the last, `every` does both each time; all give
    # the same gradient; null: last, or every with deterministic: mesh
    grad_sync: Additions[Literal["last", "replica_last", "every"] | None] = None
    # when ranks free the parameters that they have gathered: `always` after each use, or once a
    # `step`, whose other micro-steps gather none; each rank then holds all of them in model_dtype
    reshard: Additions[Literal["always", "step"]] = "always"
    # steps between those in which ranks compute gradients of each other again, with deterministic:
    # mesh; null: never
    check_every: Operational[int | None] = None
    # CPU threads of the operators of a process, which rounding depends on; null: torch's choice, or
    # 1 with deterministic: mesh
    threads: Additions[int | None] = None
    # dtype of forward and backward; parameters, gradients and their reduction stay float32; null:
    # bf16 on CUDA, fp32 on the CPU
    model_dtype: Announced[Literal["bf16", "fp32"] | None] = "bf16"
    # precision of the blocks' matrix products where not `model_dtype`: tensorwise, float8 with a
    # scale for each tensor (torchao), whose rounding depends on the mesh
    float8: Announced[Literal["tensorwise"] | None] = None
    compile: Announced[bool] = False  # compile each block, and the loss, with torch.compile
    matmul_allow_tf32: Announced[bool] = False  # TF32 in float32 matrix products on CUDA
    # what a block keeps for its backward: `none` all, `full` its input only, `selective` the
    # results of attention and of matrix products with no more inputs than outputs
    activation_checkpointing: Announced[Literal["none", "full", "selective"]] = "none"

    @property
    def dtype(self) -> "torch.dtype":
        """The dtype of forward and backward."""
        import torch

        return torch.bfloat16 if self.model_dtype == "bf16" else torch.float32

    def resolve(self, exact: bool) -> None:
        """Fill in what is open and depends on whether the run is `deterministic: mesh`."""
        self.grad_sync = self.grad_sync or ("every" if exact else "last")
        self.threads = self.threads or (1 if exact else None)

    def validate(self) -> Iterator[tuple[str, str]]:
        sizes = "dp_replicate", "dp_shard", "tp_size", "cp_size"
        yield from bounds(self, 1, *sizes, "check_every", maximum=1 << 24)
        yield from bounds(self, 1, "threads", maximum=1024)
        yield from bounds(self, 1, "rendezvous_s", "timeout_s", "step_timeout_s", maximum=86400)
        if self.dp_replicate is None and self.dp_shard is None:
            yield "dp_replicate", "must be given when distributed.dp_shard is null"
        if self.dp_shard is not None and self.dp_shard % self.cp_size:
            yield "cp_size", f"must divide distributed.dp_shard = {self.dp_shard}"


def mesh_sizes(args: DistributedArgs, world_size: int) -> tuple[int, int, int]:
    """(dp_replicate, dp_shard, tp) for `world_size` processes, the null axis filled in."""
    replicate, shard, tp = args.dp_replicate, args.dp_shard, args.tp_size
    known = least_ranks(args)
    shown = f"distributed.dp_replicate = {replicate}, dp_shard = {shard}, tp_size = {tp}"
    shown += f", cp_size = {args.cp_size}" * (args.cp_size > 1)
    shown = shown.replace("None", "null")
    if replicate is not None and shard is not None and known != world_size:
        raise UserError(f"{shown}: their product is {known}, but {world_size} processes run")
    if world_size % known:
        raise UserError(f"{shown}: {known} does not divide the number of processes, {world_size}")
    rest = world_size // known
    return replicate or rest, shard or rest * args.cp_size, tp


def least_ranks(args: DistributedArgs) -> int:
    """The product of the sizes that are given, cp_size where dp_shard is not: a mesh has a multiple
    of it, or just as many ranks where all are given."""
    return (args.dp_replicate or 1) * (args.dp_shard or args.cp_size) * args.tp_size


def fitting(args: DistributedArgs, world_size: int) -> int:
    """The largest number of ranks up to `world_size` that `mesh_sizes` takes, 0 if none."""
    n_times = world_size // least_ranks(args)
    open_size = None in (args.dp_replicate, args.dp_shard)
    return least_ranks(args) * (n_times if open_size else min(1, n_times))
