"""One function that lays a plain module out on the mesh: tensor parallelism, activation
checkpointing, compilation and FSDP2; and the check that a plan fits its module.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lingua.base.errors import UserError, nearest
from lingua.parallel.args import DistributedArgs
from lingua.parallel.init import canonical_name, ties_kept
from lingua.parallel.torch_private import (
    ATTENTION_OPERATORS,
    PRODUCTS,
    REDUCE_SCATTER,
    checkpoint_wrapper,
    tree_map_only,
)


@dataclass(frozen=True)
class ParallelPlan:
    """The layout of a plain module on the mesh. Names are patterns of module names, in which `*`
    matches one part; each must match something.

    blocks: the repeated layers. Each is checkpointed, compiled and an FSDP unit of its own.
    compiled: modules outside the blocks that are compiled where blocks are, by their own `compile`.
    units: further FSDP units, each a group of modules whose parameters are gathered together; the
        last is the end of the model.
    tp: the style of each module under tensor parallelism; None when the model has no such layout.
    tp_equal: modules or parameters that no style distributes and that every tp rank holds whole.
        Their gradients must be equal on all tp ranks: what enters and leaves such a module is equal
        there. A norm whose input is split over positions needs the style SequenceParallel instead.
    tp_divides: sizes that tp must divide, by the name of their config key.
    """

    blocks: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    units: tuple[tuple[str, ...], ...] = ()
    tp: dict[str, ParallelStyle] | None = None
    tp_equal: tuple[str, ...] = ()
    tp_divides: dict[str, int] = field(default_factory=dict)

    def with_part(
        self, part: str, tp: dict[str, ParallelStyle], tp_equal: tuple[str, ...] = ()
    ) -> "ParallelPlan":
        """The plan of a model whose modules `part` are of another kind: their styles are `tp`, by
        names inside the part ("" is the part itself), in place of those that the plan has."""
        tp = {f"{part}.{name}".rstrip("."): style for name, style in tp.items()}
        others = {
            name: s for name, s in (self.tp or {}).items() if not f"{name}.".startswith(f"{part}.")
        }
        equal = (*self.tp_equal, *(f"{part}.{name}" for name in tp_equal))
        return replace(self, tp=others | tp, tp_equal=equal)


# Styles that convert inputs and outputs, and distribute no parameters.
_INPUT_OUTPUT_STYLES = (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)


def check_layout(model: nn.Module, plan: ParallelPlan | None, tp: int) -> None:
    """Check that a plan fits a plain model, which may be on the meta device, and `tp` ranks.

    It needs no processes. A style that is not torch's own is trusted to distribute the parameters
    of its modules; `parallelize_model` looks at what it did. Raises UserError, which names
    everything that is wrong.
    """
    plan = plan or ParallelPlan()
    modules, parameters = list(_modules(model)), list(_parameters(model))
    problems = [
        f"ParallelPlan.{where}: no {kind} of the model is named {pattern}{nearest(pattern, names)}"
        for where, patterns, kind, names in (
            ("blocks", plan.blocks, "module", modules),
            ("compiled", plan.compiled, "module", modules),
            ("units", chain(*plan.units), "module", modules),
            ("tp", plan.tp or (), "module", modules),
            ("tp_equal", plan.tp_equal, "module or parameter", modules + parameters),
        )
        for pattern in patterns
        if not _matching(names, [pattern])
    ]
    problems += _tied_across_units(model, plan)
    if tp > 1 and plan.tp is None:
        problems.append(
            f"distributed.tp_size = {tp}: this model gives no tensor-parallel layout; set it to 1"
        )
    elif tp > 1:
        uneven = [f"{key} = {size}" for key, size in plan.tp_divides.items() if size % tp]
        if uneven:
            problems.append(f"distributed.tp_size = {tp}: must divide {', '.join(uneven)}")
        styles = (plan.tp or {}).items()
        styled = [name for name, style in styles if type(style) not in _INPUT_OUTPUT_STYLES]
        problems += _undeclared([name for name in parameters if not within(name, styled)], plan, tp)
    if problems:
        raise UserError("\n".join(problems))


def _tied_across_units(model: nn.Module, plan: ParallelPlan) -> Iterator[str]:
    """A line for each parameter that modules of several FSDP units share. torch refuses these; up
    to 2.12 it left a part of them without updates where shards are uneven (its issue 176076)."""
    blocks = _matching(_modules(model), plan.blocks)
    units = [*([block] for block in blocks), *plan.units]
    owners: dict[nn.Parameter, list[str]] = {}
    for name, module in _modules(model).items():
        for key, p in module.named_parameters(recurse=False):
            owners.setdefault(p, []).append(f"{name}.{key}".lstrip("."))
    for names in owners.values():
        if len({next((i for i, u in enumerate(units) if within(n, u)), -1) for n in names}) > 1:
            yield (
                f"ParallelPlan.units: {' and '.join(names)} are one parameter in several FSDP "
                "units; name their modules in the same unit, or in none"
            )


def within(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches this module or parameter, or a module that contains it."""
    parts = name.split(".")
    return bool(_matching([".".join(parts[:n]) for n in range(len(parts) + 1)], list(patterns)))


def _matching(names: Iterable[str], patterns: Collection[str]) -> list[str]:
    return [name for name in names if any(_matches(name, pattern) for pattern in patterns)]


def _matches(name: str, pattern: str) -> bool:
    if not name or name.count(".") != pattern.count("."):
        return name == pattern  # "" is the model itself, which `*` does not match
    return fnmatch(name, pattern)


