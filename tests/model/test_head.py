"""The head's losses and gradients against torch's cross-entropy of whole logits in float64."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lingua.data import IGNORE
from lingua.model import head
from lingua.model.head import Head

pytestmark = pytest.mark.quick

VIEWS, ROWS, SEQ_LEN, DIM, VOCABULARY = 2, 3, 7, 16, 53
POSITION = 4 * VOCABULARY  # bytes of the float32 logits of one position


def an_input(dtype: torch.dtype, n_rows: int = ROWS, cap: float | None = None):
    """A head, hidden states that need a gradient, and targets of which some are ignored."""
    torch.manual_seed(0)
    layer = Head(DIM, VOCABULARY, cap).to(dtype)
    x = (2 * torch.randn(VIEWS * n_rows, SEQ_LEN, DIM)).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (VIEWS, n_rows, SEQ_LEN))
    targets[0, 1] = targets[1, 2, 3:] = IGNORE
    return layer, x, targets


def reference(layer: Head, x: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """Losses of all targets and the gradients of (scale * losses).sum(), float64."""
    wide, weight = (t.detach().double().requires_grad_() for t in (x, layer.weight))
    logits = F.linear(wide, weight).flatten(0, 1)
    if layer.cap is not None:
        logits = layer.cap * torch.tanh(logits / layer.cap)
    losses = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="none")
    losses = losses.view(targets.shape)
    return (losses, *torch.autograd.grad((scale * losses).sum(), (wide, weight)))


@pytest.mark.parametrize(
    ("positions", "compiled", "cap"),  # logits have a deviation of about 1.2
    [(1, False, None), (4, False, 1.5), (1000, False, None), (4, True, 1.5)],
)
def test_sums_and_token_losses_are_those_of_whole_logits(monkeypatch, positions, compiled, cap):
    monkeypatch.setattr(head, "CHUNK_BYTES", positions * POSITION)
    layer, x, targets = an_input(torch.float32, cap=cap)
    if compiled:
        graphs = partial(torch.compile, backend="aot_eager", fullgraph=True)
        monkeypatch.setattr(head, "_compiled", graphs)
        layer.compile()
    for per_token, scale in (
        (False, torch.tensor([0.25, -3.0]).view(VIEWS, 1, 1)),  # of each view
        (True, torch.randn(targets.shape)),
    ):
        expected, *gradients = reference(layer, x, targets, scale)
        losses = layer(x, targets, per_token=per_token)
        assert losses.dtype == torch.float32
        total = (scale if per_token else scale.flatten()) * losses
        found = torch.autograd.grad(total.sum(), (x, layer.weight))
        expected = expected if per_token else expected.sum((1, 2))
        torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)
        for part, exact in zip(found, gradients, strict=True):
            torch.testing.assert_close(part.double(), exact, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            again = layer(x, targets, per_token=per_token)
        torch.testing.assert_close(again, losses, rtol=1e-6, atol=0)


def test_logits_are_capped_in_float32():
    layer, x, _ = an_input(torch.bfloat16, cap=1.5)
    logits, exact = layer(x), 1.5 * torch.tanh(F.linear(x, layer.weight).double() / 1.5)
    assert logits.dtype == torch.bfloat16 and torch.equal(logits, exact.bfloat16())
    assert 1.3 < logits.abs().max() <= 1.5


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("frozen", ["weight", "x"])
def test_what_is_frozen_costs_no_gradient(monkeypatch, frozen, per_token):
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * POSITION)
    layer, x, targets = an_input(torch.float32)
    _, *expected = reference(layer, x, targets, torch.ones(()))
    products = []
    for freeze in (False, True):
        (layer.weight if frozen == "weight" else x).requires_grad_(not freeze)
        with FlopCounterMode(display=False) as counter:
            layer(x, targets, per_token=per_token).sum().backward()
        products.append(counter.get_total_flops())
    # One of x and of the weight, and each of their gradients; of tokens the first twice.
    assert products[1] / products[0] == pytest.approx(3 / 4 if per_token else 2 / 3)
    found = x.grad if frozen == "weight" else layer.weight.grad
    exact = expected[0 if frozen == "weight" else 1]
    torch.testing.assert_close(found.double(), 2 * exact, rtol=1e-5, atol=1e-6)


def test_ignored_targets_give_no_loss_and_no_gradient():
    layer, x, targets = an_input(torch.float32)
    targets[:] = IGNORE
    losses = layer(x, targets)
    losses.sum().backward()
    assert losses.tolist() == [0.0, 0.0]
    assert not x.grad.any() and not layer.weight.grad.any()
    targets[1, 0, 0] = 5
    uniform = layer(torch.zeros_like(x), targets)
    assert uniform[0] == 0 and uniform[1].item() == pytest.approx(torch.log(torch.tensor(53.0)))


def test_in_bfloat16_losses_and_the_sum_over_chunks_are_float32(monkeypatch):
    layer, x, targets = an_input(torch.bfloat16, n_rows=40)
    logits = layer(x).double().flatten(0, 1)
    exact = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    for positions in (1000, 1):
        monkeypatch.setattr(head, "CHUNK_BYTES", positions * POSITION)
        sums = layer(x, targets)
        assert sums.sum().item() == pytest.approx(exact.item(), rel=1e-6)
    (chunked,) = torch.autograd.grad(sums.sum(), layer.weight)
    *_, expected = reference(layer, x, targets, torch.ones(()))
    rough = torch.zeros_like(chunked)  # the same products, summed in bfloat16
    for h, target in zip(x.flatten(0, 1)[:, None, None], targets.flatten(), strict=True):
        rough += reference(layer, h, target.view(1, 1, 1), torch.ones(()))[2].bfloat16()
    error, rough_error = ((g.double() - expected).abs().max() for g in (chunked, rough))
    assert error < rough_error / 4, (error, rough_error)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operator returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.numel())
        return out


@pytest.mark.parametrize("per_token", [False, True])
def test_no_tensor_has_the_logits_of_more_positions_than_a_chunk(monkeypatch, per_token):
    layer, x, targets = Head(4, 1000), torch.randn(1, 256, 4).requires_grad_(), torch.arange(256)
    found = []
    for positions in (8, 1000):
        monkeypatch.setattr(head, "CHUNK_BYTES", positions * 4 * 1000)
        with Largest() as largest:
            layer(x, targets.view(1, 1, 256), per_token=per_token).sum().backward()
        found.append(largest.elements)
    assert found == [8 * 1000, 256 * 1000]


def test_a_second_backward_of_the_sums_is_refused(monkeypatch):
    monkeypatch.setattr(head, "CHUNK_BYTES", POSITION)
    layer, x, targets = an_input(torch.float32)
    total = layer(x, targets).sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
