"""The arithmetic and the memory traffic of each operator of a step, for a roofline."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lingua.parallel.torch_private import OpOverload, schema
from lingua.tools.torch_private import ADD_PRODUCT

# What a kernel is of: FSDP, attention, a product in float8 with its casts, the rest of a block or
# of the head, which may be compiled as those casts may, or neither.
Place = Literal["fsdp", "block", "attention", "float8", "outside"]


class Kernel(NamedTuple):
    """What kernels of one kind cost. Those without FLOPs are one for each byte: their time is that
    of all their bytes. One without either is the launch of an operator by the host."""

    flops: float
    size: int  # bytes of an element of the result; of a matrix product, of the matrices
    n_bytes: float  # read and written
    place: Place


# Operators in place that only write, or that change a few elements.
_ONLY_WRITE = ("copy", "fill", "zero", "scatter", "index", "normal", "uniform")
# Collectives, marks of the profiler, and questions about a tensor.
_NO_KERNEL = ("c10d", "_c10d_functional", "_dtensor", "profiler", "prim")


class KernelCounter:
    """Counts operators by what they cost."""

    def __init__(self) -> None:
        self.kernels: Counter[Kernel] = Counter()

    def count(
        self, func: OpOverload, args: tuple, kwargs: dict[str, Any], result: Any, place: Place
    ) -> None:
        if not _is_kernel(func):
            return
        outputs = list(tensors_in(result))
        if outputs or schema(func).is_mutable:
            formula = _formula(func)
            flops = formula(*args, **kwargs, out_val=result) if formula else 0
            size = outputs[0].element_size() if outputs else 4
            tensors = {id(t): t for t in tensors_in((args, kwargs, outputs))}
            n_bytes = sum(t.nbytes for t in tensors.values())
            names = [argument.name for argument in schema(func).arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            changed = [value for name, value in given.items() if name in _changed(func)]
            n_bytes += sum(t.nbytes for t in tensors_in(changed))
            self.kernels[Kernel(0, 0, 0, place)] += 1
            if flops:
                size = list(tensors_in(args))[1].element_size()
                place = "attention" if "attention" in str(func) or is_varlen(func) else place
                self.kernels[Kernel(flops, size, n_bytes, place)] += 1
            else:
                self.kernels[Kernel(0, size, 1, place)] += n_bytes


@cache
def _is_kernel(func: OpOverload) -> bool:
    free = func.namespace == "aten" and ("empty" in str(func) or "_unsafe_view" in str(func))
    return not (func.namespace in _NO_KERNEL or free)


@cache
def _changed(func: OpOverload) -> frozenset[str]:
    """Names of the arguments that an operator in place both reads and writes."""
    if not func.overloadpacket.__name__.endswith("_") or any(n in str(func) for n in _ONLY_WRITE):
        return frozenset()
    return frozenset(a.name for a in schema(func).arguments if a.is_write)


@cache
def _formula(func: OpOverload) -> Callable[..., float] | None:
    """The FLOPs of an operator from its arguments and its result."""
    formula = flop_registry.get(func.overloadpacket)
    if is_varlen(func) or (formula is not None and "scaled_dot_product" in str(func)):
        return _attention_formula(func)
    if formula is not None and func is ADD_PRODUCT:
        return lambda total, a, b, *_, **__: formula(total, a, b)  # not of a dtype, too
    return formula


def is_varlen(func: OpOverload) -> bool:
    """Whether it is attention to packed rows."""
    return "_varlen_attn" in str(func)


def _attention_formula(func: OpOverload) -> Callable[..., float]:
    """Two matrix products of tokens x mean visible keys, in the backward pass five. Documents are
    as long as the rows: how long they are is not known. (Of torch's own formulas, that of packed
    rows takes each token to see the whole batch, and those of 2.11 refuse grouped heads.)"""
    names = [argument.name for argument in schema(func).arguments]
    products = 5 if "backward" in str(func) else 2

    def flops(*args: Any, out_val: Any, **kwargs: Any) -> float:
        given = dict(zip(names, args, strict=False)) | kwargs
        if not is_varlen(func):  # B H S D, of which a query sees half of the keys
            return products * given["query"].numel() * given["key"].shape[2]
        (tokens, heads, features), longest = given["query"].shape, given["max_q"]
        left, _ = given.get("window_size") or (-1, 0)
        window = longest if left < 0 else min(left + 1, longest)
        visible = window * (1 - window / (2 * longest))  # a mean over the positions of a row
        return 2 * products * tokens * heads * features * visible

    return flops


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Returns the tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from tensors_in(v)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
