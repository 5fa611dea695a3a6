"""The optimizer, and what happens to an update whose gradient is not finite."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from lingua.base.errors import UserError
from lingua.optim.args import OptimArgs
from lingua.parallel.init import Named, canonical_name
from lingua.parallel.tensors import local

if TYPE_CHECKING:
    from lingua.checkpoint.state import Progress


def build_optimizer(
    model: nn.Module, args: OptimArgs, blocks: tuple[str, ...] = ()
) -> "LoopOptimizer":
    """The optimizer of the config, with parameters in groups of equal settings, for `update`.

    Weight decay is for those of `split_by_decay`. With `name: muon`, those of them that are
    matrices in one of the `blocks` (patterns of module names, as in a ParallelPlan) are Muon's;
    everything else is AdamW's. All state exists from the start, so that a checkpoint of step 0 is
    complete. The groups keep canonical names in `param_names`.

    Raises:
        UserError: nothing is trained; Muon, and no matrix for it; a name in `lr_scale` that matches
            nothing.
    """
    decay, no_decay = split_by_decay(model)
    matrices: list[Named] = []
    if args.name == "muon":
        from lingua.optim.muon import take_matrices

        matrices, decay = take_matrices(decay, blocks)
    muon_settings = {"algorithm": "muon"} | vars(args.muon)
    adamw_settings = {"algorithm": "adamw", "betas": (args.beta1, args.beta2), "eps": args.epsilon}
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay, **muon_settings},
        {"params": decay, "weight_decay": args.weight_decay, **adamw_settings},
        {"params": no_decay, "weight_decay": 0.0, **adamw_settings},
    ]
    if args.lr_scale:
        from lingua.optim.scale import scaled

        groups = scaled(groups, args.lr_scale)
    if not (groups := [group for group in groups if group["params"]]):
        raise UserError("the model has no parameter to train: all are frozen")
    return AdamWMuon(groups, args.lr)


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


class LoopOptimizer(Optimizer):
    """An optimizer whose updates can be suppressed on the device; its method `step` is not used."""

    def step_if(self, admitted: Tensor, divisor: Tensor) -> None:
        """One update at the rate of each group, with gradients divided by `divisor`, a float32
        scalar on the device. Where `admitted`, a bool scalar there, is False, it changes no
        parameter and no state. The host does not wait for either. Gradients may be changed."""
        raise NotImplementedError

    def state_of(self, p: nn.Parameter) -> dict[str, Tensor]:
        """The state of a parameter as a checkpoint has it: each tensor is a DTensor, or whole. One
        that another rank holds is on the meta device."""
        return dict(self.state.get(p, {}))


class AdamWMuon(LoopOptimizer):
    """AdamW, and Muon for the groups whose `algorithm` is muon. All state exists from the start."""

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr})
        self.algorithms: dict[str, Callable[..., None]] = {"adamw": update_adamw}
        if any(group["algorithm"] == "muon" for group in groups):
            from lingua.optim.muon import muon

            self.algorithms["muon"] = muon
        for group in self.param_groups:
            is_muon = group["algorithm"] == "muon"
            for p in group["params"]:
                means = ["momentum_buffer"] if is_muon else ["exp_avg", "exp_avg_sq"]
                self.state[p] = {name: torch.zeros_like(p) for name in means}
                if not is_muon:
                    self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)

    @torch.no_grad()
    def step_if(self, admitted: Tensor, divisor: Tensor) -> None:
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in parameters]
            grads = [local_grad(p) for p in parameters]
            self.algorithms[group["algorithm"]](parameters, grads, states, admitted, divisor, group)


def update(optimizer: Optimizer, lr: float, admitted: Tensor, divisor: Tensor) -> None:
    """`step_if(admitted, divisor)` of an optimizer of `build_optimizer` or `adapt` at the rate
    `lr`, times the `lr_scale` of a group that has one."""
    assert isinstance(optimizer, LoopOptimizer), "must come from adapt()"
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    optimizer.step_if(admitted, divisor)


def local_grad(p: nn.Parameter) -> Tensor:
    """The part of a parameter's gradient that this rank holds."""
    assert p.grad is not None
    if isinstance(p, DTensor) and isinstance(p.grad, DTensor):
        # A gradient not yet summed over its mesh would be taken for its own shard.
        assert p.grad.placements == p.placements
    return local(p.grad)


def update_adamw(
    parameters: list[nn.Parameter],
    grads: list[Tensor],
    states: list[dict[str, Tensor]],
    admitted: Tensor,
    divisor: Tensor,
    group: dict[str, Any],
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
        grad_scale=divisor,
        found_inf=(~admitted).float(),
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


class NonFiniteGuard:
    """Suppresses updates whose gradient is not finite, and those of a global batch without targets,
    on the device, and reports them later.

    With `on_nonfinite: stop` no update follows one that is not finite, so that the run stops in the
    state that the bad step found. The host learns of it when it reads `counts`, not at every step.
    """

    def __init__(self, mode: str, device: torch.device, skipped: int = 0) -> None:
        self.stops = mode == "stop"
        # int64 [2] on the device: updates suppressed over the whole run, and the step that is to
        # stop it (0: none)
        self.counts = torch.tensor([skipped, 0], device=device)

    def admit(self, step: int, grad_norm: Tensor, counts: Tensor) -> Tensor:
        """Whether `update` may change anything at `step`: a bool scalar on the device. `counts` are
        what its loss was divided by."""
        has_targets, finite = counts.all(), grad_norm.isfinite()
        skipped, first = self.counts
        if self.stops:
            first = torch.where(has_targets & ~finite & (first == 0), step, first)
        admitted = has_targets & finite & (first == 0)
        self.counts = torch.stack((skipped + (~admitted & (first == 0)), first))
        return admitted

    def settle(self, counts: list[int], progress: "Progress", global_batch_size: int) -> None:
        """Set `progress.skipped_steps` by the values of `self.counts` after the last step. Where
        `on_nonfinite` is `stop` and an update was suppressed, `progress` becomes what it was before
        that update, and UserError is raised, which names step and rows."""
        progress.skipped_steps, first = counts
        if first:
            undone = progress.step + 1 - first
            progress.step -= undone
            progress.position -= undone * global_batch_size
            end = progress.position + global_batch_size - 1
            raise UserError(
                f"step {first}: the gradient is not finite (rows {progress.position} to {end}). "
                "The run stops before this update; optim.on_nonfinite = skip counts such steps and "
                "goes on"
            )
