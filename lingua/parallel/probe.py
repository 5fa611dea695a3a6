"""Looking into a model on a mesh: what its modules return, and that a look changes nothing."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lingua.base.errors import UserError
from lingua.parallel.init import canonical_name, named_tensors
from lingua.parallel.parallelize import find_modules, reshard
from lingua.parallel.tensors import local, whole
from lingua.parallel.torch_private import n_hooks, version


@contextmanager
def only_read(model: nn.Module) -> Iterator[None]:
    """Around what looks at a model and its gradients before an update, without gradients of its
    own. A forward inside frees the parameters that it gathered, so that their gradients can be
    read, and that the next forward does not take what the update changes.

    Raises UserError at the end where a parameter, a buffer, a gradient, the training mode or the
    number of hooks of a module is another than before. A change through `.data` is not seen.
    """
    before = _state(model)
    hook = model.register_forward_hook(lambda module, args, out: reshard(module))
    try:
        with torch.no_grad():
            yield
    finally:
        hook.remove()
    after = _state(model)
    changed = [
        name
        for name, (thing, n) in before.items()
        if name not in after or after[name][0] is not thing or after[name][1] != n
    ]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UserError(
            f"the app's probe has changed {', '.join(changed[:3])}{more}: it may only look, since "
            "the update would be another one"
        )


def _state(model: nn.Module) -> dict[str, tuple[object, int]]:
    """What a probe must leave, by name: each as an object and a number."""
    state: dict[str, tuple[object, int]] = {}
    for name, module in model.named_modules():
        where = canonical_name(f"{name}.")[:-1] or "the model"
        state[f"the training mode of {where}"] = None, module.training
        state[f"the hooks of {where}"] = None, n_hooks(module)
    for name, t in named_tensors(model):
        state[name] = t, _version(t)
        if t.grad is not None:
            state[f"the gradient of {name}"] = t.grad, _version(t.grad)
    return state


def _version(t: Tensor) -> int:
    """How often `t` was changed: of a DTensor, as a whole or its part alone."""
    return version(t) + version(local(t))


@contextmanager
def recorded(
    model: nn.Module, patterns: Sequence[str], seq_len: int, mesh: DeviceMesh, compiled: bool
) -> Iterator[dict[str, Tensor]]:
    """Inside it, a forward of the model puts what the modules of these patterns return into the
    dict: whole tensors by module name, the last one of a module that is called several times.
    Called by every rank.

    Under tensor parallelism a part is made whole where it is a DTensor before the module's style
    makes it plain, or where it has a rank's share of the `seq_len` positions (dim 1). Another plain
    tensor must be equal on all tp ranks. With `compiled`, blocks run without the compiler: a
    compiled one does not call hooks that are younger than it.

    Raises UserError where a pattern matches no module, or a module returns something else.
    """
    states: dict[str, Tensor] = {}
    styled: dict[str, Tensor | None] = {}  # made whole before the style has its turn
    plain: dict[str, Tensor] = {}  # sums of those that must be equal on all tp ranks
    tp = mesh["tp"]

    def see(name: str, module: nn.Module, args: Any, out: Any) -> None:
        t = _first(name, out)
        # Of an embedding split by rows, torch keeps what makes it whole for one use: the style's.
        is_sum = isinstance(t, DTensor) and any(p.is_partial() for p in t.placements)
        styled[name] = t.full_tensor() if isinstance(t, DTensor) and not is_sum else None

    def keep(name: str, module: nn.Module, args: Any, out: Any) -> None:
        t = styled.pop(name)
        if t is None:
            t = _first(name, out)
            if t.ndim > 2 and t.shape[1] * tp.size() == seq_len and not isinstance(t, DTensor):
                t = DTensor.from_local(t, tp, [Shard(1)])
            elif tp.size() > 1 and not isinstance(t, DTensor):
                plain[name] = t.float().nan_to_num().sum()
        states[name] = whole(t)

    with ExitStack() as hooks:
        for name, module in find_modules(model, patterns).items():
            first = module.register_forward_hook(partial(see, name), prepend=True)
            hooks.callback(first.remove)
            hooks.callback(module.register_forward_hook(partial(keep, name)).remove)
        if compiled:
            hooks.enter_context(torch.compiler.set_stance("force_eager"))
        yield states
    if plain:
        sums = torch.stack(list(plain.values()))
        largest = torch.stack((sums, -sums))
        dist.all_reduce(largest, dist.ReduceOp.MAX, tp.get_group())
        parts = [n for n, a, b in zip(plain, *largest.tolist(), strict=True) if a != -b]
        if parts:
            raise UserError(
                f"hidden states: tensor-parallel ranks have different parts of {', '.join(parts)}, "
                "split by no style of its own; name a module that has one, or that contains it"
            )


def _first(name: str, out: Any) -> Tensor:
    """What a module returns, without the terms per row that it may return with it."""
    t = out[0] if isinstance(out, tuple) else out
    if not isinstance(t, Tensor):
        raise UserError(f"hidden states: {name} returns {type(t).__name__}; must be a tensor")
    return t
