"""The arithmetic and the memory traffic of each operator of a step, for a roofline."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lingua.torch_private import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass_type,
    schema,
    tree_leaves,
)

Kernel = tuple[int, int, int]  # FLOPs, bytes of an element of its result, bytes read and written

# Collectives, marks of the profiler, and questions about a tensor.
_NO_KERNEL = ("c10d", "_c10d_functional", "_dtensor", "profiler", "prim")


class KernelCounter(TorchDispatchMode):
    """Context manager that counts the operators that run inside it by what they cost."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[Kernel] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented
        if func is torch.ops.prim.device.default:  # asked a dozen times by each fake operator
            return args[0].fake_device
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        allocates = func.namespace == "aten" and "empty" in str(func)
        if func.namespace in _NO_KERNEL or func.is_view or allocates:
            return result
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if outputs or schema(func).is_mutable:
            formula = flop_registry.get(func.overloadpacket)
            flops = formula(*args, **kwargs, out_val=result) if formula else 0
            if "attention" in str(func):
                flops //= 2  # it is causal
            size = outputs[0].element_size() if outputs else 4
            touched = tree_leaves((args, kwargs, result))
            tensors = {id(t): t for t in touched if isinstance(t, Tensor)}
            self.kernels[flops, size, sum(t.nbytes for t in tensors.values())] += 1
        return result
