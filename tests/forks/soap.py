"""A fork with an optimizer that needs whole matrices: SOAP (Vyas et al., 2024, arXiv 2409.11321),
which is Adam in the eigenbases of Shampoo's two factors."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from apps.main import app as main_app
from lingua.optim.optimizer import split_by_decay
from lingua.optim.whole import on_whole
from lingua.parallel.plan import ParallelPlan


class SOAP(torch.optim.Optimizer):
    """Matrices follow algorithm 3 of the paper, other parameters Adam. The factors begin as `eps`
    times the identity, as Shampoo's do, and the bases as the identity. The paper begins with the
    eigenvectors of the first factors. Those of equal eigenvalues are a matter of rounding, which
    differs from mesh to mesh."""

    def __init__(
        self, groups: Any, lr: float, betas: tuple[float, float], eps: float, every: int = 2
    ) -> None:
        super().__init__(
            groups, {"lr": lr, "betas": betas, "eps": eps, "every": every, "weight_decay": 0.0}
        )

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(group["lr"] * self.direction(p, p.grad, group))

    def direction(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        state, (beta1, beta2), eps = self.state[p], group["betas"], group["eps"]
        if not state:
            state["step"] = torch.zeros((), device=p.device)
            state["mean"], state["square"] = torch.zeros_like(grad), torch.zeros_like(grad)
            for side, n in zip(("left", "right"), p.shape if p.ndim == 2 else (), strict=False):
                state[side] = eps * torch.eye(n, device=p.device)
                state[f"{side}_basis"] = torch.eye(n, device=p.device)
        state["step"] += 1
        state["mean"] = beta1 * state["mean"] + (1 - beta1) * grad
        if p.ndim != 2:
            return self.adam(state, state["mean"], grad, group)
        left, right = state["left_basis"], state["right_basis"]
        rotated = self.adam(state, left.T @ state["mean"] @ right, left.T @ grad @ right, group)
        direction = left @ rotated @ right.T
        for side, square in (("left", grad @ grad.T), ("right", grad.T @ grad)):
            state[side] = beta2 * state[side] + (1 - beta2) * square
            if state["step"] % group["every"] == 0:  # a step of power iteration: algorithm 4
                basis = state[f"{side}_basis"]
                basis.copy_(torch.linalg.qr(state[side] @ basis).Q)
        return direction

    def adam(self, state: Any, mean: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        beta1, beta2 = group["betas"]
        state["square"] = beta2 * state["square"] + (1 - beta2) * grad * grad
        mean = mean / (1 - beta1 ** state["step"])
        return mean / ((state["square"] / (1 - beta2 ** state["step"])).sqrt() + group["eps"])


def build_soap(model: nn.Module, args: Any, plan: ParallelPlan | None) -> torch.optim.Optimizer:
    decay, rest = split_by_decay(model)
    groups = [
        {"params": decay, "weight_decay": args.optim.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    betas = (args.optim.beta1, args.optim.beta2)
    return on_whole(groups, lambda groups: SOAP(groups, args.optim.lr, betas, args.optim.epsilon))


app = replace(main_app, path=__name__, optimizer=build_soap)
