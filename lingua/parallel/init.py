"""Initial weights that do not depend on the topology.

The value of a parameter is a function of (seed, parameter name, global index): each rank computes
the elements of its own shard with a counter-based hash in place of a random generator. A model
needs no code for this: its modules define `reset_parameters` with `torch.nn.init`, as torch's own
do, and `init_parameters` runs them with the random draws replaced.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lingua.base.errors import UserError
from lingua.base.hashing import hash_bits, key_of
from lingua.parallel.mesh import world_sum_
from lingua.parallel.tensors import local
from lingua.parallel.torch_private import (
    TorchDispatchMode,
    compute_local_shape_and_global_offset,
    version,
)

KINDS = {torch.ops.aten.normal_.default: "normal", torch.ops.aten.uniform_.default: "uniform"}
Named = tuple[str, nn.Parameter]  # a parameter with its canonical name
CHUNK_ELEMENTS = 1 << 22  # hashed at a time; bounds the int64 and float64 temporaries


def _global_index(t: Tensor, start: int, stop: int, device: torch.device) -> Tensor:
    """Row-major index, in the whole tensor, of the elements `start:stop` of this rank's part."""
    flat = torch.arange(start, stop, device=device)
    if not isinstance(t, DTensor):
        return flat
    shape, offset = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    index = torch.zeros_like(flat)
    for at, first, size in zip(torch.unravel_index(flat, shape), offset, t.shape, strict=True):
        index = index * size + at + first
    return index


def _draw(t: Tensor, key: int, kind: str, a: float, b: float) -> None:
    """Fill this rank's part of `t`: uniform in [a, b), or normal with mean a and deviation b."""
    part = local(t)
    device = torch.device("cpu") if part.device.type == "mps" else part.device  # has no float64
    values = torch.empty(part.numel(), dtype=part.dtype, device=device)
    for start in range(0, part.numel(), CHUNK_ELEMENTS):
        stop = min(start + CHUNK_ELEMENTS, part.numel())
        bits = hash_bits(key, _global_index(t, start, stop, device))
        high, low = ((bits >> 32) & 0xFFFFFFFF).double(), (bits & 0xFFFFFFFF).double()
        if kind == "uniform":
            x = high * ((b - a) / 2**32) + a
        else:  # Box and Muller, 1958
            radius = ((high + 0.5) / 2**32).log().mul(-2).sqrt()
            x = radius * (low * (2 * math.pi / 2**32)).cos() * b + a
        values[start:stop] = x
    part.copy_(values.view(part.shape))


class _SeededDraws(TorchDispatchMode):
    """Replaces normal_ and uniform_ by draws keyed by (seed, parameter name, draw, index).

    A draw into a temporary tensor, as in `nn.init.trunc_normal_`, counts as a further draw of the
    parameter that was drawn last. Other random operations are refused.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.names = {id(t): name for name, t in named_tensors(model)}
        self.current, self.draws = "", 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            try:
                return func(*args, **(kwargs or {}))
            except RuntimeError as error:
                out = (kwargs or {}).get("out")
                if not isinstance(out, DTensor):
                    raise
                # torch 2.14 and later raise; earlier releases resize the part to the whole.
                raise _not_filled([self.names.get(id(out), self.current)]) from error
        if func not in KINDS:
            raise UserError(
                f"a reset_parameters of the model calls {func}: initial values can only be drawn "
                "with normal_ and uniform_, and with functions of torch.nn.init based on them"
            )
        t, a, b = args + (0.0, 1.0)[len(args) - 1 :]
        if id(t) in self.names:
            self.current, self.draws = self.names[id(t)], 0
        _draw(t, key_of(self.seed, self.current, self.draws), KINDS[func], a, b)
        self.draws += 1
        return t


def canonical_name(name: str) -> str:
    """The name of a parameter in the plain model, without the names of wrappers."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by canonical name; tied ones once, under their first name."""
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        yield canonical_name(name), t


@contextmanager
def ties_kept(model: nn.Module) -> Iterator[None]:
    """After the block, tie parameters again that were tied before it, and freeze those that were
    frozen: `to_empty` and `parallelize_module` replace each module's parameters one by one."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(p, []).append((module, name))
    yield
    for before, [(first, name), *others] in owners.items():
        if isinstance(after := getattr(first, name, None), nn.Parameter):  # a style may take it
            after.requires_grad_(before.requires_grad)
        for module, other in others:
            if getattr(module, other) is not getattr(first, name):
                setattr(module, other, getattr(first, name))


@torch.no_grad()
def init_parameters(model: nn.Module, seed: int, device: torch.device) -> None:
    """Allocate a model that is on the meta device on `device`, and run every `reset_parameters`,
    children before parents, so that a block overrides what its linears do by default.

    Raises:
        UserError: names the parameters and buffers that no `reset_parameters` filled in place.
    """
    with ties_kept(model):
        model.to_empty(device=device)
    before = {}
    for name, t in named_tensors(model):
        if t.is_floating_point():
            local(t).fill_(math.nan)
        before[name] = version(t), local(t).shape
    with _SeededDraws(model, seed):
        for module in reversed(list(model.modules())):
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
    missing = []
    for name, t in named_tensors(model):
        changes, shape = before[name]
        empty = bool(local(t).isnan().any()) if t.is_floating_point() else version(t) == changes
        missing.append(empty or local(t).shape != shape)  # `out=` may resize a part to the whole
    # A rank with an empty shard finds nothing missing: ranks compare before any of them raises.
    flags = torch.tensor(missing, dtype=torch.int32)
    if dist.is_initialized() and missing:
        world_sum_(flags)
    names = [name for name, flag in zip(before, flags.tolist(), strict=True) if flag]
    if names:
        raise _not_filled(names)


def _not_filled(names: list[str]) -> UserError:
    return UserError(
        f"no reset_parameters of the model fills {', '.join(names)}: define reset_parameters() on "
        "the module that owns each, filling it in place (nn.init.eye_ does not)"
    )
