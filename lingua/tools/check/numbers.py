"""Errors of attention and of the loss on a device: against the definition in float64, as multiples
of the errors that the definition has in their own dtype."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lingua.data import IGNORE
from lingua.model.args import AttnImpl, TransformerArgs
from lingua.model.attend import attend
from lingua.model.head import Head
from lingua.model.transformer import Context

BOUND = 2.0  # multiple above which a result is too far
ROUNDING = 1.5e-7  # relative error of float32 sums, below which a multiple means nothing

Pass = Callable[[], list[Tensor]]  # computes a result and its gradients


@dataclass(frozen=True)
class Errors:
    """Errors as multiples of the plain ones, and whether a second pass gave the same bits."""

    multiples: Sequence[float]
    same_bits: bool

    @property
    def right(self) -> bool:
        return all(multiple <= BOUND for multiple in self.multiples)  # NaN is not


@dataclass(frozen=True)
class AttentionCase:
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    documents: bool = False  # rows with ends of documents, one of them at the end of a row
    window: int | None = None
    rows: int = 2

    def starts(self) -> Tensor | None:
        """int64 rows 3, where the documents of each row begin: three, or two and an empty one."""
        n = self.positions
        starts = torch.tensor([[0, n // 10, n // 2], [0, n - 30, n]])
        return starts.repeat(self.rows // 2, 1) if self.documents else None

    def visible(self) -> Tensor:
        """bool rows 1 S S by the definition, without the code that builds masks."""
        at = torch.arange(self.positions)
        sees = (at <= at[:, None]).expand(self.rows, -1, -1)
        if self.window is not None:
            sees = sees & (at > at[:, None] - self.window)
        if (starts := self.starts()) is not None:
            document = (starts[:, None] <= at[:, None]).sum(-1)
            sees = sees & (document[:, :, None] == document[:, None])
        return sees[:, None]


def attention_errors(
    case: AttentionCase, impl: AttnImpl, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Errors:
    """Errors of the output and of the gradients of q, k and v. Raises UserError where `impl` cannot
    serve."""
    inputs, work = attention_pass(case, impl, device, dtype)
    sees = case.visible().to(device)

    def definition(dtype: torch.dtype) -> list[Tensor]:
        q, k, v, upstream = (t.detach().to(dtype).requires_grad_() for t in inputs)
        keys, values = (t.repeat_interleave(case.heads // case.kv_heads, 1) for t in (k, v))
        scores = (q @ keys.mT * case.head_dim**-0.5).masked_fill(~sees, -math.inf)
        out = scores.softmax(-1, dtype=_wide(dtype)).to(dtype) @ values
        return [out, *torch.autograd.grad(out, (q, k, v), upstream)]

    return _errors(work, definition, dtype)


def attention_pass(
    case: AttentionCase, impl: AttnImpl, device: torch.device, dtype: torch.dtype
) -> tuple[list[Tensor], Pass]:
    """Queries, keys, values and the gradient of the output; and a pass by `impl`."""
    random = torch.Generator().manual_seed(0)
    shape, heads = (case.positions, case.head_dim), (case.heads, case.kv_heads)
    q, k, v, upstream = (
        torch.randn(case.rows, heads[is_kv], *shape, generator=random).to(device, dtype)
        for is_kv in (0, 1, 1, 0)
    )
    args = TransformerArgs(
        dim=case.heads * case.head_dim, n_heads=case.heads, n_kv_heads=case.kv_heads,
        sliding_window=case.window, attn_impl=impl,
    )  # fmt: skip
    tokens = torch.zeros(case.rows, case.positions, dtype=torch.int64, device=device)
    starts = case.starts()
    mask = Context(args, tokens, None if starts is None else starts.to(device)).set_mask(
        args, dtype
    )
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def work() -> list[Tensor]:
        out = attend(q, k, v, mask)
        return [out, *torch.autograd.grad(out, leaves, upstream)]

    return [q, k, v, upstream], work


@dataclass(frozen=True)
class LossCase:
    """It takes more logits than lingua.model.head.CHUNK_BYTES for the code that works in chunks."""

    positions: int
    dim: int
    vocab: int
    compiled: bool = False
    per_token: bool = False


def loss_errors(case: LossCase, device: torch.device, dtype: torch.dtype) -> Errors:
    """Errors of the loss and of the gradients of the hidden states and of the head's matrix."""
    inputs, work = loss_pass(case, device, dtype)

    def definition(dtype: torch.dtype) -> list[Tensor]:
        x, weight = (t.detach().to(dtype).requires_grad_() for t in inputs[:2])
        total = torch.zeros((), dtype=torch.float64, device=device)
        for h, targets, scale in zip(*(t.split(256) for t in (x, *inputs[2:])), strict=True):
            logits = F.linear(h, weight).to(_wide(dtype))
            losses = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
            loss = (losses * scale).sum() if case.per_token else losses.sum()
            loss.backward()
            total += loss.detach()
        assert x.grad is not None and weight.grad is not None
        return [total, x.grad, weight.grad]

    return _errors(work, definition, dtype)


def loss_pass(
    case: LossCase, device: torch.device, dtype: torch.dtype
) -> tuple[list[Tensor], Pass]:
    """Hidden states, the head's matrix, targets and the scale of each loss; and a pass of Head."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(case.positions, case.dim, generator=random).to(device, dtype).requires_grad_()
    weight = torch.randn(case.vocab, case.dim, generator=random) * 3 * case.dim**-0.5
    targets = torch.randint(case.vocab, (case.positions,), generator=random).to(device)
    targets[::7] = IGNORE
    scale = torch.rand(case.positions, generator=random).to(device)
    head = Head(case.dim, case.vocab)
    head.weight = torch.nn.Parameter(weight.to(device, dtype))
    if case.compiled:
        head.compile()

    def work() -> list[Tensor]:
        losses = head(x[None], targets[None, None], per_token=case.per_token)
        loss = (losses * scale).sum() if case.per_token else losses.sum()
        return [loss, *torch.autograd.grad(loss, (x, head.weight))]

    return [x, head.weight, targets, scale], work


def _errors(
    work: Pass, definition: Callable[[torch.dtype], list[Tensor]], dtype: torch.dtype
) -> Errors:
    got, again = work(), work()
    exact, plain = definition(torch.float64), definition(dtype)
    return Errors(multiples(got, exact, plain), all(map(torch.equal, got, again)))


def multiples(
    got: Sequence[Tensor], exact: Sequence[Tensor], plain: Sequence[Tensor]
) -> list[float]:
    """The error of each of `got` over that of `plain`, both against `exact`."""
    return [
        relative_error(a, e) / max(relative_error(p, e), ROUNDING)
        for a, e, p in zip(got, exact, plain, strict=True)
    ]


def relative_error(x: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of `exact`, in float64."""
    wide = exact.detach().double()
    return float((x.detach().to(wide) - wide).norm() / wide.norm())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
