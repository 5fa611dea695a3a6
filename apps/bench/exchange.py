"""Models of transformers: loading, import and export, each over reading or copying the same files.

The folders have random weights of a model that keys describe. Eight processes load each as a
training run does, in float32 and sharded, and read as many bytes. The bfloat16 folder is imported
and exported, and its files are copied: an import is a checkpoint and is synced.
"""

import io
import os
import shutil
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from apps.bench.checkpoint import forget_files
from apps.bench.launch import on_ranks, read_config, with_defaults
from apps.bench.report import Report, side_rows
from apps.bench.turns import BySide, Side, Turns, take_round
from apps.main.config import ModelArgs
from apps.main.hugging_face import llama
from apps.main.transformer import build_transformer, parallel_plan
from lingua.base.files import read_into
from lingua.checkpoint.origin import HF_CONFIG
from lingua.checkpoint.tensors import local_parts, tensors_of
from lingua.monitor.metrics import peak_mem_gib
from lingua.parallel.args import DistributedArgs
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.parallelize import parallelize_model
from lingua.tools.exchange import convert, export
from lingua.tools.exchange.hugging_face import open_folder

PROCESSES = 8
MODEL = ["model.dim=2048", "model.n_layers=4", "model.n_heads=16", "model.vocab_size=32000"]
BYTES = "tokenizer.name=bytes"
PAGE_CACHE, DISK = "from the page cache", "from the disk"
LOADED = {f"load, {w} / read, {w}": (f"load, {w}", f"read, {w}") for w in (PAGE_CACHE, DISK)}
CONVERTED = {f"{a} / {b}": (a, b) for a, b in (("import", "copy, synced"), ("export", "copy"))}


def measure(keys: list[str], repeats: int) -> Report:
    """Everything is written into a folder of the current one, and removed."""
    model: ModelArgs = read_config(with_defaults(MODEL, keys)).model
    rows: list[dict[str, Any]] = []
    notes, results = list[str](), dict[str, Any]()
    with TemporaryDirectory(prefix="bench-", dir=Path.cwd()) as temporary:
        for dtype in (torch.float32, torch.bfloat16):
            folder = Path(temporary) / str(dtype)
            size = write_folder(folder, model, dtype)
            loaded = on_ranks(PROCESSES, load_on_rank, str(folder), f"{repeats}")
            results[title := f"{size / 1e9:.2f} GB of {dtype}"] = loaded
            rows += side_rows(loaded["seconds"], LOADED, f"{title}: ")
            held, peak, largest = (f"{loaded[k] / 1e6:.0f}" for k in ("held", "peak", "largest"))
            notes.append(f"{title}: {held} MB a rank, grows by {peak}; largest tensor: {largest}")
        turns = BySide(Turns)
        for _ in range(repeats):
            convert_once(folder, turns)
    seconds = {side: taken.seconds for side, taken in turns.items()}
    rows += side_rows(seconds, CONVERTED, "convert: ")
    return Report(rows, notes, results)


def write_folder(folder: Path, model: ModelArgs, dtype: torch.dtype) -> int:
    """Write a folder of transformers, a file for each tensor; returns its bytes."""
    folder.mkdir()
    tensors = list(llama.tensors(model).values())
    files = {t.name: f"{t.name}.safetensors" for t in tensors}
    for t in tensors:
        save_file({t.name: torch.randn(t.shape).to(dtype)}, folder / files[t.name])
    export.write_json(folder / export.INDEX, {"weight_map": files})
    export.write_json(folder / HF_CONFIG, llama.to_config(model, 4096))
    return sum((folder / file).stat().st_size for file in files.values())


def convert_once(folder: Path, turns: BySide) -> None:
    """A turn of each side, in a folder that is removed."""
    with TemporaryDirectory(dir=folder.parent) as out, redirect_stdout(io.StringIO()):
        sides: dict[str, Side] = {
            "copy": lambda: copy(folder, Path(out, "copy"), sync=False),
            "copy, synced": lambda: copy(folder, Path(out, "synced"), sync=True),
            "import": lambda: convert.main([f"source={folder}", f"out={out}/ours", BYTES]),
            "export": lambda: convert.main([f"source={out}/ours", f"out={out}/theirs"]),
        }
        for name, side in sides.items():  # in this order: what is imported is exported
            take_round({name: side}, turns, before=os.sync)


def copy(folder: Path, to: Path, sync: bool) -> None:
    to.mkdir()
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as source, (to / file.name).open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
            if sync:
                out.flush()
                os.fsync(out.fileno())


def load_on_rank(path: str, repeats: str) -> dict[str, Any]:
    """Seconds of every turn, from when all ranks begin to when the last is done. Bytes that a rank
    holds, of the largest tensor, and by which the peak of this process's memory grew. Every rank
    calls this."""
    launch, parallel = detect_launch(), DistributedArgs(model_dtype="fp32")
    cpu = torch.device("cpu")
    mesh = start(cpu, launch, parallel)
    source, args, seq_len = open_folder(llama, Path(path))
    model = parallelize_model(build_transformer(args), mesh, parallel_plan(args, seq_len), parallel)
    before = peak_mem_gib(cpu)
    model.to_empty(device="cpu")
    tensors = tensors_of(model)
    source.load(tensors, "model.")
    grown = 2**30 * (peak_mem_gib(cpu) - before)  # mapped files included
    parts = [part.out for part in local_parts(tensors)]
    itemsize = next(iter(source.tensors.values())).itemsize
    memory = torch.ones(sum(part.numel() for part in parts) * itemsize, dtype=torch.uint8)
    files = sorted(Path(path).glob("*.safetensors"))
    turns = BySide(Turns)
    for _ in range(int(repeats)):
        for where in (PAGE_CACHE, DISK):
            sides: dict[str, Side] = {
                f"load, {where}": lambda: source.load(tensors, "model."),
                f"read, {where}": lambda: read(files, memory),
            }
            forgotten = files if where == DISK and launch.rank == 0 else []
            take_round(sides, turns, partial(forget_files, forgotten), dist.barrier)
    seconds = {side: taken.seconds for side, taken in turns.items()}
    largest = max(t.nbytes for t in source.tensors.values())
    held = sum(part.nbytes for part in parts)
    return {"seconds": seconds, "held": held, "largest": largest, "peak": grown}


def read(files: list[Path], memory: Tensor) -> None:
    """As many bytes of the files as `memory` has, from this rank's share of them on."""
    rest = memory.numpy().data
    skip = dist.get_rank() * len(rest)
    for file in files:
        size = file.stat().st_size
        if rest and skip < size:
            with file.open("rb", buffering=0) as f:
                rest = rest[read_into(f.fileno(), rest, skip) :]
        skip = max(0, skip - size)
