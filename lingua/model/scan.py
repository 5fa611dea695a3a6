"""What recurrent layers are built of: linear recurrences over positions, a short convolution, and
weights that tensor parallelism splits as they are. Apps import it; apps.main does without.

Shapes in comments: B rows, S positions, D features.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from lingua.model.transformer import Context
from lingua.parallel.styles import SplitWeight

CHUNK = 32  # positions that are computed one after the other, in all chunks at once
TAPS = 4  # positions that a convolution sees


def scan(a: Tensor, b: Tensor) -> Tensor:
    """The states h_t = a_t h_{t-1} + b_t with h_{-1} = 0, in float32: products and sums alone, so
    that no decay is too small, and a state behind an a_t of 0 does not depend on what is before.

    b is B S ..., and a is of that shape, or of one that broadcasts to it and has its B and S.
    """
    return _scan(a.float(), b.float(), False)


@torch.library.custom_op("lingua::scan", mutates_args=())  # one operator to the compiler
def _scan(a: Tensor, b: Tensor, backward: bool) -> Tensor:
    """`scan`, or with `backward` h_t = a_t h_{t+1} + b_t. The states at the ends of chunks are a
    recurrence of the same form over the chunks; from these each chunk is computed again."""
    seq_len = b.shape[1]
    n = -(-seq_len // CHUNK)
    if n > 1 and (rest := n * CHUNK - seq_len):
        a, b = (F.pad(t, (0, 0) * (t.dim() - 2) + (0, rest)) for t in (a, b))
    a, b = (t.unflatten(1, (n, -1)) for t in (a, b))  # B n CHUNK ...
    steps = range(b.shape[2])[:: -1 if backward else 1]
    state = torch.zeros_like(b[:, :, 0])
    if n > 1:
        for t in steps:
            state = torch.addcmul(b[:, :, t], a[:, :, t], state)
        ends = _scan(a.prod(2), state, backward)
        none = torch.zeros_like(ends[:, :1])
        state = torch.cat((ends[:, 1:], none) if backward else (none, ends[:, :-1]), dim=1)
    h = torch.empty_like(b, memory_format=torch.contiguous_format)
    for t in steps:
        state = torch.addcmul(b[:, :, t], a[:, :, t], state, out=h[:, :, t])
    return h.flatten(1, 2)[:, :seq_len].contiguous()


@_scan.register_fake
def _(a: Tensor, b: Tensor, backward: bool) -> Tensor:
    return b.new_empty(b.shape)


def _keep_for_gradients(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
    a, h = ctx.saved_tensors
    following = torch.cat((a[:, 1:], torch.zeros_like(a[:, :1])), dim=1)
    b_grad = _scan(following, grad, True)
    if not ctx.needs_input_grad[0]:
        return None, b_grad, None
    before = torch.cat((torch.zeros_like(h[:, :1]), h[:, :-1]), dim=1)
    return (b_grad * before).sum_to_size(a.shape), b_grad, None


_scan.register_autograd(_gradients, setup_context=_keep_for_gradients)


class Weight(nn.Module):
    """A parameter as a module, which returns it: a style can then split it (`split_weights`), for
    arithmetic on the features or heads that a rank has. The module that has it fills it."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self) -> Tensor:
        return self.weight


def split_weights(model: nn.Module) -> dict[str, ParallelStyle]:
    """Styles for a ParallelPlan: each Weight is split over its first dimension."""
    return {name: SplitWeight() for name, m in model.named_modules() if isinstance(m, Weight)}


class CausalConv(nn.Module):
    """Each feature's weighted sum over the last TAPS positions of its document."""

    def __init__(self, n_features: int) -> None:
        super().__init__()
        self.taps = Weight(n_features, 1, TAPS)  # as torch's Conv1d: the last one is the position's
        self.bias = Weight(n_features)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:  # B S D -> B S D
        last = None if ctx.cache is None else ctx.cache.last(self)
        inputs = [x]  # of each position, then of the one before, ...: 0 in another document
        for i in range(TAPS - 1):
            first = torch.zeros_like(x[:, :1]) if last is None else last[i][:, None]
            before = torch.cat((first, inputs[-1][:, :-1]), dim=1)
            if ctx.begins is not None:
                before = before.masked_fill(ctx.begins[..., None], 0.0)
            inputs.append(before)
        if ctx.cache is not None:
            ctx.cache.keep(self, *(t[:, -1 - ctx.cache.overlap] for t in inputs[:-1]))
        taps, out = self.taps(), self.bias().expand_as(x)
        for i, past in enumerate(inputs):
            out = torch.addcmul(out, past, taps[:, 0, -1 - i])
        return out

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.taps.weight, -(TAPS**-0.5), TAPS**-0.5)
        nn.init.zeros_(self.bias.weight)
