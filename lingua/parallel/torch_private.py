"""The private interfaces of torch that lingua uses, each with what it is for: what to check when
torch is updated. No other file names one, but for lingua.tools.torch_private.
"""

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, _ops, _subclasses, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping
from torch.distributed.tensor import DTensor, _utils
from torch.utils import _python_dispatch, _pytree

# ---- operators

# The type of torch.ops.aten.mm.default.
OpOverload = _ops.OpOverload
# Sees every operator: initial values are drawn by a hash, collectives are counted.
TorchDispatchMode = _python_dispatch.TorchDispatchMode
# Of DTensors and asynchronous results, whose operators unfold into those of plain tensors.
is_traceable_wrapper_subclass_type = _python_dispatch.is_traceable_wrapper_subclass_type
# What dynamo traces with: collectives of these are not counted in a run.
FakeTensor = _subclasses.FakeTensor
# -1 outside of a backward pass: collectives are counted by pass.
graph_task_id = torch._C._current_graph_task_id
# Divides a list of tensors by a scalar on the device, with one kernel for many of them.
foreach_div_ = torch._foreach_div_
# What selective activation checkpointing keeps: the results of the kernels of attention, by name,
# since some exist once their module is imported, and of the reduce-scatter of tensor parallelism.
ATTENTION_OPERATORS = (
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "torch_attn._varlen_attn.default",
    "flex_attention",
    "xformers_flash.flash_fwd.default",
    "xformers_flash3.flash_fwd.default",
    "aten._efficient_attention_forward.default",  # xformers' other kernels
)
REDUCE_SCATTER: OpOverload = torch.ops._c10d_functional.reduce_scatter_tensor.default
# Matrix products: of one dtype, and of float8.
PRODUCTS: tuple[OpOverload, ...] = (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)


def schema(func: OpOverload) -> Any:
    """The name and the arguments of an operator."""
    return func._schema


def dynamo_is_imported() -> bool:
    """Whether anything may be compiled. Importing dynamo to ask takes a second."""
    return "torch._dynamo" in sys.modules


# ---- process groups

# What ranks agree on without a collective.
default_store = c10d._get_default_store


def without_prefix(store: dist.Store) -> dist.Store:
    """The store of a process group as it was given: torch has put a prefix before its keys."""
    return store.underlying_store if isinstance(store, dist.PrefixStore) else store


# A group by its name, which is what the operators of compiled graphs have.
resolve_process_group = c10d._resolve_process_group


def set_group_timeout(group: dist.ProcessGroup, device_type: str, timeout: timedelta) -> None:
    """Set how long collectives of a group wait for other ranks, on one type of device: torch's
    public functions set it when a group is made, and those of a mesh take no other."""
    backend = group._get_backend(torch.device(device_type.replace("mps", "cpu")))
    if hasattr(backend, "_set_default_timeout"):  # a fake one never waits
        backend._set_default_timeout(timeout)


# ---- modules, tensors and files

# Activation checkpointing of a module, whose parameters keep their names in state_dict.
checkpoint_wrapper = wrapping.checkpoint_wrapper
# The tensors of one type in what a model returns.
tree_map_only = _pytree.tree_map_only
# The part of a DTensor that this rank holds, of uneven and strided shards too.
compute_local_shape_and_global_offset = _utils.compute_local_shape_and_global_offset
# Allocations and frees on CUDA, recorded and written for pytorch.org/memory_viz.
record_memory_history = torch.cuda.memory._record_memory_history
dump_memory_snapshot = torch.cuda.memory._dump_snapshot


def version(t: Tensor) -> int:
    """Returns how often `t` was changed in place; for an integer tensor, whether it was filled."""
    return t._version


def inner_tensor(t: Tensor) -> Tensor:
    """The plain tensor of a weight that FSDP gathers in float8 (torchao's); another is returned."""
    return getattr(t, "_tensor", t)


def n_hooks(module: nn.Module) -> int:
    """Returns how many hooks around its forward and backward a module has."""
    forward = len(module._forward_hooks) + len(module._forward_pre_hooks)
    return forward + len(module._backward_hooks) + len(module._backward_pre_hooks)


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Names of the module's own buffers that no checkpoint has."""
    return module._non_persistent_buffers_set


def on_host(part: Tensor, like: DTensor) -> DTensor:
    """`part`, in host memory, as a DTensor with the layout of `like`. `DTensor.from_local` would
    copy it to the mesh's device."""
    return DTensor(part, like._spec, requires_grad=False)


def begin_in_file(storage: Any) -> int:
    """Byte at which the elements of a storage begin in the file that torch.load read on meta."""
    return storage._checkpoint_offset


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step of an optimizer divides gradients by its `grad_scale`, and changes nothing
    where its `found_inf` is 1 (fused ones)."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)
