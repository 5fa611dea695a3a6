"""One step of a run on fake tensors, as rank 0 of as many fake ranks as it will have: what it takes
of memory, and what it sends."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from lingua.app import App, import_named, main_program
from lingua.attention import planned_for
from lingua.dtensor import as_shard
from lingua.init import ties_kept
from lingua.monitor.collectives import CollectiveCounter
from lingua.parallel.mesh import AXES
from lingua.parallel.parallelize import parallelize_model
from lingua.plan.memory import BLOCK, LiveMemory
from lingua.torch_private import FakeTensorMode, fake_ranks, flash_attention

KEY = ("kind", "axis", "backward")  # of a total of collectives
TRACED = 3  # micro-steps at most: the first, the last, and one of those between, which are alike


@dataclass(frozen=True)
class Trace:
    """A step of one rank. Bytes."""

    sizes: tuple[int, int, int]  # of the mesh
    parameters: int  # of the whole model
    n_micro: int
    rows: int  # of a micro-batch
    flops_per_token: float
    start: dict[str, int]  # memory by kind when the step begins
    peak: dict[str, int]  # and where it takes the most
    kept: int  # gradients between micro-steps
    collectives: list[dict[str, Any]]  # as CollectiveCounter.totals


@contextmanager
def _cuda_kernels() -> Iterator[None]:
    """Inside it, functions of torch keep the tensors that the kernels of CUDA keep, where torch has
    others for the CPU."""

    def rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
        if not isinstance(x, DTensor):
            return _RmsNorm.apply(x, weight)
        # Each rank's gradient of the weight is the part that its positions give.
        assert isinstance(weight, DTensor)
        whole = weight.to_local(grad_placements=[Partial()])
        return as_shard(_RmsNorm.apply(x.to_local(), whole), x)

    def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **other: Any) -> Tensor:
        if attn_mask is not None:
            return originals["scaled_dot_product_attention"](q, k, v, attn_mask, **other)
        return flash_attention(q, k, v, 0.0, other["is_causal"])[0]

    replaced = {"rms_norm": rms_norm, "scaled_dot_product_attention": attention}
    originals = {name: getattr(F, name) for name in replaced}
    vars(F).update(replaced)  # not a TorchFunctionMode, which a backward pass leaves
    try:
        yield
    finally:
        vars(F).update(originals)


class _RmsNorm(torch.autograd.Function):
    """One kernel, which keeps its input and the inverse root mean square of each position."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def program() -> ModuleType:
    """The module of the training program that has its step: `plan` beside it."""
    name = main_program("plan")
    return import_named(name, f"script = {name}")


def trace(app: App, args: Any, sizes: tuple[int, int, int], device: str) -> Trace:
    """Trace a step of a config of `app` on a mesh of these sizes. `device` is the type of the real
    devices. Compiled blocks are taken as they are without the compiler. Raises UserError."""
    replicas, shards, tp = sizes
    apps_step = program()
    built = apps_step.build(app, args, replicas * shards)
    n_micro, rows = args.micro_steps(replicas * shards)
    args.distributed.compile = False
    n_parameters = sum(p.numel() for p in built.module.parameters())
    with ExitStack() as modes:
        modes.enter_context(fake_ranks(replicas * shards * tp))
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
        model = parallelize_model(built.module, mesh, built.plan, args.distributed)
        modes.enter_context(planned_for(device))
        if device == "cuda":
            modes.enter_context(_cuda_kernels())
        modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        memory = modes.enter_context(LiveMemory(BLOCK if device == "cuda" else 1))
        memory.watch(model)
        with ties_kept(model):
            model.to_empty(device="cpu")
        memory.register("parameters", [*model.parameters(), *model.buffers()])
        step = apps_step.Step(app, args, built, mesh, model)
        memory.register("optimizer", [dict(s) for s in step.run.optimizer.state.values()])
        step.take(1)  # in the first one, FSDP settles
        counts = []
        for n in sorted({max(1, min(n_micro, TRACED) - 1), min(n_micro, TRACED)}):
            start = memory.now.copy()
            memory.restart()
            with CollectiveCounter(mesh, fake=True) as counter:
                step.take(n)
            counts.append(counter.totals)
    return Trace(
        sizes, n_parameters, n_micro, rows, built.flops_per_token, dict(start), dict(memory.peak),
        memory.kept[-1] - memory.kept[0], _extended(counts, n_micro),
    )  # fmt: skip


def _extended(counts: list[list[dict[str, Any]]], n_micro: int) -> list[dict[str, Any]]:
    """The collectives of `n_micro` micro-steps, by those of one less than were traced, and of as
    many: each further one adds the same."""
    before = {tuple(t[key] for key in KEY): t for t in counts[0]}
    last, more = counts[-1], max(0, n_micro - TRACED)
    extended = []
    for t in last:
        less = before.get(tuple(t[key] for key in KEY), {"count": 0, "bytes": 0})
        grown = {key: t[key] + more * (t[key] - less[key]) for key in ("count", "bytes")}
        extended.append(t | grown)
    return sorted(extended, key=lambda t: -t["bytes"])
