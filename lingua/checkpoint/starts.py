"""The starts of a run, by number. The process that writes for a start has the lock of the dump dir.

A start may take the lock from an earlier one of the same job, which may still run: on a machine
that its launcher has given up, or stopped and continued later. So that an earlier start can do no
harm until it finds that its lock is lost, the number of a start is in each of its lines and in the
name of each folder that it has not yet published: of the former, those that an earlier start adds
are not read (`in_order`), and the latter are renamed before anything is read.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from lingua.base.dump_dir import METRICS, STARTS, SURVIVORS
from lingua.base.files import load_json, write_atomically
from lingua.parallel.environment import restarts_in_torchrun

T = TypeVar("T", dict[str, Any], tuple[Any, dict[str, Any]])
NUMBER = "start_number"  # in each line of metrics.jsonl and of the files like it


@dataclass(frozen=True)
class Job:
    """What starts a run again after a failure, without anybody's command."""

    name: str = ""  # empty: nothing does
    restarts: int = 0  # of Slurm's job
    run: str = ""  # id of torchrun's rendezvous, which has one group of processes at a time

    def follows(self, earlier: "Job") -> bool:
        """Whether a start of this job may come after the `earlier` one, whose processes the
        launcher has ended or given up."""
        again = self.run == earlier.run != "" and self.restarts == earlier.restarts
        return self.name == earlier.name != "" and (again or self.restarts > earlier.restarts)


def job_of_launch() -> Job:
    """The job of this process: of Slurm, or of a torchrun with restarts and an id of its own."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none") if restarts_in_torchrun() else "none"
    run = "" if run_id == "none" else run_id
    if (job := os.environ.get("SLURM_JOB_ID")) is None:
        return Job(f"torchrun {run}" if run else "", 0, run)
    return Job(f"slurm {job}", int(os.environ.get("SLURM_RESTART_COUNT", "0")), run)


@dataclass(frozen=True)
class Start:
    """A start, as its file has it."""

    number: int = 0
    locks: Sequence[str] = ()  # contents of its locks
    job: str = ""
    restarts: int = 0
    run: str = ""
    shards: tuple[str, ...] = ()  # folders of the shards that it, or an earlier one, has prepared

    def is_before(self, job: Job, lock: str) -> bool:
        """Whether a start of `job` may take the lock with this content, since this one has it."""
        return lock in self.locks and self.is_followed_by(job)

    def is_followed_by(self, job: Job) -> bool:
        return job.follows(Job(self.job, self.restarts, self.run))

    def write(self, dump_dir: Path, shards: tuple[str, ...] = ()) -> None:
        """Write its file, with the `shards` that it has prepared. Raises OSError."""
        values = asdict(self) | {"shards": shards or self.shards}
        write_atomically(_path(dump_dir, self.number), json.dumps(values) + "\n")


def last_start(dump_dir: Path) -> Start:
    """The newest start; of number 0 where there is none."""
    numbers = [int(p.name) for p in (dump_dir / STARTS).glob("[0-9]*") if p.name.isdecimal()]
    number = max(numbers, default=0)
    with suppress(OSError, ValueError, TypeError):  # being written, or of a full disk
        return Start(**load_json(_path(dump_dir, number)))
    return Start(number)


def begin(dump_dir: Path, root: Path, locks: Sequence[str], job: Job) -> Start:
    """Take the next number. By the process that has the locks, which have these contents; `root`
    is the folder of checkpoints, where an earlier start may have left its number."""
    (dump_dir / STARTS).mkdir(exist_ok=True)
    names = " ".join(path.name for path in root.iterdir())
    used = list(map(int, re.findall(rf"(?:\.tmp-(?=\d+-)|{SURVIVORS}-)(\d{{1,9}})\b", names)))
    with suppress(FileNotFoundError), (dump_dir / METRICS).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))  # to the last lines
        used += map(int, re.findall(rb'"start_number":(\d{1,9})\b', file.read()))
    while True:
        last = last_start(dump_dir)
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # and not launched
        shards = last.shards if restarted and last.is_followed_by(job) else ()
        number = 1 + max(last.number, *used, 0)
        start = Start(number, locks, job.name, job.restarts, job.run, shards)
        try:
            _path(dump_dir, number).touch(exist_ok=False)  # no other start has this number
        except FileExistsError:
            continue
        start.write(dump_dir)
        return start


def _path(dump_dir: Path, number: int) -> Path:
    return dump_dir / STARTS / f"{number:06d}"


def in_order(lines: Iterable[T]) -> Iterator[T]:
    """Lines of a file in its order, alone or each with its text, without those that a start has
    added after a later one had."""
    newest = 0
    for line in lines:
        number = (line[1] if isinstance(line, tuple) else line).get(NUMBER, newest)
        if type(number) is not int or number >= newest:
            newest = number if type(number) is int else newest
            yield line
