"""Any torch.optim.Optimizer, as the loop and the checkpoint need it.

The loop needs a step that changes nothing where a flag on the device forbids it. The checkpoint
needs all state as tensors by parameter name before the first step, so that it can be loaded, while
most optimizers create their state only in that step.
"""

import inspect
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lingua.dtensor import local
from lingua.errors import UserError
from lingua.init import canonical_name
from lingua.optim.optimizer import AdamWMuon, local_grad, unscale

# State of each parameter, a float32 scalar: 1 once it had its first update. Before that, its other
# state is a placeholder of the right shapes for what the optimizer creates in that update.
UPDATED = "updated"


def on_shards(
    groups: list[dict[str, Any]], build: Callable[[list[dict[str, Any]]], Optimizer]
) -> "Adapter":
    """An optimizer that works on each element alone, run on the parts that this rank holds.

    It needs no DTensor operations, and its parameters may live on different meshes. One that needs
    more than an element at a time (a norm, a matrix) would depend on how parameters are sharded:
    it must work on DTensors, with `lingua.dtensor.map_whole` where it needs whole matrices.

    Args:
        groups: parameter groups of a sharded model, as torch.optim takes them.
        build: gives the optimizer of such groups, in which a plain parameter that shares its
            storage stands for each of the model's.
    """
    owners: dict[nn.Parameter, nn.Parameter] = {}  # the model's, by what stands for them
    shards = []
    for group in Optimizer(groups, {}).param_groups:
        plain = [nn.Parameter(local(p.detach()), p.requires_grad) for p in group["params"]]
        owners |= zip(plain, group["params"], strict=True)
        shards.append({**group, "params": plain})
    return Adapter(build(shards), owners)


