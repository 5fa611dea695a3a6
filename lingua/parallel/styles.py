"""Styles of tensor parallelism that torch does not have."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle


class FeatureParallel(ParallelStyle):
    """Splits the input of a module, its parameters and its output over features, their last
    dimension. Its arithmetic must be of operators that DTensor splits so."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._split, self._enter, self._leave)

    @staticmethod
    def _split(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, p in module.named_parameters(recurse=False):
            module.register_parameter(key, nn.Parameter(distribute_tensor(p, mesh, [Shard(-1)])))

    @staticmethod
    def _enter(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        return DTensor.from_local(inputs[0], mesh, [Shard(-1)], run_check=False)

    @staticmethod
    def _leave(module: nn.Module, out: Any, mesh: DeviceMesh) -> Any:
        return out.redistribute(placements=[Shard(-1)]).to_local()


class Replicated(ParallelStyle):
    """Computes a module whole on each rank, of an input that is whole there; what it returns is
    whole and plain. Of that, styled modules give each rank the whole gradient; where a rank uses
    it with its own heads (`by_heads`), the gradient is the sum of those of all ranks."""

    def __init__(self, by_heads: bool = False) -> None:
        self.gradient = [Partial() if by_heads else Replicate()]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, self._enter, self._leave)

    @staticmethod
    def _enter(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        x, *others = inputs
        x = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()])
        return (x, *others)

    def _leave(self, module: nn.Module, out: Any, mesh: DeviceMesh) -> Any:
        added_up = out.redistribute(placements=[Replicate()])  # which gradients are there
        return added_up.to_local(grad_placements=self.gradient)


class SplitWeight(ParallelStyle):
    """Splits the parameters of a module, and with them what it returns, a parameter, over their
    first dimension. A rank computes with its part (see lingua.model.scan.Weight)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._split, output_fn=self._leave)

    @staticmethod
    def _split(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, p in module.named_parameters(recurse=False):
            module.register_parameter(key, nn.Parameter(distribute_tensor(p, mesh, [Shard(0)])))

    @staticmethod
    def _leave(module: nn.Module, out: Any, mesh: DeviceMesh) -> Any:
        return out.to_local()


def unclear(styles: Mapping[str, ParallelStyle]) -> Iterator[str]:
    """A line for each of these styles that gives each rank a whole, plain output: whether of its
    gradient a rank has all or its own part, it does not say."""
    for name, style in styles.items():
        if not isinstance(style, ColwiseParallel):
            continue
        if style.use_local_output and style.output_layouts == (Replicate(),):
            yield (
                f"ParallelPlan.tp: {name} is ColwiseParallel(output_layouts=Replicate()) in a "
                "block, where a rank may have its own part of the gradient alone. "
                "lingua.parallel.styles.Replicated says which; with use_local_output=False the "
                "output stays a DTensor"
            )
