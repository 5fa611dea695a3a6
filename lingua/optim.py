"""The optimizer and the learning rate of every step.

    optimizer = build_optimizer(model, args, blocks)    # after sharding and materialisation
    update(optimizer, lr_at(step, args, steps), torch.isfinite(grad_norm))

`step` counts completed updates, so update `step + 1` (the metrics line of that number) uses
lr_at(step), and a run of `steps` updates uses lr_at(0) ... lr_at(steps - 1).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from lingua.args import Announced, Guarded
from lingua.errors import UserError
from lingua.init import canonical_name
from lingua.muon import MuonArgs, muon


@dataclass
class OptimArgs:
    # `muon`: Muon for the matrices inside the blocks, AdamW for the rest (embedding, head, norms)
    name: Guarded[Literal["adamw", "muon"]] = "adamw"
    lr: Announced[float] = 3e-4  # peak learning rate
    # decoupled, times the learning rate; on matrices only, not on embeddings, norms and biases
    weight_decay: Announced[float] = 0.1
    beta1: Announced[float] = 0.9  # AdamW: decay per update of the mean of the gradient
    beta2: Announced[float] = 0.95  # AdamW: decay per update of the mean of the squared gradient
    epsilon: Announced[float] = 1e-8  # AdamW: added to the root of the second moment
    muon: MuonArgs = field(default_factory=MuonArgs)  # with `name: muon`; lr and decay are shared
    clip: Announced[float] = 1.0  # largest global norm of the gradient; .inf: no clipping
    # how the rate goes on after the warmup
    scheduler: Announced[Literal["constant", "linear", "inv_sqrt", "cosine", "wsd"]] = "cosine"
    warmup: Announced[int] = 2000  # updates of linear rise; the last of them has the peak rate
    lr_min_ratio: Announced[float] = 0.1  # lowest rate of the decay, as a share of the peak
    # cosine, wsd: length of a cycle as a share of the run; each starts again from the peak
    cycle_length: Announced[float] = 1.0
    cosine_theta: Announced[float] = (
        1.0  # cosine: progress is raised to this power; > 1 decays later
    )
    # wsd: the decay that ends a cycle, as a share of the updates from the start of the run to there
    decay_fraction: Announced[float] = 0.1
    # power of the decay: inv_sqrt (warmup/step)^p, wsd 1 - progress^p
    exp_factor: Announced[float] = 0.5
    # a gradient that is not finite changes nothing; then: stop the run, or count it and go on
    on_nonfinite: Announced[Literal["stop", "skip"]] = "stop"

    def problems(self) -> Iterator[tuple[str, str]]:
        """(field, what is required of it) for every value out of range."""
        finite = math.isfinite
        for key in ("lr", "weight_decay"):
            if not (finite(getattr(self, key)) and getattr(self, key) >= 0):
                yield key, "must be at least 0"
        for key in ("beta1", "beta2"):
            if not 0 <= getattr(self, key) < 1:
                yield key, "must be at least 0 and below 1"
        for key in ("epsilon", "cycle_length", "cosine_theta", "exp_factor"):
            if not (finite(getattr(self, key)) and getattr(self, key) > 0):
                yield key, "must be above 0"
        if not self.clip > 0:
            yield "clip", "must be above 0 (.inf: no clipping)"
        if self.warmup < 0:
            yield "warmup", "must be at least 0"
        for key in ("lr_min_ratio", "decay_fraction"):
            if not 0 <= getattr(self, key) <= 1:
                yield key, "must be between 0 and 1"


def schedule_warnings(args: OptimArgs, steps: int) -> list[str]:
    """What is legal but probably not meant, a line each."""
    if args.warmup <= steps:
        return []
    share = 100 * steps / args.warmup
    return [
        f"optim.warmup = {args.warmup} is longer than the run (steps = {steps}): "
        f"the learning rate ends at {share:.3g} % of optim.lr = {args.lr:g} and never decays"
    ]


# ---- the learning rate


def lr_at(step: int, args: OptimArgs, steps: int) -> float:
    """The rate of the update that follows `step` completed ones in a run of `steps`.

    Linear rise over `warmup` updates from lr / warmup to lr, then the scheduler's decay, which is
    at its end at `steps` and stays there. The formulas are Meta Lingua's, except that its first
    update has rate 0, its cosine and wsd return to the peak at `steps`, and its wsd decays
    harmonically, which has no limit for lr_min_ratio 0; here as 1 - progress^exp_factor, by
    default the 1-sqrt of Hägele et al. 2024 (arXiv 2405.18392).
    """
    step = min(step, steps)
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    # 0 ... 1 over the updates after the warmup; 0 where there are none
    progress = (step - args.warmup) / max(steps - args.warmup, 1)
    match args.scheduler:
        case "constant":
            share = 1.0
        case "linear":
            share = _between(1 - progress, args.lr_min_ratio)
        case "inv_sqrt":
            power = (max(args.warmup, 1) / max(step, 1)) ** args.exp_factor
            share = max(power, args.lr_min_ratio)
        case "cosine":
            share = _between(_cosine(step, progress, args, steps), args.lr_min_ratio)
        case "wsd":
            share = _between(_wsd(step, args, steps), args.lr_min_ratio)
    return args.lr * share


def _between(height: float, low: float) -> float:
    """`low` at height 0, 1 at height 1, exactly at both ends."""
    return height + (1 - height) * low


def _cosine(step: int, progress: float, args: OptimArgs, steps: int) -> float:
    """Half a cosine wave per cycle, 1 to 0 (Loshchilov & Hutter 2017, arXiv 1608.03983)."""
    cycles = progress**args.cosine_theta / _cycle_length(args, steps)
    fraction = cycles - _whole_cycles(cycles, last=step == steps)
    return 0.5 * (1 + math.cos(math.pi * min(max(fraction, 0.0), 1.0)))


def _wsd(step: int, args: OptimArgs, steps: int) -> float:
    """1 until the decay that ends each cycle (the last cycle ends with the run), then to 0
    (warmup-stable-decay with repeated cycles: Wen et al. 2024, arXiv 2410.05192)."""
    length = _cycle_length(args, steps) * steps
    cycle = _whole_cycles(step / length, last=step == steps)
    end = min((cycle + 1) * length, steps)
    # a decay longer than what it has begins where the warmup or the cycle does
    begin = max(end - args.decay_fraction * end, cycle * length, args.warmup)
    if step <= begin:
        return 1.0
    return 1 - min((step - begin) / (end - begin), 1.0) ** args.exp_factor


def _cycle_length(args: OptimArgs, steps: int) -> float:
    """As a share of the run; a cycle is at least one update."""
    return max(args.cycle_length, 1 / steps)


def _whole_cycles(cycles: float, last: bool) -> int:
    """Completed cycles. A cycle that ends with the run is still the current one there, so that the
    run ends at its low and not at the peak of a next one."""
    whole = round(cycles)
    if not math.isclose(cycles, whole, rel_tol=1e-12):  # 0.3 / 0.1 is 2.9999999999999996
        return math.floor(cycles)
    return whole - 1 if last and whole > 0 else whole


# ---- the optimizer


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
        [_local(p) for p in parameters],
        [_local(p.grad) for p in parameters],
        [_local(state["exp_avg"]) for state in states],
        [_local(state["exp_avg_sq"]) for state in states],
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


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
