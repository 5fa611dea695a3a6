"""A copy of a run that survives: once a rank has failed, the ranks of a replica, which is a whole
copy, save the newest step that is complete on all of them, and the next start publishes it.

Each rank works by itself, in a folder beside the checkpoints: it needs no process group, nor rank
0, whose process may have the store. Empty files announce the step that each rank has. Then one rank
chooses for all, by a file that none can write twice: the whole replica with the newest step, the
first of equal ones.

Why this is the state of a step: an update begins after all collectives of its step, and from its
end, which `updating` records, to the next one nothing changes parameters or optimizer; no
update begins while its lock is held here. So parts of one step fit, wherever main threads are. The
ranks of a replica come to the same step: the gradient's norm, which an update needs, is a sum over
all of them, and SETTLE_S after a failure none can begin another.

On CUDA, which is not tested, updates are queued: what it has is trusted while the queue is empty,
which it is not behind a collective that waits for a dead rank; torch's watchdog ends the process.
"""

import json
import logging
import os
import pickle
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lingua.base.dump_dir import METADATA, METRICS, SURVIVORS, step_folder
from lingua.base.errors import UserError
from lingua.base.files import load_json, write_atomically
from lingua.checkpoint.dcp import DCPFolder
from lingua.checkpoint.digest import digest_text, hash_part
from lingua.checkpoint.folder import Checkpoint, check_run_id, checksum_of, find, unpublished
from lingua.checkpoint.save import publish, write_file, write_part
from lingua.checkpoint.saved import damage
from lingua.checkpoint.saver import Saver
from lingua.checkpoint.state import Progress
from lingua.checkpoint.tensors import local_parts, tensors_of
from lingua.config.load import to_yaml
from lingua.optim.optimizer import NonFiniteGuard
from lingua.parallel.failure import save_part, watch_others
from lingua.parallel.mesh import on_rank_0
from lingua.run.args import RunArgs
from lingua.run.files import read_lines
from lingua.run.run import Run
from lingua.tools.torch_private import StorageInfo

CHOSEN = "chosen"
ANNOUNCED_S = 0.5  # seconds for other ranks to announce their steps, before one chooses
SETTLE_S = 1.0  # seconds until main threads wait in vain for a rank that has failed
WAIT_S = 8.0  # seconds for the ranks of a replica to have the same step
NONE = "no whole copy of the run survives; the next start resumes from the last checkpoint"

logger = logging.getLogger(__name__)


@contextmanager
def save_when_one_dies(run: Run) -> Iterator[None]:
    """Around the steps of a run with replicas: when a rank fails, others save a copy of the run."""
    heart, copy = run.report.heart, _Copy(run)
    run.updating, heart.save_part = copy.updating, copy.save
    threading.Thread(target=watch_others, args=(heart,), daemon=True).start()
    try:
        yield
    except Exception as error:  # before what is open is closed, which may wait
        save_part(heart, error)
        raise
    finally:
        heart.save_part = None


