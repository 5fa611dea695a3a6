"""Styles of tensor parallelism that torch does not have."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


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