def _undeclared(whole: list[str], plan: ParallelPlan, tp: int) -> list[str]:
    """A line that names the `whole` parameters, those that no style distributes, that `tp_equal`
    leaves out; no line where it has them all."""
    undeclared = [name for name in whole if not within(name, plan.tp_equal)]
    if not undeclared:
        return []
    return [
        f"distributed.tp_size = {tp}: the model's plan does not define how tensor-parallel ranks "
        f"hold {', '.join(undeclared)}. Give each of their modules a style in ParallelPlan.tp "
        "(SequenceParallel for a norm whose input is split over positions); where the gradient is "
        "equal on all these ranks, name it in ParallelPlan.tp_equal"
    ]


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
    caller uses as before; its gradients are sums over the data-parallel ranks, never averages. With
    `exact` they are added by a GradientSums, and FSDP adds none, nor knows of replicas.
    Raises UserError where the plan does not fit, see `check_layout`.
    """
    plan = plan or ParallelPlan()
    check_layout(model, plan, mesh["tp"].size())
    unsharded = mesh.size() == 1 and args.dtype == torch.float32 and not exact
    if args.float8 is not None:
        from lingua.parallel.float8 import to_float8

        to_float8(model, plan, mesh, sharded=not unsharded)
    if mesh["tp"].size() > 1:
        _apply_tensor_parallel(model, mesh["tp"], plan)
    _wrap_blocks(model, plan, args)
    if unsharded:
        return model  # nothing to shard, sum or cast: FSDP's hooks would only cost time
    replicas, shards = (mesh[axis].size() for axis in ("dp_replicate", "dp_shard"))
    shard = partial(
        fully_shard,
        mesh=mesh["dp_replicate", "dp_shard"] if replicas > 1 and not exact else mesh["dp_shard"],
        mp_policy=MixedPrecisionPolicy(param_dtype=args.dtype, reduce_dtype=torch.float32),
    )
    modules = _modules(model)
    units = [[block] for block in blocks_of(model, plan)]
    units += [[modules[name] for name in _matching(modules, unit)] for unit in plan.units]
    for unit in units:
        # The backward pass begins with the last unit, which would be gathered again at once; and
        # replicas that are not sharded have nothing to gather. One rank frees its copies in `dtype`
        # all the same: it has the least memory, and to cast again costs a percent of a step.
        kept = unit is units[-1] or (shards == 1 and replicas > 1) or args.reshard == "step"
        shard(unit, reshard_after_forward=not kept)
    shard(model)
    model.stays_gathered = args.reshard == "step"  # type: ignore[assignment]  # for set_gradient_sync
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


def blocks_of(model: nn.Module, plan: ParallelPlan) -> list[nn.Module]:
    """The repeated layers of a model, in order."""
    modules = _modules(model)
    return [modules[name] for name in _matching(modules, plan.blocks)]


def find_modules(model: nn.Module, patterns: Collection[str]) -> dict[str, nn.Module]:
    """The modules of these patterns (see ParallelPlan), by their names in the plain model. Raises
    UserError where a pattern matches none."""
    modules = _modules(model)
    for pattern in patterns:
        if not _matching(modules, [pattern]):
            known = nearest(pattern, modules)
            raise UserError(f"no module of the model is named {pattern}{known}")
    return {name: modules[name] for name in _matching(modules, patterns)}


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by the name they have in the plain model; a wrapper stands for what it wraps."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        modules.setdefault(canonical_name(f"{name}.")[:-1], module)
    return modules


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {canonical_name(name): p for name, p in model.named_parameters()}


def _apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
    modules, styles = _modules(model), plan.tp or {}
    with ties_kept(model):
        for pattern, style in styles.items():
            for name in _matching(modules, [pattern]):
                parallelize_module(modules[name], mesh, style)
    whole = [name for name, p in _parameters(model).items() if not isinstance(p, DTensor)]
    for problem in _undeclared(whole, plan, mesh.size()):
        raise UserError(problem)
    # An asynchronous collective's result that enters a compiled block loses its gradient (torch
    # 2.13): the modules outside the blocks return a copy of theirs.
    for name in _matching(modules, styles):
        if not within(name, plan.blocks):
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
_SAVED = {*ATTENTION_OPERATORS, str(REDUCE_SCATTER)}


def _selective(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what is in _SAVED, and matrix products that do not narrow. The last product of a block
    narrows; nothing in the backward pass reads it, so that it is not even computed again."""
    saved = str(operator) in _SAVED
    if operator in PRODUCTS:
        n_in, n_out = args[1].shape
        saved = n_in <= n_out
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _wrap_blocks(model: nn.Module, plan: ParallelPlan, args: DistributedArgs) -> None:
    """Activation checkpointing and compilation, block by block."""
    modules, kind = _modules(model), args.activation_checkpointing
    for name in _matching(modules, plan.blocks):
        block = modules[name]
        # Full checkpointing works around a compiled block but not inside one; the selective kind
        # must be inside, where it sees each operation.
        if args.compile and kind != "selective":
            block.compile()
        if kind == "full":
            block = checkpoint_wrapper(block, preserve_rng_state=False)
        elif kind == "selective":
            keep = partial(create_selective_checkpoint_contexts, _selective)
            block = checkpoint_wrapper(block, context_fn=keep, preserve_rng_state=False)
            if args.compile:
                block.compile()
        model.set_submodule(name, block)
    for name in _matching(modules, plan.compiled) if args.compile else ():
        modules[name].compile()
