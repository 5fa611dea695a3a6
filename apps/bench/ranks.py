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
from lingua.checkpoint.retention import CheckpointArgs, DumpEvery
from lingua.checkpoint.saver import Saver
from lingua.checkpoint.state import Progress
from lingua.parallel.launch import detect_launch, leave, start
from lingua.parallel.mesh import on_rank_0, world_sum_

RANKS, ESTIMATED = (8, 16, 32, 64), (1024, 4096)
NODE = 8  # ranks of a node
TINY = ["model.dim=64", "model.n_layers=2", "model.n_heads=4", "device=cpu"]
STEPS, WORK_S, LATE_S = 40, 0.1, 0.05  # of the agreement: a rank is late, another one in each step
SAVES = 4

# name, form of the numbers, key
ROWS = [
    ("start to mesh, s, median rank", ".2f", "start_s"),
    ("messages to rank 0 until then", ",.0f", "start_messages"),
    ("descriptors opened by rank 0", ".0f", "files_0"),
    ("descriptors opened by another rank", ".0f", "files"),
    ("first save: KiB that rank 0 receives", ",.0f", "first_kib"),
    ("first save: CPU s of rank 0", ".2f", "first_cpu"),
    ("later save: KiB that rank 0 receives", ",.0f", "later_kib"),
    ("later save: messages that it receives", ",.0f", "later_messages"),
    ("later save: CPU s of rank 0", ".3f", "later_cpu_0"),
    ("later save: CPU s of another rank", ".3f", "later_cpu"),
    ("agreement: hops one after another", ",.0f", "hops"),
    ("ms a step, agreement awaited at once", ".0f", "at_once_ms"),
    ("ms a step, agreement begun a step ahead", ".0f", "ahead_ms"),
]
SLEPT = ("at_once_ms", "ahead_ms")  # mostly what the ranks sleep: nothing to estimate from


def measure(keys: list[str]) -> Report:
    results = {n: run_ranks(n, with_defaults(TINY, keys)) for n in RANKS}
    rows = [("", *(f"{n}" for n in RANKS), *(f"{n:,} *" for n in ESTIMATED))]
    for name, form, key in ROWS:
        measured = [results[n][key] for n in RANKS]
        estimates = np.polyval(np.polyfit(RANKS, measured, 1), ESTIMATED)
        estimated = [""] * len(ESTIMATED) if key in SLEPT else [f"{e:{form}}" for e in estimates]
        rows.append((name, *(f"{value:{form}}" for value in measured), *estimated))
    notes = [
        "* estimates: a line through the four that were measured",
        f"later saves: medians of {SAVES - 1}; a step is {1000 * WORK_S:.0f} ms, and another rank "
        f"is {1000 * LATE_S:.0f} ms late in each",
    ]
    return Report(rows, notes, {"ranks": results})


def run_ranks(n: int, keys: list[str]) -> dict[str, float]:
    """The numbers of `n` ranks, by the keys of ROWS."""
    print(f"{n} processes", file=sys.stderr)
    with TemporaryDirectory(prefix="bench-", dir=Path.cwd()) as folder:
        place = (n, get_free_port(), Path(folder), keys, get_context("fork").Barrier(n))
        start_processes(rank_here, place, n, start_method="fork")
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(n)]
    first, *others = ranks
    [first_save, *_], saves = first["saves"], [rank["saves"][1:] for rank in ranks]
    n_bytes, n_messages, cpu_s = np.median(saves[0], 0).tolist()
    return {
        "start_s": float(np.median([rank["start_s"] for rank in ranks])),
        "start_messages": first["start_messages"],
        "files_0": first["files"],
        "files": max(rank["files"] for rank in others),
        "first_kib": first_save[0] / 1024,
        "first_cpu": first_save[2],
        "later_kib": n_bytes / 1024,
        "later_messages": n_messages,
        "later_cpu_0": cpu_s,
        "later_cpu": float(np.median(saves[1:], (0, 1))[2]),
        "hops": 2 * (n - 1),
        **{key: first[key] for key in SLEPT},
    }


def rank_here(rank: int, n: int, port: int, folder: Path, keys: list[str], ready: Any) -> None:
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


def numbers_of_rank(n: int, folder: Path, keys: list[str], ready: Any) -> dict[str, Any]:
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
    for key in SLEPT:
        world_sum_(torch.ones(1))
        begin = time.perf_counter()
        for step in range(STEPS):
            time.sleep(LATE_S * (step % n == launch.rank))
            agreement = dist.all_reduce(torch.ones(4), async_op=True)
            if key == "at_once_ms":
                agreement.wait()
            time.sleep(WORK_S)
            agreement.wait()
        world_sum_(torch.ones(1))
        numbers[key] = 1000 * (time.perf_counter() - begin) / STEPS
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
