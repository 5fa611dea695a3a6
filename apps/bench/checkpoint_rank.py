"""One rank that saves and loads checkpoints and plain files of their size; see checkpoint.py.

torchrun --nproc-per-node 2 -m apps.bench.checkpoint_rank SECONDS.json FOLDER REPEATS config=...
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from apps.bench.checkpoint import TOPOLOGIES
from apps.main.config import TrainArgs
from apps.main.transformer import build
from lingua.checkpoint.folder import newest
from lingua.checkpoint.save import save
from lingua.checkpoint.source import open_checkpoint
from lingua.checkpoint.tensors import tensors_of
from lingua.config.load import load
from lingua.config.meta_lingua import META_LINGUA
from lingua.optim.optimizer import build_optimizer
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.mesh import AXES
from lingua.parallel.parallelize import parallelize_model
from lingua.parallel.program import run_program
from lingua.tokenizer import build_tokenizer

BLOCK = 1 << 20  # bytes that a plain read asks for at once


def measure(args: TrainArgs, folder: Path, repeats: int) -> dict[str, Any]:
    """Seconds of every turn, from when all ranks begin to when the last is done. A first round is
    not counted. Called by every rank, with the same result."""
    launch, d = detect_launch(), args.distributed
    if args.model.vocab_size == -1:
        args.model.vocab_size = build_tokenizer(args.data.tokenizer).vocab_size
    d.dp_replicate, d.dp_shard, d.tp_size = next(iter(TOPOLOGIES.values()))
    start(torch.device("cpu"), launch, d)
    states = {name: state_on(args, sizes) for name, sizes in TOPOLOGIES.items()}
    saved, *others = states
    fill(states[saved])
    root, plain = folder / "checkpoints", folder / f"plain{launch.rank}"
    save(root, 0, states[saved], {}, "")
    (mine,) = (root / f"{0:010d}").glob(f"__{launch.rank}_*")
    content = mine.read_bytes()
    use_memory(2 * len(content))
    writes = {
        "save": lambda: save(root, 0, states[saved], {}, ""),
        "write": lambda: write(plain, content),
    }
    reads = {"read": lambda: read(plain)} | {
        f"load {name}": partial(load_newest, root, tensors) for name, tensors in states.items()
    }
    rounds = []
    for i in range(1 + repeats):
        start_over(root, plain)
        seconds = {}
        for turns in (writes, reads):
            for name in (*turns, *turns)[i % len(turns) :][: len(turns)]:  # none is always first
                for path in (mine, plain):
                    if path.exists():
                        forget(path)
                seconds[name] = timed(turns[name])
        rounds.append({name: seconds[name] for name in (*writes, *reads)})
    start_over(root, plain)
    for name in others:
        check_equal(states[saved], states[name])
    size = torch.tensor(len(content))
    dist.all_reduce(size)
    return {"bytes": size.item(), "rounds": rounds[1:]}


def use_memory(size: int) -> None:
    """Have `size` bytes of memory in use once. Memory that a virtual machine did not use for a
    while is its host's; to get it back for the page cache takes longer than to write it to the
    disk, and it would be one kind of turn that pays."""
    torch.ones(size, dtype=torch.uint8)


def start_over(root: Path, plain: Path) -> None:
    """Remove what was written, on every rank."""
    plain.unlink(missing_ok=True)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root)
    dist.barrier()


def state_on(args: TrainArgs, sizes: tuple[int, int, int]) -> dict[str, Tensor]:
    """Model and moments as the training program lays them out on a mesh of these sizes."""
    built = build(args)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    model = parallelize_model(built.module, mesh, built.plan, args.distributed)
    model.to_empty(device="cpu")
    return tensors_of(model, build_optimizer(model, args.optim))


def fill(tensors: dict[str, Tensor]) -> None:
    """Give every element a value of its own; each rank has other parts of sharded tensors."""
    torch.manual_seed(dist.get_rank())
    for t in tensors.values():
        if isinstance(t, DTensor):
            t.to_local().uniform_()


def timed(work: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - begin


def load_newest(root: Path, tensors: dict[str, Tensor]) -> None:
    """As a run that resumes does it."""
    checkpoint = newest(root, "full", lambda line: None)
    assert checkpoint is not None
    open_checkpoint(checkpoint).load(tensors)


def write(path: Path, content: bytes) -> None:
    with path.open("wb", buffering=0) as f:
        written = f.write(content)
        assert written == len(content)
        os.fsync(f.fileno())


def read(path: Path) -> None:
    block = bytearray(BLOCK)
    with path.open("rb", buffering=0) as f:
        while f.readinto(block):
            pass


def forget(path: Path) -> None:
    """Let the system drop a file, which is on the disk, from its page cache."""
    with path.open("rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def check_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """That what was loaded on one topology is what was loaded on another."""
    for name, t in a.items():
        whole, other = (t.full_tensor() if isinstance(t, DTensor) else t for t in (t, b[name]))
        assert torch.equal(whole, other), name


def main() -> None:
    path, folder, repeats, *keys = sys.argv[1:]
    args, _ = load(TrainArgs, keys, foreign=META_LINGUA)
    found = measure(args, Path(folder), int(repeats))
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    run_program(main)
