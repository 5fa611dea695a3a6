"""The tensors of a run by name, and the settings of its optimizer as JSON."""

import json
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lingua.dtensor import as_shard
from lingua.init import canonical_name


def tensors_of(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Tensor]:
    """Every tensor of a run by name: `model.<name>` and `optim.<state>.<parameter name>`.

    These are the live tensors: saving reads them, loading fills them in place. Optimizer state that
    is neither a DTensor nor 0-dim is this rank's part of a tensor sharded as its parameter is.
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
            whole = isinstance(value, DTensor) or value.ndim == 0
            tensors[f"optim.{key}.{canonical_name(name)}"] = value if whole else as_shard(value, p)
    for name, b in model.named_buffers():
        if name not in transient:
            tensors[f"model.{canonical_name(name)}"] = b
    return tensors


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Each parameter group without its parameters and without values that JSON does not have."""
    return [
        {key: value for key, value in group.items() if key != "params" and _is_json(value)}
        for group in optimizer.param_groups
    ]


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
