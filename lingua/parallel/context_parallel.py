"""Context parallelism: ranks that have the same rows, and compute a part of their positions each
(Ulysses: Jacobs et al., 2023, arXiv 2309.14509).

A rank takes its positions of the tokens that enter the model. Before attention one exchange makes
positions whole and heads apart, and one behind it positions apart again: attention runs as it is,
on a part of the heads. What leaves the model is of whole rows, equal on these ranks; the sum of
their gradients is that of the rows. Positions that do not divide have padding at the end.

A model's classes say what they compute by `over_positions`, each in its own body:
    pointwise: each position by itself, but for what its modules do. Of tensors behind the first
        argument, which are of whole rows, it is given the rank's positions.
    heads: attention. The modules of `all_heads` give all heads of a position, `wo` takes them.
    whole: of tokens alone, of whole rows.
    head: the last module, which is given the targets, and says by `padding` which do not count.

Shapes in comments: B rows, S positions, s of a rank, N features of all heads, n of a rank's.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from math import lcm
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lingua.base.errors import UserError
from lingua.parallel.mesh import positions_of_a_rank

# Modules of torch that compute each position by itself, or hold others.
POINTWISE = {nn.Linear, nn.Embedding, nn.RMSNorm, nn.LayerNorm, nn.Identity, nn.SiLU, nn.GELU}
POINTWISE |= {nn.ModuleList, nn.ModuleDict, nn.Sequential}


def kind_of(module: nn.Module) -> str | None:  # of its own class: a base may compute otherwise
    return type(module).__dict__.get("over_positions")


def undivided(modules: Mapping[str, Any], tp: int, cp: int) -> Iterator[str]:
    """What a model's classes do not say, and attention whose heads `tp * cp` does not divide."""
    key, last_first = f"distributed.cp_size = {cp}", reversed([*modules.items()])
    for cls, (name, module) in {type(m): (n, m) for n, m in last_first}.items():
        if kind_of(module) == "heads":
            n_heads = module.wo.in_features // module.head_dim
            if n_heads % (tp * cp):
                fit = [str(n) for n in range(1, n_heads // tp + 1) if n_heads % (tp * n) == 0]
                yield f"{key}: times tp_size it must divide {n_heads} heads: {', '.join(fit)}"
        elif cls not in POINTWISE and kind_of(module) not in ("pointwise", "whole", "head"):
            yield (
                f"{key}: {name or 'the model'} is a {cls.__name__}, which does not say whether it "
                "computes each position by itself (lingua.parallel.context_parallel); set it to 1"
            )


def divide_positions(
    model: nn.Module, blocks: Iterable[nn.Module], group: dist.ProcessGroup, tp: int
) -> None:
    """Have the ranks of a group divide the positions of the rows of a model with these blocks."""
    cut, first = Cut(group, tp), {"prepend": True, "with_kwargs": True}  # before a style of tp
    model.register_forward_pre_hook(
        lambda m, args, named: cut.begin(*args[:1], **named), prepend=True, with_kwargs=True
    )
    for block in blocks:  # which may be computed again after another forward: block(x, ctx)
        block.register_forward_pre_hook(lambda m, args: cut.begin(args[1].tokens, args[1].cache))
    for module in cast(Iterable[Any], model.modules()):
        kind = kind_of(module)
        if isinstance(module, nn.Embedding):
            module.register_forward_pre_hook(partial(cut.given, (0, 1, 0)), **first)
        elif kind == "head":
            module.register_forward_pre_hook(partial(cut.given, (1, 2, module.padding)), **first)
            module.register_forward_hook(cut.leave, with_kwargs=True)
        elif kind == "pointwise" and module is not model:
            module.register_forward_pre_hook(partial(cut.given, (1, 1, 0)), **first)
            module.register_forward_hook(cut.no_terms)
        elif kind == "heads":
            for name in module.all_heads:
                split = partial(cut.heads_apart, module.head_dim)
                module.get_submodule(name).register_forward_hook(split)
            module.wo.register_forward_pre_hook(cut.positions_apart, prepend=True)


class Cut:
    """The part of the positions that this rank has of each row, and the hooks that keep to it."""

    def __init__(self, group: dist.ProcessGroup, tp: int) -> None:
        self.group, self.size, self.rank, self.tp = group, group.size(), group.rank(), tp
        self.key = f"distributed.cp_size = {self.size}"
        self.positions = self.n = 0  # of a row, and of it on each rank; 0: each computes all

    def begin(self, tokens: Tensor, cache: Any = None, **others: Any) -> None:
        """A forward of a model, or of a block, with these of its arguments."""
        self.positions = tokens.shape[1] if cache is None else 0
        self.n = positions_of_a_rank(self.positions, self.size, self.tp)

    def given(self, which: Any, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Give a module its positions of tensors of whole rows, by `which`: those from an argument
        on, a dimension, and what padding is."""
        first, dim, padding = which

        def cut(t: Any) -> Any:
            if not self.positions or not isinstance(t, Tensor) or not t.ndim:
                return t
            at = min(dim, t.ndim - 1)  # the positions alone, where rows do not differ
            if t.shape[at] != self.positions:
                what = f"{type(module).__name__} was given {list(t.shape)}, not {self.positions}"
                raise UserError(f"{self.key}: {what} positions in dimension {at}")
            return self.padded(t, at, padding).narrow(at, self.rank * self.n, self.n)

        further = {name: cut(value) for name, value in kwargs.items()}
        return (*args[:first], *map(cut, args[first:])), further

    def padded(self, t: Tensor, dim: int, value: int = 0) -> Tensor:
        missing = self.n * self.size - t.shape[dim]
        return F.pad(t, (0, 0) * (t.ndim - dim - 1) + (0, missing), value=value) if missing else t

    def heads_apart(self, head_dim: int, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        """B s N -> B S n. Heads are repeated as far as there are too few."""
        if not self.positions:
            return out
        n_heads = out.shape[-1] // head_dim
        if (repeats := lcm(n_heads, self.size) // n_heads) > 1:
            heads = out.unflatten(-1, (n_heads, head_dim))
            out = heads.repeat_interleave(repeats, dim=2).flatten(-2)
        parts = out.unflatten(-1, (self.size, -1)).movedim(2, 0)  # ranks B s n
        return _Exchange.apply(parts, self.group).movedim(0, 1).flatten(1, 2)[:, : self.positions]

    def positions_apart(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """B S n -> B s N."""
        if not self.positions:
            return args
        parts = self.padded(args[0], 1).unflatten(1, (self.size, -1)).movedim(1, 0)  # ranks B s n
        return (_Exchange.apply(parts, self.group).movedim(0, 2).flatten(-2), *args[1:])

    def leave(self, module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
        """The sums of losses [V], those of each target [V B S], or logits, of all positions."""
        if not self.positions:
            return out
        if out.ndim == 1:
            return joined(out[None], 0, self.group).sum(0)
        if isinstance(out, DTensor):  # logits, split over the vocabulary
            part = joined(out.to_local(), 1, self.group)[:, : self.positions]
            shape = len(out), self.positions, out.shape[2]  # which tp need not divide
            sizes: Any = {"shape": torch.Size(shape), "stride": (shape[1] * shape[2], shape[2], 1)}
            return DTensor.from_local(part, out.device_mesh, out.placements, **sizes)
        dim = 1 if (*args[1:], kwargs.get("targets"))[0] is None else 2
        return joined(out, dim, self.group).narrow(dim, 0, self.positions)

    def no_terms(self, module: nn.Module, args: Any, out: Any) -> None:
        if self.positions and isinstance(out, tuple):
            what = f"{type(module).__name__} returns terms per row, of a rank's positions alone"
            raise UserError(f"{self.key}: {what}; set it to 1")


def joined(t: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks along a dimension. Each computes the gradients of its own."""
    t = t.contiguous()
    parts = [torch.empty_like(t) for _ in range(group.size())]
    dist.all_gather(parts, t.detach(), group=group)
    parts[group.rank()] = t
    return torch.cat(parts, dim)


class _Exchange(torch.autograd.Function):
    """Send the i-th part (ranks ...) to the i-th rank. Its gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, parts = group, parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Exchange.forward(ctx, grad, ctx.group), None