class _Copy:
    """What this rank has of a copy of a run."""

    def __init__(self, run: Run) -> None:
        self.run, self.lock = run, threading.Lock()
        self.parameters = dict(run.model.named_parameters())  # sharded
        # after an update: where the run is, and what says which updates were suppressed
        self.updated: tuple[Progress, NonFiniteGuard, Tensor] | None = None

    @contextmanager
    def updating(self, guard: NonFiniteGuard) -> Iterator[None]:
        """Around the update of a step, which is not complete where this does not end."""
        with self.lock:
            self.updated, now = None, self.run.progress
            yield
            position = now.position + self.run.args.data.step_rows
            self.updated = replace(now, step=now.step + 1, position=position), guard, guard.counts

    def _tensors(self) -> dict[str, Tensor]:
        return tensors_of(self.run.model, self.run.optimizer, self.parameters, self.run.base)

    def save(self) -> str:
        """Save it, in a thread. Returns a line about it."""
        run, tensors = self.run, self._tensors()
        n_model = sum(name.startswith("model.") for name in tensors)
        if n_model > len(self.parameters) or any(t.is_meta for t in tensors.values()):
            return f"a replica lacks optimizer state, or a forward may change buffers: {NONE}"
        time.sleep(SETTLE_S)
        folder = run.saver.root / f"{SURVIVORS}-{run.saver.number}"
        folder.mkdir(parents=True, exist_ok=True)
        end, line = time.monotonic() + WAIT_S, ""
        while not line and time.monotonic() < end:
            time.sleep(0.1)
            if self.lock.acquire(blocking=False):
                try:
                    line = self._save(folder)
                finally:
                    self.lock.release()
        return line or NONE

    def _save(self, folder: Path) -> str:
        """Announce the step that this rank has, and save it where its replica is chosen. Returns a
        line about that, an empty one where nothing is decided."""
        run = self.run
        if self.updated is None:
            return f"the last update has not ended, or there was none: {NONE}"
        if run.device.type == "cuda" and not _is_idle(run.device):
            return ""
        progress, guard, counts = self.updated
        progress = replace(progress, trained_s=run.report.trained_s)
        with suppress(UserError):  # progress is now that before an update that is not finite
            guard.settle(counts.tolist(), progress, run.args.data.step_rows)
        (n_replicas, *others), rank, step = run.mesh.shape, dist.get_rank(), progress.step
        if not (announced := folder / f"rank-{rank}-step-{step}").exists():
            announced.touch()
            time.sleep(ANNOUNCED_S)
        n = others[0] * others[1]
        saved, replica = _choose(folder, n_replicas, n)
        if saved < 0:
            return ""
        where = f"replica {replica + 1} of {n_replicas}"
        if (saved, replica) != (step, rank // n):
            return f"step {saved} is saved by {where}"
        tensors = self._tensors()
        plan, places, entry = write_part(folder, tensors, rank)
        infos = {place.index.fqn: place.storage_data for place in places}
        hashes = {part.name: int(hash_part(part)) for part in local_parts(tensors)}
        chunks = []
        for item in plan.items:
            assert item.tensor_data is not None
            name, chunk = item.index.fqn, item.tensor_data.chunk
            at = infos[name].offset, infos[name].length
            chunks.append([name, [*chunk.offsets], [*chunk.sizes], *at, hashes.get(name, 0)])
        part: dict[str, Any] = {
            "step": step,
            "mesh": run.mesh.shape,
            "tensors": {name: [str(t.dtype), list(t.shape)] for name, t in tensors.items()},
            "config": to_yaml(run.args),
        }
        part["of_all"] = checksum_of(part)
        part |= {"state": run.state(progress), "entry": entry, "chunks": chunks}
        part["xxh3_64"] = checksum_of(part)
        write_atomically(folder / f"rank-{rank}.json", json.dumps(part))
        return f"saved its part of step {step}, as one of {n} survivors of {where}"


def _is_idle(device: torch.device) -> bool:
    torch.cuda.set_device(device)  # of this thread
    return torch.cuda.default_stream().query()


def _choose(folder: Path, n_replicas: int, n: int) -> tuple[int, int]:
    """The step and the replica, of `n` ranks each, that are to be saved: those of the file CHOSEN,
    which this rank writes where it is the first. A step of -1 where none is whole yet."""
    chosen, own = folder / CHOSEN, folder / f"{CHOSEN}-{dist.get_rank()}"
    os.utime(folder)  # has the client of a file server read it anew
    if not chosen.exists():
        names = map(re.compile(r"rank-(\d+)-step-(\d+)").fullmatch, os.listdir(folder))
        steps = dict(sorted((int(match[1]), int(match[2])) for match in names if match))  # the last
        replicas = [{steps.get(k * n + i, -1) for i in range(n)} for k in range(n_replicas)]
        step, first = max((max(s) if len(s) == 1 else -1, -k) for k, s in enumerate(replicas))
        if step < 0:
            return -1, 0
        own.write_text(f"{step} {-first}")
        with suppress(FileExistsError):  # another rank was the first
            os.link(own, chosen)
    step, replica = map(int, chosen.read_text().split())
    return step, replica


# ---- the next start


def publish_survivors(saver: Saver, args: RunArgs) -> None:
    """Make a checkpoint of what ranks of the start before have saved, if that is a whole copy,
    undamaged and newer than the last checkpoint, of a step after which all that was due is written.
    It is removed. Called by every rank. Raises UserError where the folder of checkpoints is another
    run's."""
    on_rank_0(lambda: check_run_id(saver.root, args.folder))
    folders = on_rank_0(lambda: [str(folder) for folder in _earlier(saver)])
    folder = Path(folders[0]) if folders else saver.root
    files = on_rank_0(lambda: {_file(r): p["entry"] for r, p in _whole_copy(folder).items()})
    why = "it is no whole copy, or not newer than the last checkpoint"
    if files:
        why = damage(Checkpoint(folder, 0, 0, files))
        saver.wait()  # raises UserError where another run has taken the folder
        why = why or on_rank_0(lambda: _publish(saver, folder, args))
    if why:
        logger.info(f"what survivors of an earlier start have saved is not used: {why}")
    for left in folders if dist.get_rank() == 0 else ():
        shutil.rmtree(left, ignore_errors=True)


def _earlier(saver: Saver) -> list[Path]:
    """The folders of earlier starts, the last with a whole copy first."""
    matches = [(re.search(r"-(\d+)$", f.name), f) for f in saver.root.glob(f"{SURVIVORS}-*")]
    earlier = [(int(m[1]), folder) for m, folder in matches if m and int(m[1]) < saver.number]
    in_order = [folder for _, folder in sorted(earlier, reverse=True)]
    return sorted(in_order, key=lambda folder: not _whole_copy(folder))


def _file(rank: int) -> str:
    return f"__{rank}_0.distcp"  # as DCP names it


def _whole_copy(folder: Path) -> dict[int, dict[str, Any]]:
    """The parts of the best copy that is whole and newer than the checkpoints beside it, by rank;
    none where there is none."""
    parts, best = {}, (max((c.step for c in find(folder.parent)[:1]), default=-1), 0, 0)
    for path in folder.glob("rank-*.json"):
        with suppress(OSError, ValueError, KeyError):  # as if it were not there
            part = load_json(path)
            if part["xxh3_64"] == checksum_of(part):
                parts[int(path.stem[5:])] = part
    for rank, part in parts.items():
        n = part["mesh"][1] * part["mesh"][2]
        same = [parts.get(r, {}).get("of_all") == part["of_all"] for r in range(rank, rank + n)]
        if rank % n == 0 and all(same) and part["step"] > best[0]:
            best = part["step"], rank, n
    return {rank: parts[rank] for rank in range(best[1], best[1] + best[2])}


def _publish(saver: Saver, source: Path, args: RunArgs) -> str:
    """Publish the best copy in a folder. Returns why it cannot be."""
    parts = _whole_copy(source)
    first, step = next(iter(parts.values())), next(iter(parts.values()))["step"]
    due = args.measurement_due(step) or args.samples_due(step) or args.evaluation_due(step)
    due |= args.checkpoint.keep_best and args.checkpoint.due(step)
    if due or step == args.end or not _is_logged(args, step - step % args.logging.freq):
        return f"what is due after step {step} may not have been written"
    final = saver.root / step_folder(step)
    folder = unpublished(final, saver.number)
    try:
        folder.mkdir()
        for rank in parts:
            os.link(source / _file(rank), folder / _file(rank))
        metadata, total = _merge(parts)
        files = {_file(rank): part["entry"] for rank, part in parts.items()}
        files[METADATA] = write_file(folder / METADATA, pickle.dumps(metadata))
        tensors = DCPFolder(folder).tensors  # whose parts cover each element once
        state = first["state"] | {"tensors": digest_text(tensors, total)}
        where = saver.number, saver.check_locks
        publish(folder, final, step, files, state, first["config"], *where)
    except (OSError, ValueError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        return str(error)
    n_replicas = first["mesh"][0]
    replica = f"replica {min(parts) // len(parts) + 1} of {n_replicas}"
    logger.info(
        f"published step {step}, which survivors of an earlier start have saved ({replica})"
    )
    return ""


def _is_logged(args: RunArgs, step: int) -> bool:
    lines = read_lines(args.folder / METRICS)
    return step == 0 or any(line["step"] == step and "event" not in line for line in lines)


def _merge(parts: dict[int, dict[str, Any]]) -> tuple[Metadata, Tensor]:
    """DCP's metadata of the files of all ranks, and the sum of the hashes. What several ranks have
    equal parts of is the first one's."""
    dtypes = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    tensors: dict[str, Any] = {
        name: TensorStorageMetadata(TensorProperties(dtype=dtypes[dtype]), torch.Size(shape), [])
        for name, (dtype, shape) in parts[min(parts)]["tensors"].items()
    }
    places: dict[MetadataIndex, StorageInfo] = {}
    total = torch.zeros((), dtype=torch.int64)
    for rank, part in parts.items():
        for name, begin, sizes, at, length, hashed in part["chunks"]:
            index = MetadataIndex(name, torch.Size(begin))
            if index not in places:
                places[index] = StorageInfo(_file(rank), at, length)
                chunk = ChunkStorageMetadata(torch.Size(begin), torch.Size(sizes))
                tensors[name].chunks.append(chunk)
                total += hashed
    return Metadata(tensors, storage_data=places), total
