"""The tensors that are alive during a step, by kind, where they take the most memory."""

import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lingua.model.head import Head
from lingua.parallel.tensors import local
from lingua.parallel.torch_private import OpOverload, graph_task_id
from lingua.tools.plan.work import Place, tensors_in
from lingua.tools.torch_private import resizes_observed

BLOCK_BYTES = 512  # CUDA's caching allocator rounds an allocation up to a multiple
# What FSDP is doing, by the name that it gives the profiler.
_FSDP = {"FSDP::all_gather": "gathered parameters", "FSDP::post_backward": "gradients"}


class LiveMemory:
    """Follows the storages of the tensors that operators make until they are freed. torch's own
    tool for it, FSDPMemTracker, replaces private methods of FSDP and does not separate recomputed
    activations from kept ones.

    now, peak: bytes by kind, at the moment and when their sum was largest.
        parameters, optimizer: registered with `register`.
        gradients: of parameters, before and after they are reduced, with the buffers of that.
        gathered parameters: what FSDP gathers or casts.
        activations: made in a forward pass outside of the head; working memory included.
        head: logits, their chunks, gradients that are made with them.
        backward: working memory of the backward pass, recomputed activations included.
        other: of clipping and of the optimizer.
    """

    def __init__(self, block: int = BLOCK_BYTES) -> None:
        """block: bytes that an allocation is rounded up to; 1 where it is not."""
        self.block = block
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._total = self._max_total = 0
        self._sizes: dict[int, tuple[str, int]] = {}  # kind and bytes by storage
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.kept: list[int] = []  # bytes of gradients as each forward of the model begins
        self._fsdp: list[str] = []  # names of nested regions
        self._forward: list[str] = []
        self._n_blocks = 0  # blocks whose forward pass runs now
        self._n_float8 = 0  # products in float8 that run now, with the casts of their operands

    def watch(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """Tell the forward passes of a model from other work, the head from the rest, and the
        blocks, which are all modules that may be compiled, from what is outside."""
        model.register_forward_pre_hook(lambda m, x: self._begin())
        for module in model.modules():
            if module is model or isinstance(module, Head):
                kind = "head" if isinstance(module, Head) else "activations"
                module.register_forward_pre_hook(lambda m, x, kind=kind: self._forward.append(kind))
                module.register_forward_hook(lambda m, x, y: self._forward.pop() and None)
        for block in blocks:
            block.register_forward_pre_hook(lambda m, x: self._enter_block(1))
            block.register_forward_hook(lambda m, x, y: self._enter_block(-1))
            for module in block.modules():
                if type(module).__module__.startswith("torchao."):
                    module.register_forward_pre_hook(lambda m, x: self._enter_float8(1))
                    module.register_forward_hook(lambda m, x, y: self._leave_float8(y))

    def register(self, kind: str, tensors: Any) -> None:
        """Count these tensors as this kind, whatever made them."""
        for t in tensors_in(tensors):
            self._follow(local(t).untyped_storage(), kind, again=True)

    def restart(self) -> None:
        """Measure `peak` and `kept` anew from here on."""
        self.peak, self._max_total, self.kept = self.now.copy(), self._total, []

    def resizes(self) -> AbstractContextManager[None]:
        """Inside it, changes of a storage's size are seen."""
        return resizes_observed(self._resized)

    def see(self, func: OpOverload, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Follow what an operator has made."""
        if func.namespace == "profiler":
            self._region(func, args)
        kind = self._kind()
        for t in tensors_in(result):
            self._follow(t.untyped_storage(), kind)

    @property
    def place(self) -> Place:
        """What runs now. Of a backward pass all is taken to be the blocks'."""
        if any(name.startswith("FSDP::") for name in self._fsdp):
            return "fsdp"
        if self._n_float8:
            return "float8"
        return "block" if self._n_blocks or graph_task_id() != -1 else "outside"

    def _enter_float8(self, n: int) -> None:
        self._n_float8 += n

    def _leave_float8(self, out: Tensor) -> None:
        """The forward pass of a product ends; find its backward pass."""
        self._enter_float8(-1)
        node = out.grad_fn
        while node is not None and "float8" not in node.name():
            node = node.next_functions[0][0]
        if node is not None:
            node.register_prehook(lambda upstream: self._enter_float8(1))
            node.register_hook(lambda grads, upstream: self._enter_float8(-1))

    def _enter_block(self, n: int) -> None:
        self._n_blocks += n

    def _begin(self) -> None:
        for key, (kind, _) in list(self._sizes.items()):
            if kind == "backward":  # what a backward pass leaves
                self._move(key, "gradients")
        self.kept.append(self.now["gradients"])

    def _region(self, func: OpOverload, args: tuple) -> None:
        if "enter" in str(func):
            self._fsdp.append(args[0])
        elif self._fsdp:
            self._fsdp.pop()

    def _kind(self) -> str:
        for name in reversed(self._fsdp):
            for prefix, kind in _FSDP.items():
                if name.startswith(prefix):
                    return kind
        if graph_task_id() != -1:
            return "backward"
        return self._forward[-1] if self._forward else "other"

    def _follow(self, storage: torch.UntypedStorage, kind: str, again: bool = False) -> None:
        key = id(storage)
        if key in self._sizes:
            if again:
                self._move(key, kind)
            return
        size = self._rounded(storage.nbytes())
        self._sizes[key] = kind, size
        self._refs[key] = weakref.ref(storage, lambda _: self._freed(key))
        self._add(kind, size)

    def _move(self, key: int, kind: str) -> None:
        before, size = self._sizes[key]
        self._sizes[key] = kind, size
        self.now[before] -= size
        self.now[kind] += size

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._sizes:
            kind, before = self._sizes[key]
            size = self._rounded(storage.nbytes())
            self._sizes[key] = kind, size
            self._add(kind, size - before)

    def _freed(self, key: int) -> None:
        kind, size = self._sizes.pop(key)
        del self._refs[key]
        self._add(kind, -size)

    def _rounded(self, n_bytes: int) -> int:
        return -(-n_bytes // self.block) * self.block

    def _add(self, kind: str, n_bytes: int) -> None:
        self.now[kind] += n_bytes
        self._total += n_bytes
        if self._total > self._max_total:
            self._max_total, self.peak = self._total, self.now.copy()
