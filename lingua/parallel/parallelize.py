"""One function that lays a plain module out on the mesh: tensor parallelism, activation
checkpointing, compilation and FSDP2.
"""

from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lingua.parallel.args import DistributedArgs
from lingua.parallel.gradients import Sharded
from lingua.parallel.mesh import cp_group, cp_size
from lingua.parallel.plan import ParallelPlan, blocks_of, check_layout, matching, modules_of
from lingua.parallel.torch_private import checkpoint_wrapper


def parallelize_model(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: ParallelPlan | None,
    args: DistributedArgs,
    exact: bool = False,
) -> nn.Module:
    """Apply tensor parallelism, activation checkpointing, compilation and FSDP2 to `model`.

    The model may be, and for large ones should be, on the meta device: `init_parameters` gives it
    memory and values afterwards. Tied parameters stay tied. It returns the same module, which the
    caller uses as before, a Sharded now unless it is on one device in float32. Its gradients are
    sums over the data-parallel ranks, never averages. With `exact` its `gradient_sums` are to be
    set: FSDP adds no gradients, nor knows of replicas.
    Raises UserError where the plan does not fit, see `check_layout`.
    """
    plan = plan or ParallelPlan()
    check_layout(model, plan, mesh["tp"].size(), cp_size(mesh))
    fp32, mps = args.dtype == torch.float32, mesh.device_type == "mps"
    unsharded = mesh.size() == 1 and (fp32 or mps) and not exact
    if args.float8 is not None:
        from lingua.parallel.float8 import to_float8

        to_float8(model, plan, mesh, sharded=not unsharded)
    if mesh["tp"].size() > 1:
        from lingua.parallel.tensor_parallel import apply_tensor_parallel

        apply_tensor_parallel(model, mesh["tp"], plan)
    if (group := cp_group(mesh)) is not None:
        from lingua.parallel.context_parallel import divide_positions

        divide_positions(model, blocks_of(model, plan), group, mesh["tp"].size())
    if unsharded and not fp32:
        from lingua.parallel.mps import cast_units

        cast_units([*blocks_of(model, plan), model], args.dtype)
    _wrap_blocks(model, plan, args)
    if unsharded:
        return model  # nothing to shard, sum or cast: FSDP's hooks would only cost time
    replicas, shards = (mesh[axis].size() for axis in ("dp_replicate", "dp_shard"))
    shard = partial(
        fully_shard,
        mesh=mesh["dp_replicate", "dp_shard"] if replicas > 1 and not exact else mesh["dp_shard"],
        mp_policy=MixedPrecisionPolicy(param_dtype=args.dtype, reduce_dtype=torch.float32),
    )
    modules = modules_of(model)
    units = [[block] for block in blocks_of(model, plan)]
    units += [[modules[name] for name in matching(modules, unit)] for unit in plan.units]
    for unit in units:
        # The backward pass begins with the last unit, which would be gathered again at once; and
        # replicas that are not sharded have nothing to gather. One rank frees its copies in `dtype`
        # all the same: it has the least memory, and to cast again costs a percent of a step.
        kept = unit is units[-1] or (shards == 1 and replicas > 1) or args.reshard == "step"
        shard(unit, reshard_after_forward=not kept)
    shard(model)
    model.__class__ = type(f"Sharded{type(model).__name__}", (Sharded, type(model)), {})
    assert isinstance(model, Sharded)
    model.stays_gathered, model.gradient_sums = args.reshard == "step", None
    in_order = units[: len(units) - len(plan.units)] + units[-1:] * bool(plan.units)
    for (block, *_), (following, *_) in pairwise(in_order):  # gathered while the block computes
        block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]  # a method
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loop divides the loss by the number of targets of the whole global batch. The
            # divide factor alone is not enough: it would become a pre-multiplied sum, which gloo
            # does not have.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if args.float8 is not None:
        from lingua.parallel.float8 import scale_at_once

        scale_at_once(model)
    return model


def reshard(model: nn.Module, interrupted: bool = False) -> None:
    """Free the parameters that a forward without a backward has left whole. After an update they
    would be out of date, and the next forward would take them. An `interrupted` forward, which an
    error ended, was the model's last."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if interrupted:  # inside a forward, `reshard` keeps what a backward would use
                module.set_reshard_after_forward(True, recurse=False)
            module.reshard()


def _wrap_blocks(model: nn.Module, plan: ParallelPlan, args: DistributedArgs) -> None:
    """Activation checkpointing and compilation, block by block."""
    modules, kind = modules_of(model), args.activation_checkpointing
    for name in matching(modules, plan.blocks):
        block = modules[name]
        # Full checkpointing works around a compiled block but not inside one; the selective kind
        # must be inside, where it sees each operation.
        if args.compile and kind != "selective":
            block.compile()
        if kind == "full":
            block = checkpoint_wrapper(block, preserve_rng_state=False)
        elif kind == "selective":
            from lingua.parallel.selective import selective_contexts

            block = checkpoint_wrapper(
                block, context_fn=selective_contexts, preserve_rng_state=False
            )
            if args.compile:
                block.compile()
        model.set_submodule(name, block)
    for name in matching(modules, plan.compiled) if args.compile else ():
        modules[name].compile()
