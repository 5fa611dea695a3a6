"""The tensors of a run by name."""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lingua.init import canonical_name


def tensors_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Tensor]:
    """Every tensor of a run by name: `model.<name>` and `optim.<state>.<parameter name>`.

    These are the live tensors: saving reads them, loading fills them in place.
    """
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward without gradients the root is still whole
    tensors: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        tensors[f"model.{canonical_name(name)}"] = p.detach()
        state = {} if optimizer is None else optimizer.state.get(p, {})
        for key, value in sorted(state.items()):
            tensors[f"optim.{key}.{canonical_name(name)}"] = value
    for name, b in model.named_buffers():
        if name not in transient:
            tensors[f"model.{canonical_name(name)}"] = b
    return tensors
