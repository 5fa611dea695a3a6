"""Tensor parallelism of a plain module, by the styles of its plan."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from lingua.base.errors import UserError
from lingua.parallel.init import ties_kept
from lingua.parallel.plan import (
    ParallelPlan,
    matching,
    modules_of,
    parameters_of,
    undeclared,
    within,
)
from lingua.parallel.torch_private import tree_map_only


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
    """Distribute the modules of a model over the ranks of `mesh`. Raises UserError where a style
    that is not torch's own leaves a parameter whole that `tp_equal` does not name."""
    modules, styles = modules_of(model), plan.tp or {}
    with ties_kept(model):
        for pattern, style in styles.items():
            for name in matching(modules, [pattern]):
                parallelize_module(modules[name], mesh, style)
    whole = [name for name, p in parameters_of(model).items() if not isinstance(p, DTensor)]
    for problem in undeclared(whole, plan, mesh.size()):
        raise UserError(problem)
    # An asynchronous collective's result that enters a compiled block loses its gradient (torch
    # 2.13): the modules outside the blocks return a copy of theirs.
    for name in matching(modules, styles):
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
