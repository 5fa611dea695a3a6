"""Products in float8: against torchao's own emulation of them, and by what is sent and computed.
That a run is stopped and goes on with them, on another mesh: tests/apps/test_matrix.py."""

from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from apps.main.config import ModelArgs
from apps.main.transformer import build_transformer, parallel_plan
from lingua.monitor.collectives import CollectiveCounter
from tests.apps.meshes import on_mesh

SEQ = 32
ARGS = ModelArgs(dim=64, n_layers=2, n_heads=4, vocab_size=50, weight_tying=True)
PLAN = parallel_plan(ARGS, SEQ)
BLOCK = 4 * 64 * 64 + 3 * 64 * ARGS.hidden_dim() + 4 * 2 * 64  # bytes: matrices, float32 norms


def backward(model: nn.Module) -> None:
    rows = torch.randint(0, 50, (2, SEQ + 1), generator=torch.Generator().manual_seed(0))
    model(rows[:, :-1], rows[:, 1:][None]).sums.sum().backward()


def gradient(kind: str) -> Tensor:
    model = build_transformer(ARGS)
    if kind == "emulated":
        convert_to_float8_training(model.layers, config=Float8LinearConfig(emulate=True))
    model, _ = on_mesh(model, PLAN, (1, 1, 1), float8="tensorwise" if kind == "float8" else None)
    backward(model)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_products_are_those_of_torchaos_emulation(ranks):
    kinds = ("float8", "emulated", "float32")
    computed, emulated, plain = (ranks.run(1, gradient, kind)[0] for kind in kinds)
    assert (computed - emulated).norm() <= 1e-2 * emulated.norm()  # a sum may round elsewhere
    assert (plain - emulated).norm() >= 5e-2 * emulated.norm()


def traffic(settings: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """The collectives of a step, and the products in float8 in its backward pass."""
    model, mesh = on_mesh(build_transformer(ARGS), PLAN, (1, 2, 1), **settings)
    with CollectiveCounter(mesh) as counter:
        backward(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        backward(model)
    products = sum(event.name == "aten::_scaled_mm" for event in profiler.events())
    return counter.totals, products


def test_weights_are_gathered_in_float8_and_kept_products_are_not_computed_again(ranks):
    def sent(totals: list[dict[str, Any]], kind: str) -> tuple[int, int]:
        chosen = [total for total in totals if total["kind"] == kind]
        return sum(t["count"] for t in chosen), sum(t["bytes"] for t in chosen)

    float8 = {"float8": "tensorwise"}
    totals, products = ranks.run(2, traffic, float8)[0]
    assert sent(totals, "all_reduce")[0] == 1  # all scales
    # Both blocks, and in the backward pass the first again; embedding and norm in float32.
    assert sent(totals, "all_gather")[1] == 3 * BLOCK + 4 * (50 + 1) * 64
    assert products == 14 * 3  # of a matrix: forward, its gradient, and that of its input
    selective = float8 | {"activation_checkpointing": "selective"}
    # The last product of a block is computed again: its operands are saved after it.
    assert ranks.run(2, traffic, selective)[0][1] == 14 * 3 + ARGS.n_layers
