"""Errors of attention and of the loss on a device: against the definition in float64, as multiples
of the errors that the definition has in their own dtype."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lingua.data import IGNORE
from lingua.model.attention import AttnImpl, attend
from lingua.model.head import Head
from lingua.model.transformer import Context, TransformerArgs

BOUND = 2.0  # multiple above which a result is too far
ROUNDING = 1.5e-7  # relative error of float32 sums, below which a multiple means nothing
ROWS = 2


@dataclass(frozen=True)
class AttentionCase:
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    documents: bool = False  # rows with ends of documents, one of them at the end of a row
    window: int | None = None

    def starts(self) -> Tensor | None:
        """int64 2 3, where the documents of both rows begin."""
        n = self.positions
        return torch.tensor([[0, n // 10, n // 2], [0, n - 30, n]]) if self.documents else None

    def visible(self) -> Tensor:
        """bool 2 1 S S by the definition, without the code that builds masks."""
        at = torch.arange(self.positions)
        sees = (at <= at[:, None]).expand(ROWS, -1, -1)
        if self.window is not None:
            sees = sees & (at > at[:, None] - self.window)
        if (starts := self.starts()) is not None:
            document = (starts[:, None] <= at[:, None]).sum(-1)
            sees = sees & (document[:, :, None] == document[:, None])
        return sees[:, None]


@dataclass(frozen=True)
class Errors:
    """Errors as multiples of the plain ones, and whether a second pass gave the same bits."""

    multiples: Sequence[float]
    same_bits: bool

    @property
    def right(self) -> bool:
        return all(multiple <= BOUND for multiple in self.multiples)  # NaN is not


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
    wide = exact.double()
    return float((x.to(wide) - wide).norm() / wide.norm())


def attention_errors(
    case: AttentionCase, impl: AttnImpl, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Errors:
    """Errors of the output and of the gradients of q, k and v. Raises UserError where `impl` cannot
    serve."""
    random = torch.Generator().manual_seed(0)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    q, k, v, upstream = (
        torch.randn(ROWS, n, case.positions, case.head_dim, generator=random).to(device, dtype)
        for n in heads
    )
    sees = case.visible().to(device)

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(case.heads // case.kv_heads, 1) for t in (k, v))
        scores = (q @ k.mT * case.head_dim**-0.5).masked_fill(~sees, -math.inf)
        wide = torch.promote_types(q.dtype, torch.float32)
        return scores.softmax(-1, dtype=wide).to(q.dtype) @ v

    def results(work: Callable[..., Tensor], dtype: torch.dtype = dtype) -> list[Tensor]:
        inputs = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        out = work(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream.to(dtype))]

    args = TransformerArgs(
        dim=case.heads * case.head_dim, n_heads=case.heads, n_kv_heads=case.kv_heads,
        sliding_window=case.window, attn_impl=impl,
    )  # fmt: skip
    tokens = torch.zeros(ROWS, case.positions, dtype=torch.int64, device=device)
    starts = case.starts()
    mask = Context(args, tokens, None if starts is None else starts.to(device)).set_mask(
        args, dtype
    )
    got, again = (results(lambda q, k, v: attend(q, k, v, mask)) for _ in range(2))
    errors = multiples(got, results(definition, torch.float64), results(definition))
    return Errors(errors, all(map(torch.equal, got, again)))


@dataclass(frozen=True)
class LossCase:
    positions: int
    dim: int
    vocab: int
    cap: float | None = None
    compiled: bool = False
    per_token: bool = False


def loss_errors(
    case: LossCase, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Errors:
    """Errors of the loss and of the gradients of the hidden states and of the head's matrix. More
    logits than lingua.model.head.CHUNK_BYTES are needed for the code that works in chunks."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1, case.positions, case.dim, generator=random).to(device, dtype)
    weight = torch.randn(case.vocab, case.dim, generator=random) * 3 * case.dim**-0.5
    weight = weight.to(device, dtype)
    targets = torch.randint(case.vocab, (case.positions,), generator=random).to(device)
    targets[::7] = IGNORE
    scale = torch.rand(case.positions, generator=random).to(device)  # of the loss of each token

    def definition(dtype: torch.dtype) -> list[Tensor]:
        wide, total = (
            torch.promote_types(dtype, torch.float32),
            torch.zeros((), dtype=torch.float64),
        )
        h, w = (t.detach().to(dtype).requires_grad_() for t in (x[0], weight))
        for part, t, s in zip(h.split(256), targets.split(256), scale.split(256), strict=True):
            logits = F.linear(part, w).to(wide)
            logits = logits if case.cap is None else case.cap * torch.tanh(logits / case.cap)
            losses = F.cross_entropy(logits, t, ignore_index=IGNORE, reduction="none")
            loss = (losses * s).sum() if case.per_token else losses.sum()
            loss.backward()
            total += loss.detach().cpu()
        assert h.grad is not None and w.grad is not None
        return [total, h.grad, w.grad]

    head = Head(case.dim, case.vocab, case.cap).to(device)
    head.weight = torch.nn.Parameter(weight)
    if case.compiled:
        head.compile()

    def results() -> list[Tensor]:
        h = x.detach().requires_grad_()
        losses = head(h, targets[None, None], per_token=case.per_token)
        loss = (losses * scale).sum() if case.per_token else losses.sum()
        h_grad, w_grad = torch.autograd.grad(loss, (h, head.weight))
        return [loss.detach().cpu(), h_grad[0], w_grad]

    got, again = results(), results()
    errors = multiples(got, definition(torch.float64), definition(dtype))
    return Errors(errors, all(map(torch.equal, got, again)))
