"""What grows with the ranks: descriptors, messages and seconds of a start, of saves in the
background and of a step's agreement, counted in real processes.

They are forked on this machine, with nodes of 8 ranks and a tiny model sharded over all.
"""

import json
import os
import socket
import struct
import sys
import time
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.multiprocessing import start_processes

from apps.bench.checkpoint import state_on
from apps.bench.launch import read_config, with_defaults
from apps.bench.report import Report
from lingua.checkpoint.args import CheckpointArgs, DumpEvery
from lingua.checkpoint.saver import Saver
from lingua.checkpoint.state import Progress
from lingua.parallel.launch import detect_launch, leave, start
from lingua.parallel.mesh import on_rank_0, world_sum_

RANKS, ESTIMATED = (8, 16, 32, 64), (1024, 4096)
NODE, SAVES = 8, 4  # ranks of a node; saves
TINY = ["model.dim=64", "model.n_layers=2", "model.n_heads=4", "device=cpu"]
STEPS, WORK_S, LATE_S = 40, 0.1, 0.05  # of the agreement: a rank is late, another one in each step
# Mostly what the ranks sleep: nothing to estimate from.
SLEPT = "ms a step, agreement awaited at once", "ms a step, agreement begun a step ahead"


def measure(keys: list[str]) -> Report:
    results = {n: run_ranks(n, with_defaults(TINY, keys)) for n in RANKS}
    rows: list[dict[str, Any]] = []
    for name in results[RANKS[0]]:
        measured = [results[n][name] for n in RANKS]
        line = np.polyfit(RANKS, measured, 1)
        estimated = {} if name in SLEPT else {f"{n:,} *": np.polyval(line, n) for n in ESTIMATED}
        rows.append({"": name, **dict(zip(map(str, RANKS), measured, strict=True)), **estimated})
    notes = [
        "* estimates: a line through the four that were measured",
        f"later saves: medians of {SAVES - 1}; a step is {1000 * WORK_S:.0f} ms, and another rank "
        f"is {1000 * LATE_S:.0f} ms late in each",
    ]
    return Report(rows, notes)


def run_ranks(n: int, keys: list[str]) -> dict[str, float]:
    """The numbers of `n` ranks, by name."""
    print(f"{n} processes", file=sys.stderr)
    with TemporaryDirectory(prefix="bench-", dir=Path.cwd()) as folder:
        place = (n, get_free_port(), Path(folder), keys, get_context("fork").Barrier(n))
        start_processes(rank_here, place, n, start_method="fork")
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(n)]
    first, *others = ranks
    [first_save, *_], saves = first["saves"], [rank["saves"][1:] for rank in ranks]
    n_bytes, n_messages, cpu_s = np.median(saves[0], 0).tolist()
    return {
        "start to mesh, s, median rank": float(np.median([rank["start_s"] for rank in ranks])),
        "messages to rank 0 until then": first["start_messages"],
        "descriptors opened by rank 0": first["files"],
        "descriptors opened by another rank": max(rank["files"] for rank in others),
        "first save: KiB that rank 0 receives": first_save[0] / 1024,
        "first save: CPU s of rank 0": first_save[2],
        "later save: KiB that rank 0 receives": n_bytes / 1024,
        "later save: messages that it receives": n_messages,
        "later save: CPU s of rank 0": cpu_s,
        "later save: CPU s of another rank": float(np.median(saves[1:], (0, 1))[2]),
        "agreement: hops one after another": 2 * (n - 1),
        **{name: first[name] for name in SLEPT},
    }


def rank_here(rank: int, n: int, port: int, folder: Path, keys: list[str], ready: Barrier) -> None:
    """One rank, in a process of its own, which writes its numbers to `folder`."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "RANK": f"{rank}"}
    os.environ |= {"WORLD_SIZE": f"{n}", "LOCAL_RANK": f"{rank % NODE}"}
    os.environ |= {"LOCAL_WORLD_SIZE": f"{NODE}", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # gloo prints what each rank is connected to
    os.dup2(1, 2)
    numbers = numbers_of_rank(n, folder, keys, ready)
    Path(folder, f"{rank}.json").write_text(json.dumps(numbers))
    leave(60)


def numbers_of_rank(n: int, folder: Path, keys: list[str], ready: Barrier) -> dict[str, Any]:
    args = read_config(keys)
    files, launch = len(os.listdir("/proc/self/fd")), detect_launch()
    ready.wait()
    begin = time.perf_counter()
    mesh = start(torch.device("cpu"), launch, args.distributed)
    numbers: dict[str, Any] = {"start_s": time.perf_counter() - begin}
    numbers["start_messages"] = received()[1]
    checkpoint = CheckpointArgs(dump=DumpEvery(keep=1), async_save=True)
    with Saver(folder / "checkpoints", checkpoint) as saver:
        on_rank_0(lambda: None)
        world_sum_(torch.ones(4))
        numbers["files"] = len(os.listdir("/proc/self/fd")) - files
        tensors, numbers["saves"] = state_on(mesh, args), []
        for step in range(1, SAVES + 1):
            world_sum_(torch.ones(1))
            before = np.array([*received(), time.process_time()])
            saver.save(step, tensors, asdict(Progress()), "", final=True)
            world_sum_(torch.ones(1))
            saved = np.array([*received(), time.process_time()]) - before
            numbers["saves"].append(saved.tolist())
    for name in SLEPT:
        world_sum_(torch.ones(1))
        begin = time.perf_counter()
        for step in range(STEPS):
            time.sleep(LATE_S * (step % n == launch.rank))
            agreement = dist.all_reduce(torch.ones(4), async_op=True)
            if name == SLEPT[0]:
                agreement.wait()
            time.sleep(WORK_S)
            agreement.wait()
        world_sum_(torch.ones(1))
        numbers[name] = 1000 * (time.perf_counter() - begin) / STEPS
    return numbers


def received() -> tuple[int, int]:
    """(Bytes, messages) that this process has received over its TCP connections: `man 7 tcp`."""
    n_bytes = n_messages = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
        except OSError:  # not of TCP, or closed
            continue
        if len(info) == 160:
            n_bytes += struct.unpack_from("Q", info, 128)[0]  # tcpi_bytes_received
            n_messages += struct.unpack_from("I", info, 152)[0]  # tcpi_data_segs_in
    return n_bytes, n_messages
