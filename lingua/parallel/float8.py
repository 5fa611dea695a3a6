"""Matrix products of the blocks in float8, by torchao: `distributed.float8`.

Weights are gathered in float8, and stay float32 where they are kept, updated and saved. A weight,
an input and a gradient each have one scale, from their largest absolute value: a weight's that of
all of it, the others' that of what a rank has. So the rounding of products depends on the mesh.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lingua.base.errors import UserError, import_optional
from lingua.parallel.plan import ParallelPlan, blocks_of

KEY = "distributed.float8 = tensorwise"
MULTIPLE = 16  # of the sizes of a product's matrices; those of kernels for float8
CAPABILITY = (8, 9)  # the least of CUDA devices that have such products


def check_float8(
    model: nn.Module,
    plan: ParallelPlan | None,
    sizes: tuple[int, ...],
    seq_len: int,
    cp_size: int,
    device: str,
) -> None:
    """Check that the blocks of a plain model can compute in float8 on a mesh of these sizes, where
    cp_size ranks divide the positions of a row. It needs no processes. Raises UserError."""
    import_optional("torchao", KEY)
    check_matrices(model, plan or ParallelPlan(), sizes)
    if seq_len % (MULTIPLE * cp_size):
        of = f"{MULTIPLE}{f' x {cp_size} (cp_size)' * (cp_size > 1)}"
        raise UserError(f"{KEY}: data.seq_len = {seq_len}: no multiple of {of}")
    if device == "mps" or (device == "cuda" and torch.version.hip):
        raise UserError(f"{KEY}: is for GPUs of NVIDIA, and CPUs")
    if device == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability < CAPABILITY:
            names = ["{}.{}".format(*c) for c in (CAPABILITY, capability)]
            raise UserError(f"{KEY}: needs a GPU of compute capability {names[0]}; has {names[1]}")


def check_matrices(model: nn.Module, plan: ParallelPlan, sizes: tuple[int, ...]) -> None:
    """The part of `check_float8` that is of the matrices. FSDP cannot gather shards of different
    sizes in float8: in torch 2.13 it waits for ever."""
    _, shards, tp = sizes
    matrices = {
        f"{name} of a block is {m.out_features} x {m.in_features}": m
        for block in blocks_of(model, plan)
        for name, m in block.named_modules()
        if type(m) is nn.Linear
    }
    if not matrices:
        raise UserError(f"{KEY}: the model has no nn.Linear in a block of its ParallelPlan")
    n = MULTIPLE * tp
    for need, uneven in (
        (
            f"matrices of multiples of {MULTIPLE}{f' x {tp} (tp_size)' * (tp > 1)}",
            [name for name, m in matrices.items() if m.out_features % n or m.in_features % n],
        ),
        (
            f"the same number of rows of a matrix on each of the {shards * tp} ranks that share it",
            [name for name, m in matrices.items() if m.out_features % (shards * tp)],
        ),
    ):
        if uneven:
            raise UserError(f"{KEY}: must have {need}: {'; '.join(uneven)}")


def to_float8(model: nn.Module, plan: ParallelPlan, mesh: DeviceMesh, sharded: bool) -> None:
    """Replace the linear layers of the blocks by torchao's, which have the same parameters.
    `sharded`: FSDP gathers them. Raises UserError."""
    torchao = import_optional("torchao.float8", KEY)
    check_matrices(model, plan, mesh.shape)
    config = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=sharded)  # scaled by tensor
    for block in blocks_of(model, plan):
        # A class that is derived computes something else, and stays as it is.
        torchao.convert_to_float8_training(
            block, config=config, module_filter_fn=lambda m, name: type(m) is nn.Linear
        )


def scale_at_once(model: nn.Module) -> None:
    """Have each forward begin with the scales of all weights, which take one all-reduce, in place
    of one for each weight that is gathered. Called once FSDP has the model."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    model.register_forward_pre_hook(
        lambda module, args: precompute_float8_dynamic_scale_for_fsdp(module), prepend=True
    )
