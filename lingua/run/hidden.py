"""The hidden states of a model on a mesh, by module name: what `Run.hidden` gives a probe."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lingua.base.errors import UserError
from lingua.parallel.mesh import cp_group, cp_size, positions_of_a_rank
from lingua.parallel.plan import find_modules
from lingua.parallel.tensors import whole


@contextmanager
def recorded(
    model: nn.Module, patterns: Sequence[str], args: Any, mesh: DeviceMesh
) -> Iterator[dict[str, Tensor]]:
    """Inside it, a forward of the model puts what the modules of these patterns return into the
    dict: whole tensors by module name, the last one of a module that is called several times.
    Called by every rank.

    Under tensor parallelism a part is made whole where it is a DTensor before the module's style
    makes it plain, or where it has a rank's share of the `data.seq_len` positions (dim 1). Another
    plain tensor must be equal on all tp ranks. With context parallelism all must be parts, as they
    are outside of attention. Compiled blocks run without the compiler: they do not call hooks that
    are younger than they are.

    Raises UserError where a pattern matches no module, or a module returns something else.
    """
    states: dict[str, Tensor] = {}
    styled: dict[str, Tensor | None] = {}  # made whole before the style has its turn
    plain: dict[str, Tensor] = {}  # sums of those that must be equal on all tp ranks
    tp, cp, seq_len = mesh["tp"], cp_size(mesh), args.data.seq_len
    n = positions_of_a_rank(seq_len, cp, tp.size())

    def see(name: str, module: nn.Module, inputs: Any, out: Any) -> None:
        t = _first(name, out)
        # Of an embedding split by rows, torch keeps what makes it whole for one use: the style's.
        is_sum = isinstance(t, DTensor) and any(p.is_partial() for p in t.placements)
        styled[name] = t.full_tensor() if isinstance(t, DTensor) and not is_sum else None

    def keep(name: str, module: nn.Module, inputs: Any, out: Any) -> None:
        t = styled.pop(name)
        if t is None:
            t = _first(name, out)
            part = t.ndim > 2 and t.shape[1] * tp.size() == n
            if part and not isinstance(t, DTensor):
                t = DTensor.from_local(t, tp, [Shard(1)])
            elif tp.size() > 1 and not isinstance(t, DTensor):
                plain[name] = t.float().nan_to_num().sum()
        states[name] = whole(t)
        if cp > 1 and getattr(module, "over_positions", "") != "head":
            states[name] = _joined(name, states[name], n, mesh)[:, :seq_len]

    with ExitStack() as hooks:
        for name, module in find_modules(model, patterns).items():
            first = module.register_forward_hook(partial(see, name), prepend=True)
            hooks.callback(first.remove)
            hooks.callback(module.register_forward_hook(partial(keep, name)).remove)
        if args.distributed.compile:
            hooks.enter_context(torch.compiler.set_stance("force_eager"))
        yield states
    if plain:
        sums = torch.stack(list(plain.values()))
        largest = torch.stack((sums, -sums))
        dist.all_reduce(largest, dist.ReduceOp.MAX, tp.get_group())
        parts = [n for n, a, b in zip(plain, *largest.tolist(), strict=True) if a != -b]
        if parts:
            raise UserError(
                f"hidden states: tensor-parallel ranks have different parts of {', '.join(parts)}, "
                "split by no style of its own; name a module that has one, or that contains it"
            )


def _joined(name: str, t: Tensor, n: int, mesh: DeviceMesh) -> Tensor:
    """All positions of a module's states, of which each cp rank has n."""
    from lingua.parallel.context_parallel import joined

    if (group := cp_group(mesh)) is None or t.ndim < 2 or t.shape[1] != n:
        need = f"must have {n} positions (dim 1) with cp_size = {cp_size(mesh)}"
        raise UserError(f"hidden states: {name} has {list(t.shape)}; {need}")
    return joined(t, 1, group)


def _first(name: str, out: Any) -> Tensor:
    """What a module returns, without the terms per row that it may return with it."""
    t = out[0] if isinstance(out, tuple) else out
    if not isinstance(t, Tensor):
        raise UserError(f"hidden states: {name} returns {type(t).__name__}; must be a tensor")
    return t
