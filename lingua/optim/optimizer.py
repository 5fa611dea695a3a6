"""The optimizer, and what happens to an update whose gradient is not finite."""

from typing import Any

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
from lingua.parallel.parallelize import within

Named = tuple[str, nn.Parameter]
MUON_SETTINGS = ("lr", "weight_decay", "momentum", "nesterov", "ns_steps", "rms", "dtype")


def build_optimizer(model: nn.Module, args: OptimArgs, blocks: tuple[str, ...] = ()) -> Optimizer:
    """The optimizer of the config, with parameters in groups of equal settings, for `update`.

    Weight decay is for those of `split_by_decay`. With `name: muon`, those of them that are
    matrices in one of the `blocks` (patterns of module names, as in a ParallelPlan) are Muon's;
    everything else is AdamW's.

    The groups keep canonical names in `param_names`. All state exists from the start, zero (AdamW:
    `step` a float32 scalar and both moments, Muon: the momentum), so that a checkpoint of step 0 is
    complete.

    Raises:
        UserError: Muon, and no matrix for it.
    """

    def is_muons(name: str, p: nn.Parameter) -> bool:
        return args.name == "muon" and p.ndim == 2 and within(name, blocks)

    decay, no_decay = split_by_decay(model)
    matrices = [named for named in decay if is_muons(*named)]
    others = [named for named in decay if not is_muons(*named)]
    if args.name == "muon" and not matrices:
        raise UserError(
            "optim.name = muon: trains the matrices inside the blocks that the model's plan names, "
            "and there are none; must be adamw"
        )
    with_muon = {"algorithm": "muon"} | vars(args.muon)
    betas = (args.beta1, args.beta2)
    with_adamw = {"algorithm": "adamw", "betas": betas, "eps": args.epsilon}
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay, **with_muon},
        {"params": others, "weight_decay": args.weight_decay, **with_adamw},
        {"params": no_decay, "weight_decay": 0.0, **with_adamw},
    ]
    return AdamWMuon([group for group in groups if group["params"]], args.lr)


def split_by_decay(model: nn.Module) -> tuple[list[Named], list[Named]]:
    """The parameters that need a gradient, by canonical name: those for weight decay, which have
    two or more dimensions and are not the weight of an nn.Embedding, tied or not; and the rest."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decay: list[Named] = []
    rest: list[Named] = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            group = decay if p.ndim >= 2 and id(p) not in embeddings else rest
            group.append((canonical_name(name), p))
    return decay, rest


class AdamWMuon(Optimizer):
    """AdamW, and Muon for the groups whose `algorithm` is muon. All state exists from the start."""

    _step_supports_amp_scaling = True  # torch's name for the protocol that `update` follows

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                if group["algorithm"] == "muon":
                    self.state[p] = {"momentum_buffer": torch.zeros_like(p)}
                else:
                    self.state[p] = {
                        "step": torch.zeros((), dtype=torch.float32, device=p.device),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }

    @torch.no_grad()
    def step(self) -> None:
        """One update at the rate of each group. Where `found_inf`, set by the caller, is 1, it
        changes no parameter, moment or step count; the host does not wait for it."""
        found_inf = getattr(self, "found_inf", None)
        unscale(self)
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in parameters]
            grads = [local_grad(p) for p in parameters]
            if group["algorithm"] == "muon":
                buffers = [state["momentum_buffer"] for state in states]
                settings = {key: group[key] for key in MUON_SETTINGS}
                muon(parameters, grads, buffers, found_inf, **settings)
            else:
                _adamw(parameters, grads, states, found_inf, group)


@torch.no_grad()
def update(optimizer: Optimizer, lr: float, admitted: Tensor) -> None:
    """One step of an optimizer of `build_optimizer` or `adapt` at the rate `lr`, times the
    `lr_scale` of a group that has one. Nothing changes where `admitted` (a bool scalar on the
    device) is False, for which the host does not wait."""
    assert getattr(optimizer, "_step_supports_amp_scaling", False), "must come from adapt()"
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    # The protocol of torch.amp.GradScaler with optimizers of `_step_supports_amp_scaling`.
    optimizer.grad_scale, optimizer.found_inf = None, (~admitted).float()
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf


def local_grad(p: nn.Parameter) -> Tensor:
    """The part of a parameter's gradient that this rank holds."""
    # A gradient not yet summed over its mesh would be taken for its own shard.
    assert not isinstance(p, DTensor) or p.grad.placements == p.placements
    return local(p.grad)


def unscale(optimizer: Optimizer) -> None:
    """Divide the gradients in place by the `grad_scale` that a GradScaler set, if one did."""
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch._foreach_div_([local_grad(p) for p in parameters if p.grad is not None], scale)


def _adamw(
    parameters: list[nn.Parameter],
    grads: list[Tensor],
    states: list[dict],
    found_inf: Tensor | None,
    group: dict,
) -> None:
    """AdamW works on each element alone, so it runs on the local shards, on whatever meshes they
    live, and without DTensor's dispatch (200 small parameters on one CPU core: 2.9 ms with it,
    0.9 ms without)."""
    adamw(
        [local(p) for p in parameters],
        grads,
        [local(state["exp_avg"]) for state in states],
        [local(state["exp_avg_sq"]) for state in states],
        [],
        [state["step"] for state in states],
        fused=True,
        found_inf=found_inf,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


class NonFiniteGuard:
    """Suppresses updates whose gradient is not finite, on the device, and reports them later.

    With `on_nonfinite: stop` no later update is made either, so that the run stops in the state
    that the bad step found. The host learns of it when it asks (`skipped`), not at every step.
    """

    def __init__(self, mode: str, device: torch.device, skipped: int = 0) -> None:
        self.stops = mode == "stop"
        self.count = torch.tensor(skipped, device=device)
        self.first = torch.tensor(0, device=device)  # this process's first bad step; 0: none

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
