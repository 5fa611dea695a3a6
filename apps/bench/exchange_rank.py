"""One rank that loads its part of a folder of transformers, or as many bytes; see exchange.py.

torchrun --nproc-per-node 8 -m apps.bench.exchange_rank SECONDS.json FOLDER REPEATS
"""

import json
import resource
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from apps.bench.checkpoint_rank import forget, timed
from apps.bench.exchange import WHERE
from apps.main.hugging_face import llama
from apps.main.transformer import build_transformer, parallel_plan
from lingua.checkpoint.tensors import local_parts, tensors_of
from lingua.hugging_face import open_folder
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.mesh import DistributedArgs
from lingua.parallel.parallelize import parallelize_model
from lingua.parallel.program import run_program


def peak() -> int:
    """The most memory in bytes that this process has had, files mapped into it included."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(folder: Path, repeats: int) -> dict[str, Any]:
    """Seconds of every turn, from when all ranks begin to when the last is done. Bytes that a rank
    holds, of the largest tensor, and by which the peak of this process's memory grew. Called by
    every rank."""
    launch, parallel = detect_launch(), DistributedArgs(model_dtype="fp32")
    mesh = start(torch.device("cpu"), launch, parallel)
    source, args, seq_len = open_folder(llama, str(folder), "folder")
    model = parallelize_model(build_transformer(args), mesh, parallel_plan(args, seq_len), parallel)
    before = peak()
    model.to_empty(device="cpu")
    tensors = tensors_of(model)
    source.load(tensors, "model.")
    grown = peak() - before
    parts = local_parts(tensors)
    n_elements = sum(part.out.numel() for part in parts)
    itemsize = next(iter(source.tensors.values())).itemsize
    memory = torch.ones(n_elements * itemsize, dtype=torch.uint8)
    files = sorted(folder.glob("*.safetensors"))
    turns = {"load": partial(source.load, tensors, "model."), "read": partial(read, files, memory)}
    rounds: list[dict[str, float]] = []
    for i in range(repeats):
        seconds = {}
        for where in WHERE:
            for name in (*turns, *turns)[i % 2 :][:2]:  # none is always first
                if where == "from the disk" and launch.rank == 0:
                    for file in files:
                        forget(file)
                seconds[f"{name}, {where}"] = timed(turns[name])
        rounds.append(seconds)
    largest = max(t.nbytes for t in source.tensors.values())
    held = sum(part.out.nbytes for part in parts)
    return {"rounds": rounds, "held": held, "largest": largest, "peak": grown}


def read(files: list[Path], memory: Tensor) -> None:
    """As many bytes of the files as `memory` has, from this rank's share of them on."""
    rest = memory.numpy().data
    skip = dist.get_rank() * len(rest)
    for file in files:
        size = file.stat().st_size
        if rest and skip < size:
            with file.open("rb", buffering=0) as f:
                f.seek(skip)
                while rest and (n := f.readinto(rest)):
                    rest = rest[n:]
        skip = max(0, skip - size)


def main() -> None:
    path, folder, repeats = sys.argv[1:]
    found = measure(Path(folder), int(repeats))
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    run_program(main)
