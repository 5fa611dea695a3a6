"""One function that lays a plain module out on the mesh: tensor parallelism, activation
checkpointing, compilation and FSDP2.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatch

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, loss_parallel, parallelize_module
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lingua.errors import UserError
from lingua.init import ties_kept
from lingua.parallel.mesh import DistributedArgs


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
    # Losses over a split vocabulary are DTensors, equal on all tp ranks: callers get them plain.
    model.register_forward_hook(
        lambda module, args, out: (
            tree_map_only(DTensor, lambda t: t.full_tensor().clone(), out)
            if isinstance(out, tuple)
            else out
        )
    )


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
