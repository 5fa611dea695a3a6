"""One step of a run on tensors without memory, as rank 0 of ranks that do not exist: what it takes
of memory, and what it sends."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from lingua.app import App
from lingua.model import transformer
from lingua.model.args import AttnImpl
from lingua.model.attention import choose_attention
from lingua.monitor.collectives import CollectiveCounter
from lingua.parallel.mesh import AXES, share_rows
from lingua.parallel.parallelize import parallelize_model
from lingua.parallel.plan import ParallelPlan, find_modules, parameters_of
from lingua.parallel.tensors import as_shard, local
from lingua.parallel.torch_private import OpOverload, is_traceable_wrapper_subclass_type, schema
from lingua.run.args import RunArgs
from lingua.tools.plan.memory import BLOCK_BYTES, LiveMemory
from lingua.tools.plan.step import Step, build, degree_of
from lingua.tools.plan.work import Kernel, KernelCounter
from lingua.tools.torch_private import (
    ADD_PRODUCT,
    READ_NUMBER,
    WAIT_TENSOR,
    OperatorMode,
    cpu_attention,
    efficient_attention,
    fake_ranks,
    flash_attention,
    training_on_meta,
)

MAX_TRACED = 2  # micro-steps to trace: the last, and one of the others, which are alike
META = torch.device("meta")


@dataclass(frozen=True)
class StepPart:
    """The kernels and collectives of a rank in a part of a step."""

    kernels: Counter[Kernel]
    collectives: list[dict[str, Any]]  # CollectiveCounter.totals

    def plus(self, other: "StepPart", times: float) -> "StepPart":
        """Add `times` another part; entries that become zero are left out."""
        kernels = self.kernels.copy()
        for kernel, n in other.kernels.items():
            kernels[kernel] += round(times * n)
        totals = {_key(t): dict(t) for t in self.collectives}
        for t in other.collectives:
            total = totals.setdefault(_key(t), t | {"count": 0, "bytes": 0})
            for number in ("count", "bytes"):
                total[number] += round(times * t[number])
        kept = [t for t in totals.values() if t["count"]]
        return StepPart(+kernels, sorted(kept, key=lambda t: -t["bytes"]))


def _key(total: dict[str, Any]) -> tuple[str, str, bool]:
    return total["kind"], total["axis"], total["backward"]


@dataclass(frozen=True)
class Trace:
    """A step of one rank. Bytes."""

    sizes: tuple[int, ...]  # mesh: dp_replicate, dp_shard, tp, and cp where it is not 1
    parameters: int  # elements of the whole model
    trained: int  # those that are not frozen
    n_micro: int
    rows: int  # micro-batch size
    flops_per_token: float
    start: dict[str, int]  # memory by kind when the step begins
    peak: dict[str, int]  # memory by kind at the peak of the step
    kept: int  # gradients between micro-steps
    micro: StepPart  # each micro-step but the last
    last: StepPart  # the last one
    update: StepPart  # clipping and optimizer
    base: int = 0  # parameters that are in no checkpoint

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes[:3])

    @property
    def collectives(self) -> list[dict[str, Any]]:
        """The collectives of the step, as CollectiveCounter.totals."""
        return self.last.plus(self.micro, self.n_micro - 1).plus(self.update, 1).collectives

    @property
    def own_bytes(self) -> int:
        """Bytes of parameters and optimizer state that a checkpoint has."""
        return self.start["parameters"] + self.start["optimizer"] - self.base

    @property
    def allocated(self) -> int:
        """Bytes allocated at the peak."""
        return sum(self.peak.values())


@contextmanager
def _kernels_of(device: str) -> Iterator[None]:
    """Inside it, attention is that of this type of device, and functions of torch keep the tensors
    that its kernels keep, where torch has others for the meta device."""
    norm, attend = F.rms_norm, F.scaled_dot_product_attention

    def rms_norm(
        x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        mixed = isinstance(x, DTensor) != isinstance(weight, DTensor)
        if device == "cpu" or weight is None or mixed:
            return norm(x, shape, weight, eps)
        if not isinstance(weight, DTensor):
            return _RmsNorm.apply(x, weight)
        # Each rank's gradient of the weight is the part that its positions give.
        whole = weight.to_local(grad_placements=[Partial()])
        return as_shard(_RmsNorm.apply(local(x), whole), x)

    def attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        causal = kwargs.get("is_causal", False)
        if v.shape[-1] != q.shape[-1]:  # the kernels below take no such values
            if device == "cuda" and attn_mask is None and not args:
                return efficient_attention(q, k, v, None, True, 0.0, causal)[0]
            return attend(q, k, v, attn_mask, *args, **kwargs)
        if device == "cpu":
            bias = None if attn_mask is None else attn_mask.to(q.dtype)
            return cpu_attention(q, k, v, 0.0, causal, attn_mask=bias)[0]
        if attn_mask is not None or args:
            return attend(q, k, v, attn_mask, *args, **kwargs)
        return flash_attention(q, k, v, 0.0, causal)[0]

    def choose(
        asked: AttnImpl, head_dim: int, _: torch.device, dtype: torch.dtype, masked: bool
    ) -> tuple[AttnImpl, str]:
        if device == "cuda" and asked != "sdpa" and (masked or asked != "auto"):
            return "varlen", "the other kernels that skip what is hidden keep the same tensors"
        return choose_attention(asked, head_dim, torch.device(device), dtype, masked)

    # Not a TorchFunctionMode, which a backward pass leaves.
    with (
        patch.multiple(F, rms_norm=rms_norm, scaled_dot_product_attention=attention),
        patch.object(transformer, "choose_attention", choose),
        patch.object(transformer, "eager_on_cpu", lambda x: device == "cpu" and type(x) is Tensor),
    ):
        yield


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


def trace(app: App, args: RunArgs, sizes: tuple[int, ...], device: str) -> Trace:
    """Trace a step of a config of `app` on a mesh of these sizes. `device` is the type of the real
    devices. Compiled blocks are taken as they are without the compiler. Raises UserError."""
    built = build(app, args, degree_of(sizes))
    n_micro, rows = args.micro_steps(degree_of(sizes))
    args.distributed.compile = False
    parameters = list(built.module.parameters())
    n_parameters, n_trained = (
        sum(p.numel() for p in parameters if p.requires_grad or not trained)
        for trained in (False, True)
    )
    with ExitStack() as modes:
        modes.enter_context(fake_ranks(math.prod(sizes[:3])))
        mesh = init_device_mesh("cpu", sizes[:3], mesh_dim_names=AXES)
        share_rows(mesh, (*sizes, 1)[3])
        model = parallelize_model(built.module, mesh, built.plan, args.distributed, args.exact)
        modes.enter_context(_kernels_of(device))
        memory = LiveMemory(BLOCK_BYTES if device == "cuda" else 1)
        plan = built.plan or ParallelPlan()
        memory.watch(model, find_modules(model, (*plan.blocks, *plan.compiled)).values())
        modes.enter_context(training_on_meta())
        modes.enter_context(memory.resizes())
        operators = modes.enter_context(_Operators(mesh, memory))
        memory.register("parameters", [*model.parameters(), *model.buffers()])
        base = [local(p) for n, p in parameters_of(model).items() if n in built.base]
        step = Step(app, args, built, mesh, model)
        memory.register("optimizer", [dict(s) for s in step.run.optimizer.state.values()])
        traced, parts = min(n_micro, MAX_TRACED), []
        for n in (max(1, traced - 1), traced):  # FSDP settles in the first one
            start = memory.now.copy()
            memory.restart()
            parts.append(operators.parts_of(step, n))
    (before, _), (last, update) = parts
    micro = last.plus(before, -1) if traced > 1 else StepPart(Counter(), [])
    return Trace(
        sizes, n_parameters, n_trained, n_micro, rows, built.flops_per_token, dict(start),
        dict(memory.peak), memory.kept[-1] - memory.kept[0], micro, last.plus(micro, 1 - traced),
        update, sum(t.untyped_storage().nbytes() for t in base),
    )  # fmt: skip


class _Operators(OperatorMode):
    """Context manager that runs every operator on the meta device, and counts it."""

    def __init__(self, mesh: DeviceMesh, memory: LiveMemory) -> None:
        super().__init__()
        self.mesh, self.memory = mesh, memory
        self.kernels, self.collectives = KernelCounter(), CollectiveCounter(mesh)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        if func is WAIT_TENSOR:
            return args[0]
        if func is torch.ops.aten.lift_fresh.default:  # a tensor made from Python's numbers
            return torch.empty_like(args[0], device=META)
        if func is READ_NUMBER:
            return 0.5 if args[0].is_floating_point() else args[0].dtype != torch.bool
        if _takes_device(func):
            kwargs = kwargs | {"device": META}
        result = kwargs["out"] if func is ADD_PRODUCT else func(*args, **kwargs)
        if not func.is_view:
            self.kernels.count(func, args, kwargs, result, self.memory.place)
            self.collectives.count(func, args, kwargs, result)
            self.memory.see(func, args, kwargs, result)
        return result

    def part(self) -> StepPart:
        """Returns what was counted since the last call."""
        part = StepPart(self.kernels.kernels, self.collectives.totals)
        self.kernels, self.collectives = KernelCounter(), CollectiveCounter(self.mesh)
        return part

    def parts_of(self, step: Step, n: int) -> tuple[StepPart, StepPart]:
        """A step of n micro-steps: their part, and what follows."""
        self.part()
        micro: list[StepPart] = []
        step.take(n, lambda: micro.append(self.part()))
        return micro[0], self.part()


@cache
def _takes_device(func: OpOverload) -> bool:
    return any(argument.name == "device" for argument in schema(func).arguments)
