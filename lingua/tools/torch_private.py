"""The private interfaces of torch that only tools use, each with what it is for."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem as dcp_files
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from lingua.parallel.torch_private import OpOverload, TorchDispatchMode

# The kernels of attention that CUDA and the CPU take, for a plan, whose tensors are on neither.
flash_attention: OpOverload = torch.ops.aten._scaled_dot_product_flash_attention.default
efficient_attention: OpOverload = torch.ops.aten._scaled_dot_product_efficient_attention.default
cpu_attention: OpOverload = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
READ_NUMBER: OpOverload = torch.ops.aten._local_scalar_dense.default  # Tensor.item()
# Adds a product to `out`, unrounded. On the meta device torch 2.11 takes the dtype for `beta`.
ADD_PRODUCT: OpOverload = torch.ops.aten.addmm.dtype_out
# Returns its argument, but on the meta device another tensor.
WAIT_TENSOR: OpOverload = torch.ops._c10d_functional.wait_tensor.default
# Where a tensor is in a file of DCP, as its metadata has it.
StorageInfo = dcp_files._StorageInfo


class OperatorMode(TorchDispatchMode):
    """Sees every operator where nothing is compiled. Other modes import dynamo, which takes a
    second, and pass each operator through it."""

    # Without it, higher-order operators (checkpointing, flex attention) raise under the mode.
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextmanager
def resizes_observed(observe: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `observe(storage)` once Python has changed the size of a storage, which no mode sees:
    FSDP allocates and frees gathered parameters so."""
    resize = torch.UntypedStorage.resize_

    def change(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
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
        # torch 2.15 records which stream uses a gradient that is not on the CPU: here it has none.
        if hasattr(_fsdp_collectives, name := "record_grad_output_stream"):
            modes.enter_context(patch.object(_fsdp_collectives, name, lambda *_: None))
        for kind in ("fused_kernels", "capturable"):
            name = f"_get_{kind}_supported_devices"
            for module in [m for key, m in sys.modules.items() if key.startswith("torch.optim.")]:
                if hasattr(module, name):
                    devices = [*getattr(module, name)(), "meta"]
                    change = patch.object(module, name, lambda *_, devices=devices, **__: devices)
                    modes.enter_context(change)
        yield
