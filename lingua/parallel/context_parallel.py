"""Context parallelism: ranks that have the same rows, and compute a part of their positions each
(Ulysses: Jacobs et al., 2023, arXiv 2309.14509).

Where a row's tokens enter the model a rank takes its positions of them. Before attention one
exchange makes positions whole and heads apart, and one behind it makes positions apart again, so
that attention runs as it is, on a part of the heads. What leaves the model is of whole rows, equal
on all these ranks. A rank's gradients are those of its part: their sum over the ranks is the row's.

A model's classes say what they compute by `over_positions`, in their own body:
    pointwise: each position by itself, but for what their modules do; of tensors besides the first,
        which are of whole rows, they are given the rank's positions.
    heads: attention. The modules of `all_heads()` give all heads of a position, `wo` takes them.
    whole: of tokens alone, of whole rows.

Shapes in comments: B rows, S positions, s of a rank, N features of all heads, n of a rank's.
"""

from collections.abc import Iterator
from functools import partial
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lingua.base.errors import UserError
from lingua.model.head import Head
from lingua.parallel.mesh import cp_group
from lingua.parallel.plan import ParallelPlan, blocks_of, modules_of

KINDS = ("pointwise", "heads", "whole")
# Modules of torch that compute each position by itself, or hold others.
POINTWISE = (nn.Linear, nn.Embedding, nn.RMSNorm, nn.LayerNorm, nn.Identity, nn.SiLU, nn.GELU)
POINTWISE += (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def undivided(model: nn.Module, tp: int, cp: int) -> Iterator[str]:
    """A line for each class of a plain model that does not say how it computes positions, and for
    attention whose heads `tp * cp` does not divide."""
    unsaid: dict[type, str] = {}
    for name, module in modules_of(model).items():
        if type(module) not in POINTWISE and kind_of(module) not in KINDS:
            unsaid.setdefault(type(module), name or "the model")
        elif kind_of(module) == "heads":
            heads = module.wo.in_features // module.head_dim
            if heads % (tp * cp):
                fit = [n for n in range(1, heads // tp + 1) if heads % (tp * n) == 0]
                yield (
                    f"distributed.cp_size = {cp}: times tp_size, {tp * cp}, must divide the "
                    f"{heads} heads of {name}: one of {', '.join(map(str, fit))}"
                )
                break
    for cls, name in unsaid.items():
        yield (
            f"distributed.cp_size = {cp}: {name} is a {cls.__name__}, whose class does not say "
            'whether it computes each position by itself (over_positions = "pointwise"; '
            "lingua.parallel.context_parallel); set it to 1"
        )


def kind_of(module: nn.Module) -> str | None:
    """What a module's class says of itself: a derived class may compute otherwise."""
    return type(module).__dict__.get("over_positions")


def divide_positions(model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
    """Have the ranks of a group of `mesh` divide the positions of rows among themselves."""
    group = cp_group(mesh)
    assert group is not None
    cut = Cut(group, mesh["tp"].size())
    modules = modules_of(model)
    model.register_forward_pre_hook(cut.begin, prepend=True, with_kwargs=True)
    first: Any = {"prepend": True, "with_kwargs": True}  # before a style of tensor parallelism
    for module in modules.values():
        if module is model:
            continue
        if isinstance(module, nn.Embedding):
            module.register_forward_pre_hook(partial(cut.given, 0, 1), **first)
        elif isinstance(module, Head):
            module.register_forward_pre_hook(partial(cut.given, 1, 2), **first)
            module.register_forward_hook(cut.leave, with_kwargs=True)
        elif kind_of(module) == "pointwise":
            module.register_forward_pre_hook(partial(cut.given, 1, 1), **first)
        elif kind_of(module) == "heads":
            for name in module.all_heads():
                split = partial(cut.heads_apart, module.head_dim)
                module.get_submodule(name).register_forward_hook(split)
            module.wo.register_forward_pre_hook(cut.positions_apart, prepend=True)
    for name, block in ((n, m) for n, m in modules.items() if m in blocks_of(model, plan)):
        block.register_forward_hook(partial(cut.no_terms, name))


class Cut:
    """The part of the positions that this rank has of each row, and the hooks that keep to it."""

    def __init__(self, group: dist.ProcessGroup, tp: int) -> None:
        self.group, self.size, self.rank, self.tp = group, group.size(), group.rank(), tp
        self.positions = 0  # of a row of this forward; 0: all ranks compute all of them

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = args[0] if args else kwargs["tokens"]
        n = tokens.shape[1]
        divided = kwargs.get("cache") is None and n % (self.size * self.tp) == 0
        if not divided and torch.is_grad_enabled():
            raise UserError(
                f"distributed.cp_size = {self.size}: a forward of {n} positions is trained, which "
                "this and tp_size do not divide"
            )
        self.positions = n if divided else 0

    def part(self, t: Tensor, dim: int) -> Tensor:
        """This rank's positions of a tensor of whole rows."""
        n = self.positions // self.size
        if t.shape[dim] != self.positions:
            raise UserError(
                f"distributed.cp_size = {self.size}: a tensor {list(t.shape)} is given to a module "
                f"that takes {self.positions} positions of it (dim {dim})"
            )
        return t.narrow(dim, self.rank * n, n)

    def given(
        self, first: int, dim: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give a module its positions of the tensors from the argument `first` on."""

        def cut(t: Any) -> Any:
            return self.part(t, dim) if self.positions and isinstance(t, Tensor) else t

        further = {name: cut(value) for name, value in kwargs.items()}
        return (*args[:first], *map(cut, args[first:])), further

    def heads_apart(self, head_dim: int, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        """B s N -> B S n. Heads are repeated as far as there are too few."""
        if not self.positions:
            return out
        n_heads = out.shape[-1] // head_dim
        if repeats := lcm(n_heads, self.size) // n_heads - 1:
            heads = out.unflatten(-1, (n_heads, head_dim))
            out = heads.repeat_interleave(repeats + 1, dim=2).flatten(-2)
        parts = out.unflatten(-1, (self.size, -1)).movedim(2, 0)  # ranks B s n
        return _Exchange.apply(parts, self.group).movedim(0, 1).flatten(1, 2)

    def positions_apart(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """B S n -> B s N."""
        if not self.positions:
            return args
        parts = args[0].unflatten(1, (self.size, -1)).movedim(1, 0)  # ranks B s n
        out = _Exchange.apply(parts, self.group).movedim(0, 2).flatten(-2)
        return (out, *args[1:])

    def leave(self, module: nn.Module, args: Any, kwargs: dict[str, Any], out: Tensor) -> Tensor:
        """Logits, or losses of each target, of all positions; or the sums of the losses."""
        if not self.positions:
            return out
        targets = args[1] if len(args) > 1 else kwargs.get("targets")
        if targets is not None and out.ndim == 1:
            return _Sum.apply(out, self.group)
        if isinstance(out, DTensor):  # logits, split over the vocabulary
            part = _Join.apply(out.to_local(), 1, self.group)
            shape = torch.Size((len(out), self.positions, out.shape[2]))  # which tp need not divide
            stride = (shape[1] * shape[2], shape[2], 1)
            how = {"run_check": False, "shape": shape, "stride": stride}
            return DTensor.from_local(part, out.device_mesh, out.placements, **how)
        return _Join.apply(out, 1 if targets is None else 2, self.group)

    def no_terms(self, name: str, module: nn.Module, args: Any, out: Any) -> None:
        if self.positions and isinstance(out, tuple):
            raise UserError(
                f"distributed.cp_size = {self.size}: {name} returns terms per row, of a rank's "
                "positions alone; set it to 1"
            )


def joined(t: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """All positions of a tensor of which each rank has its part."""
    return _Join.apply(t, dim, cp_group(mesh))


class _Exchange(torch.autograd.Function):
    """Send the i-th part (ranks ...) to the i-th rank. Its gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _Sum(torch.autograd.Function):
    """The sum over the ranks. Each computes the gradients of its own summand."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = t.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Join(torch.autograd.Function):
    """The parts of all ranks along a dimension. Each computes the gradients of its own."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.rank, ctx.n = dim, group.rank(), t.shape[dim]
        parts = [torch.empty_like(t) for _ in range(group.size())]
        dist.all_gather(parts, t.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(ctx.dim, ctx.rank * ctx.n, ctx.n), None, None