def adapt(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """An optimizer of a model, for `update` and for checkpoints. Called by every rank, before the
    first backward.

    A trial step creates its state, which can then be saved and loaded. A parameter's first update
    is nevertheless that of a new optimizer, unless its state was loaded. Where the optimizer does
    not follow the protocol of torch.amp.GradScaler, as torch's fused ones do, each step keeps a
    copy of parameters and state to restore.

    Raises:
        UserError: its state cannot be saved and loaded, or its updates cannot be suppressed.
    """
    if isinstance(optimizer, AdamWMuon):
        return optimizer
    adapter = optimizer if isinstance(optimizer, Adapter) else Adapter(optimizer, {})
    kind = type(adapter.inner).__name__
    names = {p: canonical_name(name) for name, p in model.named_parameters()}
    for group in adapter.param_groups:
        if not names.keys() >= set(group["params"]):
            raise UserError(f"{kind}: has parameters that are not the model's, and are not saved")
        group["param_names"] = [names[p] for p in group["params"]]
    arguments = inspect.signature(adapter.inner.step).parameters.values()
    if any(argument.default is argument.empty for argument in arguments):
        raise UserError(f"{kind}: its step needs a closure, which the training loop cannot give")
    if problems := adapter.create_state():
        raise UserError(f"{kind} cannot be resumed from a checkpoint:\n  " + "\n  ".join(problems))
    return adapter


class Adapter(Optimizer):
    """Another optimizer, with parameter groups and state by the model's own parameters.

    Args:
        inner: the optimizer that does the work.
        owners: the model's parameters by those that stand for them in `inner`, where some do.
    """

    _step_supports_amp_scaling = True

    def __init__(self, inner: Optimizer, owners: dict[nn.Parameter, nn.Parameter]) -> None:
        groups = [
            {**group, "params": [owners.get(p, p) for p in group["params"]]}
            for group in inner.param_groups
        ]
        super().__init__(groups, {})
        self.inner = inner
        self.inner_suppresses = getattr(inner, "_step_supports_amp_scaling", False)
        self.shards = {p: shard for shard, p in owners.items()}
        # What the state of parameters is before their first update, for those that had none.
        self.new: dict[nn.Parameter, dict[str, Tensor]] = {}
        self.stepped = False

    @torch.no_grad()
    def step(self) -> None:
        """One update, suppressed as AdamWMuon.step. Where it is the first of a parameter, the host
        waits for the device: what the optimizer creates then could not be taken back later."""
        found_inf = getattr(self, "found_inf", None)
        unscale(self)
        first = self._first_updates()
        if first and found_inf is not None and found_inf.item():
            return
        for p in first:
            self.state[p].clear()
            self.state[p].update(self.new.pop(p))
        if found_inf is None or self.inner_suppresses:
            self._inner_step(found_inf)
        else:
            self._inner_step_or_not(found_inf == 0)
        for p in first:
            self.state[p] = self.inner.state[self._standing(p)]
            self.state[p][UPDATED] = torch.ones((), device=p.device)

    def _first_updates(self) -> list[nn.Parameter]:
        """The parameters whose first update this step is."""
        if self.new and not self.stepped:  # state may have been loaded since it was created
            updated = torch.stack([self.state[p][UPDATED] for p in self.new]).tolist()
            for p, loaded in zip(list(self.new), updated, strict=True):
                if loaded:
                    del self.new[p]
        self.stepped = True
        return [p for p in self.new if p.grad is not None]

    def _standing(self, p: nn.Parameter) -> nn.Parameter:
        """What stands for a parameter of the model in the inner optimizer."""
        return self.shards.get(p, p)

    def _inner_step(self, found_inf: Tensor | None = None) -> None:
        for mine, its in zip(self.param_groups, self.inner.param_groups, strict=True):
            its.update({key: mine[key] for key in its if key != "params"})
        for p, shard in self.shards.items():
            shard.data = local(p)  # FSDP may have moved it: its first forward pads uneven ones
            shard.grad = None if p.grad is None else local_grad(p)
        self.inner.grad_scale, self.inner.found_inf = None, found_inf
        self.inner.step()
        for shard in self.shards.values():
            shard.grad = None

    def _inner_step_or_not(self, admitted: Tensor) -> None:
        """A step, after which everything is what it was where `admitted` is False."""
        values = [(p, local(p).clone()) for group in self.param_groups for p in group["params"]]
        states = [
            (state, key, local(t).clone())
            for state in self.state.values()
            for key, t in state.items()
        ]
        self._inner_step()
        for p, old in values:
            torch.where(admitted, local(p), old, out=local(p))
        for state, key, old in states:
            new = local(state[key])
            torch.where(admitted, new, old, out=new)

    @torch.no_grad()
    def create_state(self) -> list[str]:
        """Let the inner optimizer create its state in a trial step; parameters stay what they are.
        Returns a line for each thing of it that a checkpoint cannot hold."""
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        before = [deepcopy(self.inner.state.get(self._standing(p), {})) for p in trained]
        settings = self._settings()
        self._trial_step(trained)
        changed = sorted({key for _, key, _ in self._settings() - settings})
        problems = [f"its step changes {key} of its parameter groups" for key in changed]
        problems += self._state_problems()
        for p, initial in zip(trained, before, strict=True):
            state = self.inner.state.get(self._standing(p))
            if state and not problems:
                for t in state.values():
                    t.zero_()
                state[UPDATED] = torch.zeros((), device=p.device)
                self.state[p], self.new[p] = state, initial
        return problems

    def _trial_step(self, trained: list[nn.Parameter]) -> None:
        """A step on zero gradients at rate 0."""
        values = [local(p).clone() for p in trained]
        rates = [group["lr"] for group in self.param_groups]
        for p in trained:
            p.grad = torch.zeros_like(p)
        for group in self.param_groups:
            group["lr"] = 0.0
        self._inner_step()
        self.zero_grad()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        for p, value in zip(trained, values, strict=True):
            local(p).copy_(value)

    def _settings(self) -> set[tuple[int, str, str]]:
        """(Index of the group, key, value) of the inner optimizer's groups, except for the rate."""
        return {
            (i, key, repr(value))
            for i, group in enumerate(self.inner.param_groups)
            for key, value in group.items()
            if key not in ("params", "param_names", "lr")
        }

    def _state_problems(self) -> Iterator[str]:
        """A line for each kind of state that cannot be saved by name, or restored by `step`."""
        names: dict[nn.Parameter, str] = {}
        for group in self.param_groups:
            names |= zip(map(self._standing, group["params"]), group["param_names"], strict=True)
        unfit: dict[str, list[str]] = {}
        for p, state in self.inner.state.items():
            if p not in names:
                yield f"it has state that belongs to no parameter: {p}"
                continue
            for key, t in state.items():
                fits = isinstance(t, Tensor) and t.device == p.device
                if not (fits and (t.ndim == 0 or local(t).shape == local(p).shape)):
                    unfit.setdefault(key, []).append(names[p])
        for key, of in unfit.items():
            yield (
                f"state {key} of {', '.join(of)}: must be a tensor of the parameter's shape or a "
                "0-dim tensor, on its device (of torch's with capturable=True or fused=True)"
            )
