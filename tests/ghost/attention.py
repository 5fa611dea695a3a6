"""Which kernels a layer of attention dispatches on the stub driver, forward and backward, by case:
JSON on standard output.

    tests/ghost/run DIR python -m tests.ghost.attention
"""

import json
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lingua.model.args import AttnImpl, TransformerArgs
from lingua.model.transformer import Attention, Context

ROWS, SEQ_LEN, DIM = 2, 1024, 1024
MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {"documents": True},
    "window": {"window": 100},
    "both": {"documents": True, "window": 100},
}


class Kernels(TorchDispatchMode):
    """Collects the operators of attention, and those of scores that are computed as a whole; values
    that the host reads count as operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2]
        if any(word in name for word in ("attention", "attn", "softmax", "local_scalar")):
            self.seen.add(name)
        return func(*args, **(kwargs or {}))


def kernels(
    impl: AttnImpl, dtype: torch.dtype, documents: bool = False, window: int | None = None
) -> list[str]:
    """Of a layer with grouped heads."""
    device = torch.device("cuda")
    args = TransformerArgs(dim=DIM, n_heads=16, n_kv_heads=4, sliding_window=window, attn_impl=impl)
    with device:
        layer = Attention(args, 1.0).to(dtype)
    x = torch.zeros(ROWS, SEQ_LEN, DIM, device=device, dtype=dtype, requires_grad=True)
    starts = torch.tensor([[0, 100, 500], [0, 1000, SEQ_LEN]]).to(device) if documents else None
    with Kernels() as found:
        ctx = Context(args, x[..., 0], starts)
        ctx.set_mask(args, dtype)
        layer(x, ctx).sum().backward()
    return sorted(found.seen)


def by_torch(dtype: torch.dtype) -> list[str]:
    """The control: torch's own choice for grouped heads and a mask."""
    q, k, v = (torch.zeros(1, n, 64, 64, device="cuda", dtype=dtype) for n in (16, 4, 4))
    mask = torch.ones(64, 64, dtype=torch.bool, device="cuda").tril()
    with Kernels() as found:
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return sorted(found.seen)


def main() -> None:
    found = {"control": by_torch(torch.bfloat16)}
    implementations: tuple[AttnImpl, ...] = ("auto", "sdpa", "varlen")
    for deterministic, impl, (name, mask) in product((False, True), implementations, MASKS.items()):
        torch.use_deterministic_algorithms(deterministic)
        found[f"{impl} {name} {deterministic}"] = kernels(impl, torch.bfloat16, **mask)
    for name, mask in MASKS.items():
        found[f"float32 {name}"] = kernels("sdpa", torch.float32, **mask)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
