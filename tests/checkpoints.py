"""Small checkpoints for tests: tensors in place of a model, saved by real ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lingua.base.dump_dir import MANIFEST
from lingua.base.errors import UserError
from lingua.checkpoint.folder import checksum_of, read_checkpoint
from lingua.checkpoint.save import save
from lingua.checkpoint.source import open_checkpoint
from lingua.parallel.args import DistributedArgs
from lingua.parallel.launch import detect_launch, start

STATE, CONFIG = {"progress": {"step": 7}, "loss": 0.1}, "name: test\n"
CPU = torch.device("cpu")
ANY = (Exception, CheckpointException)  # the latter is a BaseException


def join(sizes: tuple[int, int, int] | None = None) -> DeviceMesh:
    """The mesh of these ranks; by default one axis of data parallelism."""
    args = DistributedArgs()
    if sizes is not None:
        args.dp_replicate, args.dp_shard, args.tp_size = sizes
    return start(CPU, detect_launch(), args)


def whole_values(fill: float = 0.0) -> dict[str, Tensor]:
    """Of several dtypes and sizes, most of which divide by no number of ranks."""
    draw = torch.Generator().manual_seed(1)
    return {
        "model.matrix": torch.randn(7, 3, generator=draw) + fill,
        "model.split twice": torch.randn(5, 9, generator=draw) + fill,
        "model.small": torch.randn(1, 4, generator=draw) + fill,  # empty on all ranks but one
        "model.bf16": (torch.randn(8, 2, generator=draw) + fill).bfloat16(),
        "model.buffer": torch.arange(6) + int(fill),  # plain, equal on every rank
        "model.flag": torch.tensor([True, fill > 0]),
        "optim.step.matrix": torch.tensor(12.0 + fill),
    }


def tensors_on(mesh: DeviceMesh, fill: float = 0.0) -> dict[str, Tensor]:
    """The same, laid out as FSDP and tensor parallelism lay parameters out."""
    tensors = {}
    for name, t in whole_values(fill).items():
        if name in ("model.buffer", "model.flag", "optim.step.matrix"):
            tensors[name] = t
            continue
        places = [Replicate(), Shard(0), Replicate()]
        if name == "model.split twice":
            places[2] = Shard(1)
        tensors[name] = distribute_tensor(t, mesh, places, src_data_rank=None)
    return tensors


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def equal(tensors: dict[str, Tensor], fill: float = 0.0) -> bool:
    expected = whole_values(fill)
    same = [torch.equal(whole(tensors[name]), expected[name]) for name in expected]
    return tensors.keys() == expected.keys() and all(same)


def save_here(root: Path, steps: list[int], sizes=None) -> None:
    mesh = join(sizes)
    for step in steps:
        path = save(root, step, tensors_on(mesh, fill=step), STATE, CONFIG)
        assert path == root / f"{step:010d}"


def load_here(path: Path, fill: float, sizes=None) -> bool:
    """Whether every tensor is, on this mesh, what it was when it was saved."""
    mesh = join(sizes)
    checkpoint, why = read_checkpoint(path)
    assert checkpoint is not None, why
    tensors = tensors_on(mesh, fill=-99)
    assert not equal(tensors, fill)
    open_checkpoint(checkpoint).load(tensors)
    return equal(tensors, fill)


def refusal(work: Callable[[], Any], kinds: Any = UserError) -> str:
    try:
        work()
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def resign(folder: Path) -> None:
    """Let the manifest fit the files as they are now, as somebody who forges a checkpoint would."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"] = {
        path.name: {
            "size": path.stat().st_size,
            "xxh3_64": xxhash.xxh3_64_hexdigest(path.read_bytes()),
        }
        for path in folder.iterdir()
        if path.name != MANIFEST
    }
    write_manifest(folder, manifest)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """With the checksum of its content."""
    manifest["xxh3_64"] = checksum_of(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))
