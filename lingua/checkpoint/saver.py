"""The saves of a run: what happens when one fails, which are written in the background, and that no
other run writes into the same folders."""

import logging
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist
from torch import Tensor

from lingua.base.dump_dir import LOCK
from lingua.base.errors import UserError
from lingua.base.lock import Lock, exclusive, is_free
from lingua.checkpoint.args import CheckpointArgs
from lingua.checkpoint.folder import find
from lingua.checkpoint.retention import prune, set_aside
from lingua.checkpoint.save import Layout, NotSaved, save
from lingua.checkpoint.starts import Job, Start, begin, job_of_launch, last_start
from lingua.parallel.mesh import on_rank_0, world_sum_
from lingua.parallel.tensors import device_threads

if TYPE_CHECKING:
    from lingua.tools.storage.mirror import Mirror

logger = logging.getLogger(__name__)


class Saver:
    """Saves steps into `root`, following `checkpoint.async_save` and `.on_error`, and prunes.

    A context manager, entered by every rank; its methods too are called by every rank, in the same
    order, but for `claim`, `is_alone` and `must_stop`.
    """

    def __init__(self, root: Path, args: CheckpointArgs) -> None:
        self.root, self.args = root, args
        self.start = Start()  # this start of the run, on rank 0
        self.number = 0  # of this start, on every rank
        self.mirror: Mirror | None = None  # with checkpoint.mirror, on rank 0
        self._saved_step: int | None = None  # the last one
        self._failure: NotSaved | None = None  # error of the last save
        self._locks: list[Lock] = []  # held by rank 0
        self._open = ExitStack()
        self._layout = Layout()
        self._copies: dict[str, Tensor] = {}
        self._writing: Future[None] | None = None
        self._thread: Executor | None = None
        self._group: dist.ProcessGroup | None = None

    def __enter__(self) -> Self:
        if self.args.async_save:  # its collectives must not mix with those of training
            self._group = dist.new_group(backend="gloo")
            # Connections are made here: the first wait for a rank that has left has no end.
            world_sum_(torch.zeros(1), self._group)
            self._thread = device_threads(1, "save")
        return self

    def claim(self, dump_dir: Path, last: int | None = None) -> None:
        """Lock `root` and the dump dir, on rank 0, until the saver is closed, and take the number
        of this start. Raises UserError if another run has one of them; an earlier start of the same
        job loses it, up to the number `last`, and what else has it when Slurm has requeued the job
        is waited for."""
        paths = dict.fromkeys(folder.resolve() / LOCK for folder in (dump_dir, self.root))
        job, before = job_of_launch(), last_start(dump_dir)
        known = last is None or before.number <= last  # else a start later than this one has it
        may_take = partial(before.is_before, job if known else Job())
        try:
            for path in paths:
                is_free(path)  # the wait for a holder that was lost begins for both
            for path in paths:
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = exclusive(path, logger.warning, job.restarts > 0, may_take)
                self._locks.append(self._open.enter_context(lock))
            self.start = begin(dump_dir, self.root, [x.content for x in self._locks], job)
            self.check_locks()
            set_aside(self.root, self.start.number)
        except OSError as error:
            raise UserError(f"{path.parent}: cannot be written: {error}") from error

    def is_alone(self) -> bool:
        """Whether no other run has taken the folders: False ends this one. On any rank."""
        return all(lock.is_held() for lock in self._locks)

    def check_locks(self) -> None:
        for lock in self._locks:
            lock.check()

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()  # waits for the save in the background, which checks the locks
        self._open.close()

    @property
    def gave_up(self) -> bool:
        """Whether this rank knows that a save in the background failed and the run is to stop."""
        return self._failure is not None and self.args.on_error == "stop"

    @property
    def must_stop(self) -> bool:
        """Whether this rank knows that the run cannot go on: `wait` raises why."""
        return self.gave_up or any(lock.lost for lock in self._locks)

    def save(
        self, step: int, tensors: dict[str, Tensor], state: dict, config: str, final: bool = False
    ) -> None:
        """Save `step`, unless it is saved. With `async_save` its tensors are copied here and
        written later, after the save before it; only a `final` one is waited for.

        Raises NotSaved where this save, or an earlier one in the background, failed, and it is
        `final` or `on_error` is stop; UserError where another run has taken a folder.
        """
        self.wait()
        if step != self._saved_step:
            if self._thread is None:
                self._save(step, tensors, state, config, final)
            else:
                from lingua.checkpoint.host_copies import copy_to_host

                copied = copy_to_host(tensors, self._copies)
                self._writing = self._thread.submit(self._save, step, copied, state, config, final)
                if final:
                    self.wait()
        if self._failure is not None and (final or self.gave_up):
            left = on_rank_0(lambda: [str(c.path) for c in find(self.root)])
            newest = f"the newest checkpoint is {left[0]}" if left else "there is no checkpoint"
            raise NotSaved(f"{self._failure}; {newest}")

    def wait(self) -> None:
        """Wait for the save in the background, if there is one. Raises as `save` does."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None
        on_rank_0(self.check_locks)
        if self._failure is not None and self.gave_up:
            raise self._failure

    def _save(
        self, step: int, tensors: dict[str, Tensor], state: dict, config: str, final: bool
    ) -> None:
        self._failure = None
        try:
            where = self.number, self._group, self.check_locks, self._layout
            path = save(self.root, step, tensors, state, config, *where)
        except NotSaved as failure:
            self._failure = failure
            if dist.get_rank() == 0 and not (final or self.gave_up):
                logger.error(f"{failure}; training goes on, and the next save tries again")
            return
        self._saved_step = step
        on_rank_0(self.prune)
        logger.info(f"saved {path}")

    def prune(self) -> None:
        """Remove checkpoints that are not kept, once they are in the mirror. On rank 0."""
        held = self.mirror.take() if self.mirror is not None else ()
        prune(self.root, self.args, self.number, self.check_locks, held)
