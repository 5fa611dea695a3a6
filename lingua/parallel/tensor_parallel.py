"""Tensor parallelism of a plain module, by the styles of its plan."""

import re
import sys
from functools import partial
from traceback import walk_tb
from typing import Any

from torch import Tensor, nn
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
        chosen = {name: s for pattern, s in styles.items() for name in matching(modules, [pattern])}
        for name, style in chosen.items():  # the last one of several
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
    model.register_forward_hook(partial(_note_shapes, plan, mesh.size()), always_call=True)
    # Losses over a split vocabulary are DTensors, equal on all tp ranks: callers get them plain.
    model.register_forward_hook(
        lambda module, args, out: (
            tree_map_only(DTensor, lambda t: t.full_tensor().clone(), out)
            if isinstance(out, tuple)
            else out
        )
    )


def _note_shapes(plan: ParallelPlan, tp: int, model: nn.Module, args: Any, out: Any) -> None:
    """Where the model's forward raises an error of torch about sizes, which names operators alone,
    add a note that names the innermost module of the model and its tensors."""
    error = sys.exception()
    if type(error) is not RuntimeError or not re.search("size|shape|dim", str(error)):
        return
    names = {id(module): name for name, module in modules_of(model).items() if name}
    for frame, _ in reversed([*walk_tb(error.__traceback__)]):
        if (name := names.get(id(frame.f_locals.get("self")))) is None:
            continue
        tensors = [(key, t) for key, t in frame.f_locals.items() if isinstance(t, Tensor)]
        shapes = ", ".join(f"{key} {list(t.shape)}" for key, t in tensors)
        inside = [n for n in names.values() if f"{n}.".startswith(f"{name}.")]
        styled = [pattern for pattern in plan.tp or () if matching(inside, [pattern])]
        error.add_note(
            f"distributed.tp_size = {tp}: in {name}, with {shapes}. Outside of attention and "
            "feed-forward a rank has its part of the positions: does each style of the plan give "
            f"the layout that follows? Styles there: {', '.join(styled)}"
        )
        return
