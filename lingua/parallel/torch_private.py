"""The private interfaces of torch that lingua uses, each with what it is for: what to check when
torch is updated. No other file of lingua/ and apps/ names one.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, _ops, _subclasses, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping
from torch.distributed.checkpoint import utils as dcp
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
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
# The kernels of attention that CUDA and the CPU take, for a plan, whose tensors are on neither.
flash_attention: OpOverload = torch.ops.aten._scaled_dot_product_flash_attention.default
cpu_attention: OpOverload = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
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
READ_NUMBER: OpOverload = torch.ops.aten._local_scalar_dense.default  # Tensor.item()
# Returns its argument, but on the meta device another tensor.
WAIT_TENSOR: OpOverload = torch.ops._c10d_functional.wait_tensor.default


class OperatorMode(TorchDispatchMode):
    """Sees every operator where nothing is compiled. Other modes import dynamo, which takes a
    second, and pass each operator through it."""

    # Without it, higher-order operators (checkpointing, flex attention) raise under the mode.
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def schema(func: OpOverload) -> Any:
    """The name and the arguments of an operator."""
    return func._schema


def dynamo_is_imported() -> bool:
    """Whether anything may be compiled. Importing dynamo to ask takes a second."""
    return "torch._dynamo" in sys.modules


# ---- process groups

# What ranks agree on without a collective.
default_store = c10d._get_default_store
# A group by its name, which is what the operators of compiled graphs have.
resolve_process_group = c10d._resolve_process_group


def set_group_timeout(group: dist.ProcessGroup, device_type: str, timeout: timedelta) -> None:
    """How long collectives of a group wait for other ranks, those on one type of device: torch's
    public functions set it when a group is made, and those of a mesh take no other."""
    backend = group._get_backend(torch.device(device_type))
    if hasattr(backend, "_set_default_timeout"):  # a fake one never waits
        backend._set_default_timeout(timeout)


# ---- modules, tensors and files

# Activation checkpointing of a module, whose parameters keep their names in state_dict.
checkpoint_wrapper = wrapping.checkpoint_wrapper
# The tensors of one type in what a model returns.
tree_map_only = _pytree.tree_map_only
# The part of a DTensor that this rank holds, of uneven and strided shards too.
compute_local_shape_and_global_offset = _utils.compute_local_shape_and_global_offset
# A part of a file as a file: one of DCP's has many tensors, each as torch.save wrote it.
create_file_view = dcp._create_file_view
# Allocations and frees on CUDA, recorded and written for pytorch.org/memory_viz.
record_memory_history = torch.cuda.memory._record_memory_history
dump_memory_snapshot = torch.cuda.memory._dump_snapshot


def version(t: Tensor) -> int:
    """How often `t` was changed in place: of an integer tensor, whether it was filled."""
    return t._version


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


@contextmanager
def resizes_observed(observe: Callable[[Any], None]) -> Iterator[None]:
    """Call `observe(storage)` once Python has changed the size of a storage, which no mode sees:
    FSDP allocates and frees gathered parameters so."""
    resize = torch.UntypedStorage.resize_

    def change(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        observe(storage)
        return result

    with patch.object(torch.UntypedStorage, "resize_", change):
        yield


@contextmanager
def fake_ranks(n: int) -> Iterator[None]:
    """A process group of n ranks of which this process is rank 0: the others do not exist, and
    collectives return at once."""
    from torch.testing._internal.distributed import fake_pg  # registers the backend

    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=n)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # They have meshes, which another of as many ranks would be given.
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()


@contextmanager
def training_on_meta() -> Iterator[None]:
    """Inside it, FSDP and torch's optimizers take parameters without memory, which FSDP refuses, as
    do optimizers with `fused` or `capturable`."""
    with ExitStack() as modes:
        check = patch.object(FSDPParamGroup, "_validate_no_meta_params", lambda group: None)
        modes.enter_context(check)
        for kind in ("fused_kernels", "capturable"):
            name = f"_get_{kind}_supported_devices"
            for module in [m for key, m in sys.modules.items() if key.startswith("torch.optim.")]:
                if hasattr(module, name):
                    devices = [*getattr(module, name)(), "meta"]
                    change = patch.object(module, name, lambda *_, devices=devices, **__: devices)
                    modes.enter_context(change)
        yield
