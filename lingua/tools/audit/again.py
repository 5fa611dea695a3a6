"""Computing steps of a run again, by the training program itself or by a file of another
implementation, in a folder of its own: nothing is written into the run's, and its lock is not
taken."""

import json
import math
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lingua.app import App, choose_app
from lingua.base.dump_dir import CHECKPOINTS, VALIDATION, step_folder
from lingua.base.errors import UserError
from lingua.checkpoint.folder import Checkpoint, read_checkpoint, read_state
from lingua.checkpoint.run_config import load_run
from lingua.checkpoint.source import TensorSource, open_checkpoint
from lingua.checkpoint.state import versions
from lingua.config.load import resume_classes, to_yaml
from lingua.data.rows import CONTENT
from lingua.parallel.alone import process_restored
from lingua.parallel.environment import detect_launch
from lingua.parallel.launch import leave
from lingua.run.args import RunArgs
from lingua.run.program import load_loop
from lingua.run.receipt import saved_state
from lingua.tools.audit.files import RunFiles
from lingua.tools.audit.independent import Implementation
from lingua.tools.audit.records import digest_of_files
from lingua.tools.audit.segments import Part, Segment

PATIENCE_S = 30.0  # for ranks that are not done with the store of rank 0
# What a run does besides training and measuring. Its held-out part stays: it is not in the rows.
OFF: dict[str, Any] = {
    "checkpoint.path": "null",
    "checkpoint.dump": "{every: 0, keep: -1, every_minutes: null}",
    "checkpoint.eval": "{every: 0, keep: -1}",
    "checkpoint.keep_every": 0,
    "checkpoint.async_save": "false",
    "checkpoint.on_error": "stop",
    "device": "auto",
    "distributed.check_every": "null",
    "distributed.gpu": "null",
    "distributed.spare": "false",
    "eval": "null",
    "logging.to": "[]",
    "logging.trackio": "null",
    "logging.wandb": "null",
    "profiling.run": "false",
    "samples.every": 0,
}
NOT_MEASURED: dict[str, Any] = {"validation.every": 0, "validation.sources": "[]"}


@dataclass
class Computed:
    """What computing a segment again has given."""

    starts: list[dict[str, Any]]  # the event of each part: machine, code, versions, mesh
    lines: dict[int, dict[str, Any]]  # of metrics.jsonl, by step
    held_out: dict[tuple[int, str], dict[str, Any]]  # lines by step and source
    end: Path  # checkpoint of the last step
    state: dict[str, Any]  # its train_state.json


@dataclass(frozen=True)
class Task:
    """A segment to compute again."""

    segment: Segment
    record: RunFiles
    words: Sequence[str]  # keys of the training program that go over the run's own
    folder: Path  # a new one, in a temporary folder of the audit
    heldout: bool  # whether held-out losses are measured again
    by: Implementation | None = None  # what computes it; None: the training program itself


def compute(task: Task, meet: Callable[[str], None] = lambda name: None) -> Computed:
    """Compute a segment on the processes of this launch, one part after the other. Called by every
    rank, which calls `meet` before each part. What the program prints is in the file `output` of
    the folder. Raises UserError where the program refuses."""
    folder, start, rank = task.folder, task.segment.start, detect_launch().rank
    if rank == 0:
        (folder / CHECKPOINTS).mkdir(parents=True)
        if start is not None:
            link = folder / CHECKPOINTS / start.name
            link.symlink_to(start.absolute(), target_is_directory=True)
    output = os.devnull if rank else os.path.join(folder, "output")
    for i, part in enumerate(task.segment.parts):
        meet(f"{folder.name}/{i}")
        config = folder.with_name(f"{folder.name}.{i}.rank{rank}.yaml")
        config.write_text(part.config)
        argv = command_line(task, part, config)
        app = choose_app(argv)
        with (
            open(output, "a") as file,
            redirect_stdout(file),
            redirect_stderr(file),
            process_restored(app.path),
        ):
            args, _ = load_run(app, argv)
            args.data.cache_dir = str(linked_cache(args, folder.with_name("shards")))
            if task.by is not None:
                config.write_text(to_yaml(args))
                stopped_by = task.by.train(config, file)
            else:
                stopped_by = train_here(app, args, start)
        if stopped_by is not None:
            raise KeyboardInterrupt
    return read_computed(task) if task.by is None else read_computed_by(task.by, task)


