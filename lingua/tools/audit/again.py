"""Computing steps of a run again, by the training program itself, in a folder of its own: nothing
is written into the run's, and its lock is not taken."""

import os
import shutil
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lingua.app import choose_app, main_program
from lingua.base.dump_dir import CHECKPOINTS, METRICS, step_folder
from lingua.base.errors import UserError
from lingua.checkpoint.folder import read_checkpoint
from lingua.checkpoint.run_config import load_run
from lingua.checkpoint.source import TensorSource, open_checkpoint
from lingua.parallel.environment import detect_launch
from lingua.parallel.launch import leave
from lingua.tools.audit.receipt import saved_state
from lingua.tools.audit.segments import Segment
from lingua.tools.in_process import logging_restored, temporary_process_group, torch_restored
from lingua.tools.runs.records import Record

PATIENCE_S = 30.0  # for ranks that are not done with the store of rank 0
# What a run does besides training. Its held-out part stays: it is not in the rows.
OFF: dict[str, Any] = {
    "checkpoint.path": "null",
    "checkpoint.dump": "{every: 0, keep: -1, every_minutes: null}",
    "checkpoint.eval": "{every: 0, keep: -1}",
    "checkpoint.keep_every": 0,
    "checkpoint.keep_best": "false",
    "checkpoint.async_save": "false",
    "checkpoint.on_error": "stop",
    "device": "auto",
    "eval": "null",
    "logging.wandb": "null",
    "profiling.run": "false",
    "samples.every": 0,
    "validation.every": 0,
    "validation.sources": "[]",
}


@dataclass
class Computed:
    """What computing a segment again has given."""

    start: dict[str, Any]  # the event: machine, code, versions
    lines: dict[int, dict[str, Any]]  # of metrics.jsonl, by step
    end: Path  # checkpoint of the last step
    state: dict[str, Any]  # its train_state.json
    topology: list[int]


def compute(segment: Segment, record: Record, words: Sequence[str], folder: Path) -> Computed:
    """Compute a segment in a new `folder`, on the processes of this launch; `words` are keys of the
    training program that go over the run's own. Called by every rank. What the program prints is in
    the file `output` of the folder. Raises UserError where the program refuses."""
    if detect_launch().rank == 0:
        (folder / CHECKPOINTS).mkdir(parents=True)
        if segment.start is not None:
            link = folder / CHECKPOINTS / segment.start.name
            link.symlink_to(segment.start.absolute(), target_is_directory=True)
    argv = command_line(segment, record, words, folder)
    app = choose_app(argv)
    output = os.devnull if detect_launch().rank else os.path.join(folder, "output")
    with (
        open(output, "a") as file,
        redirect_stdout(file),
        redirect_stderr(file),
        logging_restored({app.path.partition(".")[0]}),
        torch_restored(),
        temporary_process_group(),
    ):
        args, _ = load_run(app, argv)
        try:
            stopped_by = import_module(main_program("train")).train(app, args)
        finally:
            if dist.is_initialized():
                leave(PATIENCE_S)
    if stopped_by is not None:
        raise KeyboardInterrupt
    return read_computed(folder, segment)


def command_line(segment: Segment, record: Record, words: Sequence[str], folder: Path) -> list[str]:
    """The words of the training program that computes a segment in a folder."""
    keys = OFF | mesh_keys(record, segment) | {"dump_dir": folder, "stop_at": segment.last}
    if segment.start is not None:  # other data is compared by its rows, not refused
        names = [name for name in saved_state(segment.start).get("data", {}) if "." in name]
        keys["checkpoint.allow_change"] = f"[{', '.join(names)}]"
    return [f"config={segment.config}", *(f"{k}={v}" for k, v in keys.items()), *words]


def read_computed(folder: Path, segment: Segment) -> Computed:
    """What the folder of `compute` has."""
    again = Record(folder)
    lines = {line["step"]: line for line in again.lines(METRICS) if "event" not in line}
    starts = [event for event in again.events if event["event"] == "start"]
    end = folder / CHECKPOINTS / step_folder(segment.last)
    open_saved(end)
    state = saved_state(end)
    return Computed(starts[-1], lines, end, state, state["topology"])


def mesh_keys(record: Record, segment: Segment) -> dict[str, Any]:
    """The mesh that the segment was computed on, where there are as many processes here; otherwise
    all of them share the parameters."""
    sizes, n = topology_of(record, segment), detect_launch().world_size
    names = [f"distributed.{name}" for name in ("dp_replicate", "dp_shard", "tp_size")]
    if prod(sizes) == n:
        return dict(zip(names, sizes, strict=True))
    return dict(zip(names, (1, "null", 1), strict=True)) | {"grad_acc_steps": "null"}


def topology_of(record: Record, segment: Segment) -> list[int]:
    """The mesh that a segment was computed on, as the run recorded it."""
    starts = starts_of(record, segment)
    return list(starts[0].get("topology") or [1, 1, 1]) if starts else [1, 1, 1]


def starts_of(record: Record, segment: Segment) -> list[dict[str, Any]]:
    """The events of the starts that computed a segment: the last one before it, those inside."""
    starts = [e for e in record.events if e["event"] == "start" and e["step"] < segment.last]
    before = [e for e in starts if e["step"] < segment.first]
    return before[-1:] + starts[len(before) :]


def check_memory(saved: Path, n_local: int) -> None:
    """Raise UserError where the tensors of a checkpoint and gradients for its model cannot be in
    the memory of one rank, of `n_local` on this machine."""
    tensors = open_saved(saved).tensors
    model = sum(t.nbytes for name, t in tensors.items() if name.startswith("model."))
    need = sum(t.nbytes for t in tensors.values()) + model
    if torch.cuda.is_available():
        has = torch.cuda.get_device_properties(0).total_memory
    else:
        has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // n_local
    if need > has:
        gib = f"{need / 2**30:.1f} GiB of tensors and gradients, a rank here has {has / 2**30:.1f}"
        raise UserError(f"ranks = all: one rank cannot hold this model: {gib}")


def open_saved(path: Path) -> TensorSource:
    """The tensors of a checkpoint. Raises UserError where it is not whole."""
    checkpoint, why = read_checkpoint(path)
    if checkpoint is None:
        raise UserError(f"{path} is not a whole checkpoint: {why}")
    return open_checkpoint(checkpoint)


def remove(folder: Path) -> None:
    """Remove the folder of a computed segment, and not what its checkpoint's link refers to."""
    shutil.rmtree(folder, ignore_errors=True)
