"""Saving and loading a checkpoint, over plain files of the same size.

Two processes have a model of the training program with AdamW's moments, 1.2 GB in all unless keys
set another size. Nothing that is read is in the page cache. In a virtual machine, memory that the
host must allocate first makes single turns two to three times as long: so the fastest turns are
reported beside the medians.
"""

import os
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from apps.bench.launch import on_ranks, read_config, with_defaults
from apps.bench.report import Report, side_rows, spread
from apps.bench.turns import BySide, Side, Turns, take_round
from apps.main.config import TrainArgs
from apps.main.transformer import build
from lingua.base.dump_dir import step_folder
from lingua.checkpoint.digest import digest
from lingua.checkpoint.folder import find_on_rank_0, published
from lingua.checkpoint.save import save
from lingua.checkpoint.saved import newest
from lingua.checkpoint.source import open_checkpoint
from lingua.checkpoint.tensors import tensors_of
from lingua.optim.optimizer import build_optimizer
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.mesh import AXES
from lingua.parallel.parallelize import parallelize_model

PROCESSES = 2
# Where to save and load (dp_replicate, dp_shard, tp); the first is the one that saves.
TOPOLOGIES = {"sharded": (1, 2, 1), "tensor-parallel": (1, 1, 2), "replicated": (2, 1, 1)}
MODEL = ["model.dim=1024", "model.n_layers=8", "model.n_heads=16", "device=cpu"]
BLOCK_BYTES = 1 << 20  # bytes of one plain read

first, *others = TOPOLOGIES
RATIOS = {  # name: (over, under), the sides whose seconds are divided
    "rate of saving / of plain files written and synced": ("write", "save"),
    "seconds of the hash of tensors / of saving, which includes it": ("hash", "save"),
    "rate of loading with checksums / of plain files read": ("read", f"load {first}"),
    **{f"seconds on {name} / on {first}": (f"load {name}", f"load {first}") for name in others},
}


def measure(keys: list[str], repeats: int) -> Report:
    """Everything is written into a folder of the current one, and removed."""
    with TemporaryDirectory(prefix="bench-", dir=Path.cwd()) as folder:
        words = [folder, f"{repeats}", *with_defaults(MODEL, keys)]
        results = on_ranks(PROCESSES, take_turns_on_rank, *words)
    gigabytes = results["bytes"] / 1e9
    rows = side_rows(results["seconds"], RATIOS)
    for row, seconds in zip(rows, results["seconds"].values(), strict=False):
        row["GB/s"] = spread(gigabytes / s for s in seconds)
    about = f"{gigabytes:.2f} GB by {PROCESSES} processes, saved by 2 shards; {repeats} rounds"
    return Report(rows, [about], results)


def take_turns_on_rank(folder: str, repeats: str, *keys: str) -> dict[str, Any]:
    """Seconds of every turn, from when all ranks begin to when the last is done. A first round is
    not counted. Every rank calls this, with the same result."""
    args, launch = read_config(keys), detect_launch()
    d = args.distributed
    d.dp_replicate, d.dp_shard, d.tp_size = TOPOLOGIES[first]
    start(torch.device("cpu"), launch, d)
    meshes = (init_device_mesh("cpu", sizes, mesh_dim_names=AXES) for sizes in TOPOLOGIES.values())
    states = {name: state_on(mesh, args) for name, mesh in zip(TOPOLOGIES, meshes, strict=True)}
    torch.manual_seed(launch.rank)  # each rank has other parts of sharded tensors
    for t in states[first].values():
        if isinstance(t, DTensor):
            t.to_local().uniform_()
    root, plain = Path(folder) / "checkpoints", Path(folder) / f"plain{launch.rank}"
    save(root, 0, states[first], {}, "")
    [shard] = (root / step_folder(0)).glob(f"__{launch.rank}_*")
    content = shard.read_bytes()
    # Memory that a virtual machine did not use for a while is its host's: to get it back for the
    # page cache takes longer than to write it to the disk, and one side would pay for it.
    torch.ones(2 * len(content), dtype=torch.uint8)
    writes: dict[str, Side] = {
        "save": lambda: save(root, 0, states[first], {}, ""),
        "write": lambda: write(plain, content),
        "hash": lambda: digest(states[first]),
    }
    reads: dict[str, Side] = {"read": lambda: read(plain)} | {
        f"load {name}": partial(load_newest, root, tensors) for name, tensors in states.items()
    }
    before = partial(forget_files, (shard, plain))
    turns = BySide(Turns)
    for _ in range(1 + int(repeats)):
        start_over(root, plain)
        take_round(writes, turns, before, after=dist.barrier)
        take_round(reads, turns, before, after=dist.barrier)
    start_over(root, plain)
    for name in states[first]:  # every topology loaded the same values
        loaded = (tensors[name] for tensors in states.values())
        whole, *rest = (t.full_tensor() if isinstance(t, DTensor) else t for t in loaded)
        assert all(torch.equal(whole, other) for other in rest), name
    size = torch.tensor(len(content))
    dist.all_reduce(size)
    seconds = {side: taken.seconds[1:] for side, taken in turns.items()}
    return {"bytes": size.item(), "seconds": seconds}


def start_over(root: Path, plain: Path) -> None:
    """Remove what was written, on every rank."""
    plain.unlink(missing_ok=True)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root)
    dist.barrier()


def state_on(mesh: DeviceMesh, args: TrainArgs) -> dict[str, Tensor]:
    """Model and moments as the training program lays them out on a mesh of CPUs."""
    built = build(args)
    model = parallelize_model(built.module, mesh, built.plan, args.distributed)
    model.to_empty(device="cpu")
    return tensors_of(model, build_optimizer(model, args.optim))


def load_newest(root: Path, tensors: dict[str, Tensor]) -> None:
    """As a run that resumes does it."""
    checkpoints = find_on_rank_0(lambda: published(root, lambda line: None))
    open_checkpoint(newest(checkpoints, "full", lambda line: None)).load(tensors)


def forget_files(paths: Iterable[Path]) -> None:
    """Drop files from the page cache, then wait for the other ranks."""
    for path in paths:
        if path.exists():
            with path.open("rb") as f:
                os.fsync(f.fileno())
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()


def write(path: Path, content: bytes) -> None:
    with path.open("wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())


def read(path: Path) -> None:
    block = bytearray(BLOCK_BYTES)
    with path.open("rb", buffering=0) as f:
        while f.readinto(block):
            pass
