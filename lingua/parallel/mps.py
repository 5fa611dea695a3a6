"""One process on a GPU of Apple, for which torch 2.13 has neither a DeviceMesh nor FSDP."""

from collections.abc import Sequence
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lingua.base.errors import UserError
from lingua.parallel.torch_private import tree_map_only


class MpsMesh(DeviceMesh):
    device_type = "mps"  # its groups are those of the CPU


def adopt(mesh: DeviceMesh) -> None:
    """Make a mesh of the CPU one of mps. Raises UserError where that cannot be."""
    if mesh.size() > 1:
        raise UserError(f"device = mps: is for one process, and here are {mesh.size()}")
    if not torch.backends.mps.is_available():
        raise UserError("device = mps: torch finds no GPU of Apple on this machine")
    mesh.__class__ = MpsMesh


def cast_units(units: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Have each unit, inner ones first, cast its parameters and inputs in its forward, which gives
    the bits of FSDP with as many units."""

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() else t

    def forward(inner: Any, own: list[nn.Module], *args: Any, **kwargs: Any) -> Any:
        places = [(vars(m), name, p) for m in own for name, p in m.named_parameters(recurse=False)]
        casts = {p: cast(p) for *_, p in places}  # a tied one once
        for attributes, name, p in places:  # found before the parameter
            attributes[name] = casts[p]
        try:
            return inner(*tree_map_only(Tensor, cast, args), **tree_map_only(Tensor, cast, kwargs))
        finally:
            for attributes, name, _ in places:
                del attributes[name]

    taken: set[nn.Module] = set()
    for unit in units:
        own = [module for module in unit.modules() if module not in taken]
        taken.update(own)
        unit.forward = update_wrapper(partial(forward, unit.forward, own), unit.forward)
