"""The meshes on which tests run, parameters of a test over them, and a module laid out on one."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lingua.parallel.args import DistributedArgs
from lingua.parallel.init import init_parameters
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.parallelize import parallelize_model
from lingua.parallel.plan import ParallelPlan

Sizes = tuple[int, ...]  # of dp_replicate, dp_shard, tp, and cp, which is a part of dp_shard

# Every topology with the largest micro-batch of its own, and a way to sync gradients.
TOPOLOGIES: dict[Sizes, tuple[int, str]] = {
    (1, 1, 1): (7, "last"),
    (2, 1, 1): (1, "replica_last"),
    (1, 2, 1): (3, "last"),
    (1, 1, 2): (2, "last"),
    (2, 2, 1): (1, "every"),
    (2, 1, 2): (2, "last"),
    (1, 2, 2): (4, "every"),
    (2, 2, 2): (1, "last"),
    (1, 3, 1): (1, "last"),
    (3, 1, 2): (2, "replica_last"),
    (1, 2, 1, 2): (3, "last"),
    (1, 4, 1, 4): (7, "every"),
    (1, 4, 1, 2): (2, "last"),
    (1, 2, 2, 2): (2, "every"),
    (2, 2, 1, 2): (1, "replica_last"),
}


def name_of(sizes: Sizes) -> str:
    return "x".join(map(str, sizes))


def mesh(sizes: Sizes) -> dict[str, int]:
    """The keys of a mesh."""
    keys = ("dp_replicate", "dp_shard", "tp_size", "cp_size")
    return {f"distributed.{key}": size for key, size in zip(keys, sizes, strict=False)}


def on_its_own(sizes: Sizes) -> dict[str, Any]:
    """Settings that may differ from topology to topology."""
    batch_size, grad_sync = TOPOLOGIES[sizes]
    settings = {"data.batch_size": batch_size, "distributed.grad_sync": grad_sync}
    return settings | {"distributed.reshard": "step" if batch_size in (1, 3) else "always"}


def on_meshes(*default: Sizes, soak: Iterable[Sizes] = ()) -> pytest.MarkDecorator:
    """Each mesh as a case `sizes` of a test; those of `soak` only in the soak tests."""
    cases = [pytest.param(sizes, marks=pytest.mark.soak) for sizes in soak if sizes not in default]
    return pytest.mark.parametrize("sizes", [*default, *cases], ids=name_of)


OnMesh = tuple[nn.Module, DeviceMesh]


def on_mesh(module: nn.Module, plan: ParallelPlan, sizes: Sizes, **settings: Any) -> OnMesh:
    """The module on a mesh of these ranks, in float32 unless `settings` have another dtype, with
    the initial values of seed 1."""
    args, cpu = DistributedArgs(*sizes, **({"model_dtype": "fp32"} | settings)), torch.device("cpu")
    mesh = start(cpu, detect_launch(), args)
    model = parallelize_model(module, mesh, plan, args)
    init_parameters(model, 1, cpu)
    return model, mesh