def train_here(app: App, args: RunArgs, start: Path | None) -> str | None:
    """Run the training program in this process, from the checkpoint `start` if there is one. What
    the run was allowed to change is computed as it was changed. Other data is compared by its rows,
    and by its hash."""
    data = saved_state(start).get("data", {}) if start is not None else {}
    names = [f"{CONTENT}{name}" for name in args.data.used_sources()]
    args.checkpoint.allow_change = [*resume_classes(type(args)), *data, *names]
    try:
        return load_loop().train(app, args)
    finally:
        if dist.is_initialized():
            leave(PATIENCE_S)


def command_line(task: Task, part: Part, config: Path) -> list[str]:
    """The words of the training program that computes a part of a segment; the config of the part
    is in the file `config`."""
    every = part.settings.get("logging.freq")
    lines = [step for step in recorded_lines(task) if step <= part.last]
    keys = OFF | mesh_keys(part) | {"dump_dir": task.folder, "stop_at": part.last}
    keys["logging.freq"] = math.gcd(every if isinstance(every, int) else 1, *lines)
    keys["checkpoint.keep_best"] = json.dumps(task.heldout and part.measured)
    keys |= {} if task.heldout else NOT_MEASURED
    return [f"config={config}", *(f"{k}={v}" for k, v in keys.items()), *task.words]


def recorded_lines(task: Task) -> dict[int, dict[str, Any]]:
    """The lines of metrics.jsonl about the steps of a segment, by step."""
    first, last = task.segment.first, task.segment.last
    return {line["step"]: line for line in task.record.step_lines(first, last)}


def linked_cache(args: RunArgs, folder: Path) -> Path:
    """A folder with links to the shards in the cache of a run, which others may share: what is
    missing there, or not up to date, is made in this folder instead. By rank 0."""
    shared = Path(args.data.cache_dir or Path(args.data.root_dir, ".tokens")).absolute()
    names = [*args.data.used_sources(), *args.validation.sources]
    if detect_launch().rank == 0 and shared.is_dir():
        folder.mkdir(exist_ok=True)
        for place in shared.iterdir():
            copy = folder / place.name
            if not place.name.startswith(tuple(f"{name}-" for name in names)) or copy.exists():
                continue
            if not place.is_dir():
                if place.suffix == ".verified":
                    copy.symlink_to(place)
                continue
            copy.mkdir()
            for file in place.iterdir():
                (copy / file.name).symlink_to(file)
    return folder


def read_computed(task: Task) -> Computed:
    """What the folder of `compute` has."""
    again = RunFiles(task.folder)
    held_out = {(line["step"], line["source"]): line for line in again.lines(VALIDATION)}
    lines = {line["step"]: line for line in again.step_lines()}
    end = task.folder / CHECKPOINTS / step_folder(task.segment.last)
    open_saved(end)
    return Computed(again.starts, lines, held_out, end, saved_state(end))


def read_computed_by(by: Implementation, task: Task) -> Computed:
    """What the folder has once a file of another implementation has computed in it. Raises
    UserError for what no run writes."""
    try:
        computed = read_computed(task)
        read_state(saved_checkpoint(computed.end))
        tensors = digest_of_files(open_saved(computed.end))
    except UserError as error:
        raise UserError(f"{by.file}: {error}") from None
    here = versions() | {"hosts": [socket.gethostname()], "topology": [1, 1, 1]}
    starts = [here | start for start in computed.starts or [{}]]
    return replace(computed, starts=starts, state=computed.state | {"tensors": tensors})


def mesh_keys(part: Part) -> dict[str, Any]:
    """The mesh that a part was computed on, where there are as many processes here; otherwise all
    of them share the parameters."""
    names = [f"distributed.{name}" for name in ("dp_replicate", "dp_shard", "tp_size", "cp_size")]
    if prod(part.topology[:3]) == detect_launch().world_size:
        return dict(zip(names, [*part.topology, 1], strict=False))
    return dict(zip(names, (1, "null", 1, 1), strict=True)) | {"grad_acc_steps": "null"}


def open_saved(path: Path) -> TensorSource:
    """The tensors of a checkpoint. Raises UserError where it is not whole."""
    return open_checkpoint(saved_checkpoint(path))


def saved_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a folder. Raises UserError where it is not whole."""
    checkpoint, why = read_checkpoint(path)
    if checkpoint is None:
        raise UserError(f"{path} is not a whole checkpoint: {why}")
    return checkpoint
