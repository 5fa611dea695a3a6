"""A probe looks into a model between backward and update, and must change nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lingua.base.errors import UserError
from lingua.parallel.init import canonical_name, named_tensors
from lingua.parallel.parallelize import reshard
from lingua.parallel.tensors import local
from lingua.parallel.torch_private import n_hooks, version


@contextmanager
def only_read(model: nn.Module) -> Iterator[None]:
    """Inside it, nothing is recorded for gradients, and a forward frees the parameters that it
    gathered: their gradients can be read, and the next forward does not take what an update
    changes. Raises UserError at the end where a parameter, buffer or gradient, the training mode or
    the number of hooks of a module is another than before; a change through `.data` is not seen."""
    before = _state(model)
    hook = model.register_forward_hook(lambda module, args, out: reshard(module))
    try:
        with torch.no_grad():
            yield
    finally:
        hook.remove()
    after, gone = _state(model), (None, -1)
    for name, (thing, n) in before.items():
        thing_now, n_now = after.get(name, gone)
        if thing_now is not thing or n_now != n:
            need = "it may only look, since the update would be another one"
            raise UserError(f"the app's probe has changed {name}: {need}")


def _state(model: nn.Module) -> dict[str, tuple[object, int]]:
    """What a probe must leave as it is, by name: each as an object and a number."""
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
    """How often `t` was changed in place: of a DTensor, as a whole or its part alone."""
    return version(t) + version(local(t))
