"""The optimizer, and what happens to an update whose gradient is not finite."""

from fnmatch import fnmatch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from lingua.dtensor import local
from lingua.errors import UserError
from lingua.init import canonical_name
from lingua.optim.args import OptimArgs
from lingua.optim.muon import muon


def build_optimizer(model: nn.Module, args: OptimArgs, blocks: tuple[str, ...] = ()) -> Optimizer:
    """Parameters that need a gradient, in groups of equal treatment, and their state for `update`.

    Weight decay is for those of two or more dimensions that are not the weight of an nn.Embedding,
    tied or not. With `name: muon`, those of them that are matrices in one of the `blocks` (patterns
    of module names, as in a ParallelPlan) are Muon's; everything else is AdamW's.

    The groups keep canonical names in `param_names`. All state exists from the start, zero (AdamW:
    `step` a float32 scalar and both moments, Muon: the momentum), so that a checkpoint of step 0 is
    complete.

    Raises:
        UserError: Muon, and no matrix for it.
    """
    adamw = {"algorithm": "adamw", "betas": (args.beta1, args.beta2), "eps": args.epsilon}
    settings = {
        "matrices": {"algorithm": "muon", "weight_decay": args.weight_decay} | vars(args.muon),
        "decay": adamw | {"weight_decay": args.weight_decay},
        "no decay": adamw | {"weight_decay": 0.0},
    }
    members: dict[str, list[tuple[str, nn.Parameter]]] = {kind: [] for kind in settings}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        name = canonical_name(name)
        kind = "decay" if p.ndim >= 2 and id(p) not in embeddings else "no decay"
        if args.name == "muon" and kind == "decay" and p.ndim == 2 and _within(name, blocks):
            kind = "matrices"
        members[kind].append((name, p))
    if args.name == "muon" and not members["matrices"]:
        raise UserError(
            "optim.name = muon: trains the matrices inside the blocks that the model's plan names, "
            "and there are none; must be adamw"
        )
    groups = [{"params": named, **settings[kind]} for kind, named in members.items() if named]
    optimizer = Optimizer(groups, {"lr": args.lr})
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = _empty_state(p, group["algorithm"])
    return optimizer


def _within(name: str, blocks: tuple[str, ...]) -> bool:
    """Whether a parameter lies in a module that one of the patterns names; `*` matches one part."""
    parts = name.split(".")
    return any(fnmatch(".".join(parts[: block.count(".") + 1]), block) for block in blocks)


def _empty_state(p: nn.Parameter, algorithm: str) -> dict[str, Tensor]:
    if algorithm == "muon":
        return {"momentum_buffer": torch.zeros_like(p)}
    return {
        "step": torch.zeros((), dtype=torch.float32, device=p.device),
        "exp_avg": torch.zeros_like(p),
        "exp_avg_sq": torch.zeros_like(p),
    }


@torch.no_grad()
def update(optimizer: Optimizer, lr: float, finite: Tensor) -> None:
    """One update at rate `lr`; parameters, moments and step counts stay what they are where
    `finite` (a bool scalar on the device) is False. The host does not wait for it."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        parameters = [p for p in group["params"] if p.grad is not None]
        states = [optimizer.state[p] for p in parameters]
        for p in parameters:
            # a gradient not yet summed over its mesh would be taken for its own shard
            assert not isinstance(p, DTensor) or p.grad.placements == p.placements
        if group["algorithm"] == "muon":
            _muon(parameters, states, finite, group)
        else:
            _adamw(parameters, states, finite, group)


def _adamw(parameters: list[nn.Parameter], states: list[dict], finite: Tensor, group: dict) -> None:
    """AdamW works on each element alone, so it runs on the local shards, on whatever meshes they
    live, and without DTensor's dispatch (200 small parameters on one CPU core: 2.9 ms with it,
    0.9 ms without)."""
    adamw(
        [local(p) for p in parameters],
        [local(p.grad) for p in parameters],
        [local(state["exp_avg"]) for state in states],
        [local(state["exp_avg_sq"]) for state in states],
        [],
        [state["step"] for state in states],
        fused=True,
        found_inf=(~finite).float(),
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _muon(parameters: list[nn.Parameter], states: list[dict], finite: Tensor, group: dict) -> None:
    muon(
        parameters,
        [state["momentum_buffer"] for state in states],
        finite,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        nesterov=group["nesterov"],
        ns_steps=group["ns_steps"],
        rms=group["rms"],
        dtype=group["dtype"],
    )


class NonFiniteGuard:
    """Suppresses updates whose gradient is not finite, on the device, and tells of them later.

    With `on_nonfinite: stop` no later update is made either, so that the run stops in the state
    that the bad step found. The host learns of it when it asks (`skipped`), not at every step.
    """

    def __init__(self, mode: str, device: torch.device, skipped: int = 0) -> None:
        self.stops = mode == "stop"
        self.count = torch.tensor(skipped, device=device)
        self.first = torch.tensor(0, device=device)  # the first bad step of this start; 0: none

    def admit(self, step: int, grad_norm: Tensor) -> Tensor:
        """Whether `update` may change anything at `step`: a bool scalar on the device."""
        bad = ~grad_norm.isfinite()
        self.first = torch.where(bad & (self.first == 0), step, self.first)
        self.count = self.count + bad
        return self.first == 0 if self.stops else ~bad

    def skipped(self, step: int, position: int, global_batch_size: int) -> int:
        """Updates suppressed over the whole run, asked after `step`, which used the rows up to
        `position`. Waits for the device.

        Raises:
            UserError: there was one and `on_nonfinite` is `stop`; names its step and rows.
        """
        first = int(self.first)
        if self.stops and first:
            end = position - (step - first) * global_batch_size
            raise UserError(
                f"step {first}: the gradient is not finite (rows {end - global_batch_size} to "
                f"{end - 1}). The run stops before this update; optim.on_nonfinite = skip counts "
                "such steps and goes on"
            )
        return int(self.count)
