"""The arithmetic and the memory traffic of each operator of a step, for a roofline."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lingua.parallel.torch_private import OpOverload, schema

# FLOPs, bytes of an element of the result, bytes read and written, whether it is FSDP's. Those of
# operators without FLOPs are one for each byte: their time is that of all their bytes.
Kernel = tuple[float, int, float, bool]

# Collectives, marks of the profiler, and questions about a tensor.
_NO_KERNEL = ("c10d", "_c10d_functional", "_dtensor", "profiler", "prim")


class KernelCounter:
    """Counts operators by what they cost."""

    def __init__(self) -> None:
        self.kernels: Counter[Kernel] = Counter()

    def count(
        self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any, is_fsdp: bool
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
            if flops:
                self.kernels[flops, size, n_bytes, is_fsdp] += 1
            else:
                self.kernels[0, size, 1, is_fsdp] += n_bytes


@cache
def _is_kernel(func: OpOverload) -> bool:
    free = func.namespace == "aten" and ("empty" in str(func) or "_unsafe_view" in str(func))
    return not (func.namespace in _NO_KERNEL or free)


@cache
def _formula(func: OpOverload) -> Callable[..., int] | None:
    """The FLOPs of an operator from its arguments and its result."""
    formula = flop_registry.get(func.overloadpacket)
    if formula is not None and "attention" in str(func):
        return lambda *args, **kwargs: formula(*args, **kwargs) // 2  # it is causal
    return formula


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Those in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from tensors_in(v)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
