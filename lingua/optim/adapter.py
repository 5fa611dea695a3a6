"""Any torch.optim.Optimizer, as the loop and the checkpoint need it.

The loop needs a step that changes nothing where a flag on the device forbids it. The checkpoint
needs all state as tensors by parameter name before the first step, so that it can be loaded, while
most optimizers create their state only in that step.
"""

from collections import UserDict, defaultdict
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lingua.base.errors import UserError
from lingua.optim.optimizer import AdamWMuon, LoopOptimizer, local_grad
from lingua.optim.whole import WholeOptimizer
from lingua.parallel.init import canonical_name
from lingua.parallel.tensors import as_shard, local
from lingua.parallel.torch_private import foreach_div_, takes_found_inf


def on_shards(
    groups: list[dict[str, Any]], build: Callable[[list[dict[str, Any]]], Optimizer]
) -> "Adapter":
    """An optimizer that works on each element alone, run on the parts that this rank holds, without
    DTensor operations; its parameters may live on different meshes. For one that needs more than
    an element (a norm, a matrix) there is `lingua.optim.whole.on_whole`.

    `groups` are parameter groups of a sharded model, as torch.optim takes them. `build` gives the
    optimizer of such groups, in which a plain parameter stands for each of the model's.
    """
    owners: dict[nn.Parameter, nn.Parameter] = {}  # the model's parameters by their plain ones
    shards = []
    for group in Optimizer(groups, {}).param_groups:
        plain = [nn.Parameter(local(p.detach()), p.requires_grad) for p in group["params"]]
        owners |= zip(plain, group["params"], strict=True)
        shards.append({**group, "params": plain})
    return Adapter(build(shards), owners)


def adapt(optimizer: Optimizer, model: nn.Module) -> LoopOptimizer:
    """An optimizer of a model, for `update` and for checkpoints. Called before the first backward.

    Its state begins as what it first stores in a step in which parameters and gradients are zero.
    Each step keeps a copy of parameters and state, except with torch's fused optimizers, which
    suppress an update themselves. Raises UserError where its state cannot be saved and loaded.
    """
    if isinstance(optimizer, AdamWMuon):
        return optimizer
    adapter = optimizer if isinstance(optimizer, Adapter) else Adapter(optimizer, {})
    names = {p: canonical_name(name) for name, p in model.named_parameters()}
    for group in adapter.param_groups:
        group["param_names"] = [names[p] for p in group["params"]]
    if problems := adapter.create_state():
        inner = adapter.inner
        kind = type(inner.inner if isinstance(inner, WholeOptimizer) else inner).__name__
        raise UserError(f"{kind} cannot be resumed from a checkpoint:\n  " + "\n  ".join(problems))
    return adapter


class _Recorded(UserDict[str, Any]):
    """The state of a parameter, which keeps what each entry was when it was first set."""

    def __init__(self, *state: dict[str, Any]) -> None:
        self.first: dict[str, Any] = {}
        super().__init__(*state)

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = value.clone() if isinstance(value, Tensor) else deepcopy(value)
        super().__setitem__(key, value)


class Adapter(LoopOptimizer):
    """Wraps another optimizer, `inner`, so that its parameter groups and state are those of the
    model's parameters. `owners` maps each parameter that `inner` has in place of one of the model's
    to that one."""

    def __init__(self, inner: Optimizer, owners: dict[nn.Parameter, nn.Parameter]) -> None:
        groups = [
            {**group, "params": [owners.get(p, p) for p in group["params"]]}
            for group in inner.param_groups
        ]
        super().__init__(groups, {})
        self.inner = inner
        self.shards = {p: shard for shard, p in owners.items()}
        # state that other ranks hold, of any shape; None: each has its part of all
        self.elsewhere = inner.elsewhere if isinstance(inner, WholeOptimizer) else None

    def state_of(self, p: nn.Parameter) -> dict[str, Tensor]:
        state = super().state_of(p)
        if self.elsewhere is not None:
            return state | self.elsewhere.get(p, {})
        parts = [key for key, t in state.items() if t.ndim and not isinstance(t, DTensor)]
        return state | {key: as_shard(state[key], p) for key in parts}

    @torch.no_grad()
    def step_if(self, admitted: Tensor, divisor: Tensor) -> None:
        if takes_found_inf(self.inner) and admitted.device.type != "mps":  # which ignores both
            vars(self.inner).update(grad_scale=divisor, found_inf=(~admitted).float())
            self._inner_step()
            return
        owned = [p for group in self.param_groups for p in group["params"]]
        if grads := [local(p.grad) for p in owned if p.grad is not None]:
            foreach_div_(grads, divisor)
        for grad in grads:  # a step may raise where one is not finite, as that of eigh does
            grad.masked_fill_(~admitted, 0.0)
        values = [(p, local(p).clone()) for p in owned]
        states = [
            (state, key, t, local(t).clone())
            for state in self.state.values()
            for key, t in state.items()
        ]
        self._inner_step()
        for p, old in values:
            torch.where(admitted, local(p), old, out=local(p))
        for state, key, t, old in states:
            # The step may have replaced the tensor by one of another layout in memory, which rounds
            # in another way than what a checkpoint restores.
            torch.where(admitted.to(old.device), local(state[key]), old, out=local(t))
            state[key] = t

    def _inner_step(self) -> None:
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: group[key] for key in inner if key != "params"})
        for p, shard in self.shards.items():
            shard.data = local(p)  # FSDP may have moved it: its first forward pads uneven ones
            shard.grad = None if p.grad is None else local_grad(p)
        self.inner.step()
        for shard in self.shards.values():
            shard.grad = None

    @torch.no_grad()
    def create_state(self) -> list[str]:
        """Create the inner optimizer's state by a trial step, which leaves the parameters
        unchanged. Returns a line for each part of the state that a checkpoint cannot hold."""
        recorded = {p: _Recorded(state) for p, state in self.inner.state.items()}
        self.inner.state = defaultdict(_Recorded, recorded)
        groups_before = [dict(group) for group in self.inner.param_groups]
        self._trial_step()
        problems = {
            key: f"its step changes {key} of its parameter groups"
            for before, after in zip(groups_before, self.inner.param_groups, strict=True)
            for key in after
            if key != "param_names" and before.get(key) is not after[key]
        }
        created, self.inner.state = self.inner.state, defaultdict(dict)
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                inner_p = self.shards.get(p, p)
                state = created.pop(inner_p, _Recorded()).first
                for key, t in (state | (self.elsewhere or {}).get(p, {})).items():
                    if not self._fits(t, p):
                        need = "be a tensor on its device (of torch's with capturable=True or "
                        need += "fused=True), of the parameter's shape or, with on_whole, any"
                        problems.setdefault(key, f"state {key} of {name}: must {need}")
                if state:
                    self.state[p] = self.inner.state[inner_p] = state
        problems |= {
            str(key): f"it has state that belongs to no parameter: {key}" for key in created
        }
        return list(problems.values())

    def _fits(self, t: Any, p: nn.Parameter) -> bool:
        if not isinstance(t, Tensor):
            return False
        if self.elsewhere is not None:
            return t.ndim == 0 or t.device in (p.device, torch.device("meta"))
        return t.device == p.device and (t.ndim == 0 or local(t).shape == local(p).shape)

    def _trial_step(self) -> None:
        """A step in which parameters and gradients are zero."""
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        values = [local(p).clone() for p in trained]
        for p in trained:
            local(p).zero_()
            p.grad = torch.zeros_like(p)
        self._inner_step()
        self.zero_grad()
        for p, value in zip(trained, values, strict=True):
            local(p).copy_(value)
