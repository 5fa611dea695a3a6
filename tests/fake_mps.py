"""A device that calls itself mps and computes on the CPU, for tests: no machine of the project has
a GPU of Apple.

Its tensors are of the meta device to C++, so that autograd takes them, and have their values in
tensors of the CPU. It refuses what mps refuses: a float64 tensor, and an operator with tensors of
the CPU among its own, but for scalars. Its fused AdamW ignores `grad_scale` and `found_inf`, as
that of mps does (torch 2.13, aten/src/ATen/native/mps). Which operators mps has, and what its
kernels round, is not known to it.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

MPS, ANY, CPU = torch.device("mps", 0), torch.device("mps"), torch.device("cpu")
ops = torch.ops.aten
COPIES = (ops._to_copy.default, ops.copy_.default, ops._foreach_copy_.default)
FUSED = ops._fused_adamw_.default
seen: Counter[str] = Counter()  # operators that ran on the device


class OnMps(Tensor):
    """A tensor of the device, whose values `inner` has."""

    inner: Tensor
    device = MPS  # type: ignore[assignment]
    is_meta = False  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: Any, inner: Tensor) -> "OnMps":
        if inner.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"mps has no {inner.dtype}")
        t = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, layout=inner.layout, device="meta",
        )  # fmt: skip
        t.inner = inner
        return t

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __repr__(self) -> str:
        return f"OnMps({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, dict(kwargs or {}))


def _is_scalar_of_meta(t: Any) -> bool:
    return isinstance(t, Tensor) and not isinstance(t, OnMps) and t.is_meta and t.dim() == 0


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    target = kwargs.get("device")
    if func is ops.where.self:  # in its backward C++ makes a zero of the device that it knows
        args = tuple(torch.zeros((), dtype=t.dtype) if _is_scalar_of_meta(t) else t for t in args)
    leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if target is not None and torch.device(target).type == "meta" and isinstance(args[0], OnMps):
        target = MPS  # C++ asks for the device that it knows
    here = [t for t in leaves if isinstance(t, OnMps)]
    others = [t for t in leaves if not isinstance(t, OnMps) and t.dim() and not t.is_meta]
    if here and others and func not in COPIES:
        raise RuntimeError(f"{func}: tensors of mps and of the CPU")
    if here and any(t.is_meta and not isinstance(t, OnMps) for t in leaves):
        raise RuntimeError(f"{func}: tensors of mps and of the meta device")
    if func is FUSED:
        kwargs |= {"grad_scale": None, "found_inf": None}
    if target is not None:
        kwargs["device"] = CPU if torch.device(target).type == "mps" else target
    plain = tree_map(lambda t: t.inner if isinstance(t, OnMps) else t, (args, kwargs))
    out = func(*plain[0], **plain[1])
    if target is not None:
        to_mps = torch.device(target).type == "mps"
    else:
        to_mps = bool(here) and not (func is ops.copy_.default and not isinstance(args[0], OnMps))
    if not to_mps:
        return out
    seen[str(func)] += 1
    originals = {id(t.inner): t for t in here}  # what an operator in place returns

    def wrap(t: Any) -> Any:
        known = originals.get(id(t))
        return (
            OnMps(t) if known is None and isinstance(t, Tensor) else t if known is None else known
        )

    return tree_map(wrap, out)


class Device(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        target = kwargs.get("device")
        leaves = tree_leaves((args, kwargs))
        on_mps = target is not None and torch.device(target).type == "mps"
        if on_mps or any(isinstance(t, OnMps) for t in leaves):
            return run(func, args, kwargs)
        return func(*args, **kwargs)


class ToCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return t.inner.view_as(t.inner) if isinstance(t, OnMps) else t.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return OnMps(grad)


class ToMps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return OnMps(t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.inner if isinstance(grad, OnMps) else grad


# ---- functions that make a tensor of the device in C++


def made(function: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") in (MPS, ANY):
            return OnMps(function(*args, **kwargs | {"device": "cpu"}))
        return function(*args, **kwargs)

    return make


def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not isinstance(self, OnMps) and args in ((MPS,), (ANY,)):
        return OnMps(self.clone())
    return copy_of(self, *args, **kwargs)


def where(condition: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if len(args) == 2 and isinstance(condition, OnMps):
        [dtype] = {t.dtype for t in args if isinstance(t, Tensor)}
        args = tuple(t if isinstance(t, Tensor) else torch.tensor(t, dtype=dtype) for t in args)
    return chosen(condition, *args, **kwargs)


def attention(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    if not isinstance(q, OnMps):
        return attend(q, k, v, **kwargs)
    assert q.shape[1] == k.shape[1] or q.shape[2] == 1, "grouped heads"
    if kwargs["attn_mask"] is not None:
        kwargs["attn_mask"] = kwargs["attn_mask"].inner
    return ToMps.apply(attend(*map(ToCpu.apply, (q, k, v)), **kwargs))


copy_of, chosen, attend = Tensor.to, torch.where, F.scaled_dot_product_attention


@contextmanager
def fake_mps() -> Iterator[Counter[str]]:
    """Inside, this thread has the device. Yields the operators that run on it."""
    seen.clear()
    with (
        patch("torch.backends.mps.is_available", lambda: True),
        patch("torch.mps.synchronize", lambda: None),
        patch("torch.inference_mode", torch.no_grad),  # whose tensors C++ must make itself
        patch("torch.tensor", made(torch.tensor)),
        patch("torch.as_tensor", made(torch.as_tensor)),
        patch("torch.Tensor.to", to),
        patch("torch.where", where),
        patch("torch.nn.functional.scaled_dot_product_attention", attention),
        Device(),
    ):
        yield seen
