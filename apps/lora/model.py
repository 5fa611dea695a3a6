"""A model whose linear layers have low-rank changes: y = W x + alpha / rank * up (down x)."""

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lingua.app import Built
from lingua.base.errors import UserError
from lingua.base.hashing import hash_bits
from lingua.checkpoint.tensors import tensors_of
from lingua.model.transformer import Dropout
from lingua.parallel.plan import find_modules

if TYPE_CHECKING:  # it imports this module
    from apps.lora import LoraArgs


class Adapted(nn.Linear):
    """A linear layer, frozen, and its change. `down` is float32 [rank, in], `up` [out, rank]."""

    over_positions = "pointwise"

    def __init__(self, base: nn.Linear, name: str, args: "LoraArgs") -> None:
        sizes, bias = (base.in_features, base.out_features), base.bias is not None
        super().__init__(*sizes, bias, device="meta")
        self.scale = args.alpha / args.rank
        self.down = nn.Parameter(torch.empty(args.rank, sizes[0], device="meta"))
        self.up = nn.Parameter(torch.empty(sizes[1], args.rank, device="meta"))
        # Not a module of this one, whose parallel style would be applied to it.
        self.dropout = Dropout(args.dropout, name).forward
        self.noise: Tensor | None = None  # int64 B S, a key of each position; None: nothing is zero

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.noise is None else self.dropped(x, self.noise)
        return super().forward(x) + F.linear(self.scale * F.linear(kept, self.down), self.up)

    def dropped(self, x: Tensor, noise: Tensor) -> Tensor:
        """x (B S in) with features zeroed. Of one that tensor parallelism splits, a rank has its
        part of what all ranks decide."""
        ones = torch.ones((), dtype=x.dtype, device=noise.device)
        factors = self.dropout(ones.expand(*noise.shape, self.in_features), noise)
        if isinstance(x, DTensor):
            mesh = x.device_mesh
            whole = DTensor.from_local(factors, mesh, [Replicate()], run_check=False)
            factors = whole.redistribute(placements=x.placements)
        return x * factors

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "down"):  # not yet where the base class is made
            nn.init.kaiming_uniform_(self.down, math.sqrt(5))
            nn.init.zeros_(self.up)


def adapt(built: Built, args: "LoraArgs", dtype: torch.dtype) -> Built:
    """A built model whose layers `args.targets` have changes. All else is its base: frozen, in
    `dtype`, which it computes in. Raises UserError where a target is no linear layer."""
    model = built.module
    base = frozenset(name.removeprefix("model.") for name in tensors_of(model))
    try:
        layers = find_modules(model, args.targets)
    except UserError as error:
        need = "a pattern has as many parts as the name, as layers.*.attention.wq has"
        raise UserError(f"lora.targets: {error}; {need}") from None
    for name, layer in layers.items():
        if type(layer) is not nn.Linear:
            kind = type(layer).__name__
            raise UserError(f"lora.targets: {name} is {kind}; must be a torch.nn.Linear")
        model.set_submodule(name, Adapted(layer, name, args))
    for name, p in model.named_parameters():
        if name in base:
            p.requires_grad_(False)
            if p.is_floating_point():
                p.data = p.data.to(dtype)
    if args.dropout:
        model.register_forward_pre_hook(_give_noise, with_kwargs=True)
    # Of what is frozen no gradient is computed: a third of the work of its products.
    matrices = [m for m in model.modules() if isinstance(m, nn.Linear)]
    frozen = sum(m.weight.numel() for m in matrices)
    new = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Built(model, built.plan, built.flops_per_token - 2 * frozen + 6 * new, base)


def _give_noise(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before each forward of the model: give its layers a key of each position, or none."""
    tokens, noise = args[0], kwargs.get("noise")
    if noise is not None:
        noise = hash_bits(noise[:, None], torch.arange(tokens.shape[1], device=tokens.device))
    for module in model.modules():
        if isinstance(module, Adapted):
            module.noise = noise
