"""Optimizers whose update and state are functions of a whole parameter, on any mesh: the rows and
columns of Adafactor, the Kronecker factors of Shampoo and SOAP."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lingua.parallel.tensors import local, whole
from lingua.parallel.whole import part_of


def on_whole(
    groups: list[dict[str, Any]], build: Callable[[list[dict[str, Any]]], Optimizer]
) -> "WholeOptimizer":
    """An optimizer that sees plain, whole parameters and gradients, one parameter in each `step`.

    Every parameter has an owner among the ranks, which alone holds its state, of any shapes. All
    ranks gather the parameter and its gradient; the owner computes the update and sends the result
    to the others. No sum is made over ranks: the update is equal to the bit on all meshes on which
    the gradient is.

    Memory: a rank holds the state of its parameters, that of each whole, and in a step a copy of
    it, one whole parameter with its gradient, what the optimizer's `step` needs, and a gathered
    tensor of another rank. What the constructor of the optimizer creates is held by every rank, for
    all parameters, until `adapt` returns.
    Traffic: in a step, each rank receives all parameters twice and all gradients once.
    Time: as many owners work at once as there are ranks. In `adapt`, every rank takes the trial
    step of every parameter. The host waits for the device where a step reads a number or keeps one
    on the host, as that of torch's Adafactor does.

    `groups` are parameter groups of a sharded model, as torch.optim takes them. `build` gives the
    optimizer of such groups, in which a plain parameter stands for each of the model's.
    """
    return WholeOptimizer(groups, build)


class WholeOptimizer(Optimizer):
    """What `on_whole` returns. Its state is that of the parameters that this rank owns."""

    def __init__(
        self, groups: list[dict[str, Any]], build: Callable[[list[dict[str, Any]]], Optimizer]
    ) -> None:
        super().__init__(groups, {})
        # The parameters that `inner` has: they have the right shape, and memory in their turn.
        self.plain = {
            p: nn.Parameter(_without_memory(p, p.device), p.requires_grad)
            for group in self.param_groups
            for p in group["params"]
        }
        self.inner = build(
            [g | {"params": [self.plain[p] for p in g["params"]]} for g in self.param_groups]
        )
        state = self.inner.state
        self.state.update({p: state[q] for p, q in self.plain.items() if q in state})
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(inner_group | {"params": group["params"]})
        # state of the parameters of other ranks, without memory
        self.elsewhere: dict[nn.Parameter, dict[str, Any]] = {}
        started = dist.is_initialized()
        self.rank, self.n_ranks = (dist.get_rank(), dist.get_world_size()) if started else (0, 1)
        # Rounds of parameters of about the same size. The owner of one is its index in its round.
        turns = [(p, group) for group in self.param_groups for p in group["params"]]
        turns.sort(key=lambda turn: -turn[0].numel())
        self.rounds = [turns[i : i + self.n_ranks] for i in range(0, len(turns), self.n_ranks)]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without a closure
        for turns in self.rounds:
            due = {owner: turn for owner, turn in enumerate(turns) if turn[0].grad is not None}
            for owner, (p, group) in due.items():
                gathered = whole(p.detach()), whole(p.grad)
                if owner == self.rank:
                    value, grad = gathered
                elif p not in self.elsewhere:  # the first step, which is that of `create_state`
                    self._update(p, group, *gathered)
                    state = self.state.pop(p).items()
                    self.elsewhere[p] = {key: _without_memory(t, "meta") for key, t in state}
            if self.rank in due:
                value = self._update(*due[self.rank], value, grad)
            for owner, (p, _) in due.items():
                new = value if owner == self.rank else self.plain[p].new_empty(p.shape)
                if self.n_ranks > 1:
                    dist.broadcast(new, owner)
                local(p).copy_(part_of(new, p))

    def _update(
        self, p: nn.Parameter, group: dict[str, Any], value: Tensor, grad: Tensor
    ) -> Tensor:
        """The value of a parameter after a step of `inner` in which it has no other."""
        plain = self.plain[p]
        no_memory, plain.data, plain.grad = plain.data, value, grad
        self.inner.param_groups = [group | {"params": [plain]}]
        self.inner.state = defaultdict(dict, {plain: self.state[p]})
        self.inner.step()
        value, plain.data, plain.grad = plain.data.contiguous(), no_memory, None
        # What `adapt` refuses: settings and state that are not of one parameter.
        group.update(self.inner.param_groups[0] | {"params": group["params"]})
        self.state.update({k: v for k, v in self.inner.state.items() if k is not plain})
        return value


def _without_memory(t: Any, device: Any) -> Any:
    """A plain tensor of the whole shape and dtype of `t`, with the memory of one element; what is
    no tensor, as it is."""
    if not isinstance(t, Tensor):
        return t
    return torch.empty((), dtype=t.dtype, device=device).expand(t.shape)
