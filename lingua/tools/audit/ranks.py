"""The processes of an audit, and what they share."""

import json
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port

from lingua.base.errors import UserError
from lingua.config.values import shorten
from lingua.parallel.environment import Launch, detect_launch
from lingua.parallel.mesh import share

PATIENCE = timedelta(days=7)  # for ranks that compute


class Ranks:
    """The processes of an audit. They meet in a store, since every segment that they compute starts
    and ends a process group of its own."""

    def __init__(self) -> None:
        self.launch: Launch = detect_launch()
        self.rank, self.n = self.launch.rank, self.launch.world_size
        self.store: dist.Store = dist.HashStore()
        if self.launch.by == "slurm":
            from lingua.parallel.slurm import set_rendezvous

            set_rendezvous(dict(os.environ))
        if self.n > 1:
            self.store = next(dist.rendezvous("env://", self.rank, self.n))[0]
            self.store.set_timeout(PATIENCE)

    def share(self, name: str, work: Callable[[], Any]) -> Any:
        """What `work` returns on rank 0, a value of JSON, on every rank. Raises UserError on every
        rank, also for an error that nobody has foreseen."""

        def foreseen() -> Any:
            try:
                return work()
            except Exception as error:
                raise UserError(reason_of(error)) from error

        return share(foreseen, self.store, name, self.rank, self.n)

    def gather(self, name: str, value: Any) -> list[Any]:
        """The values of all ranks on rank 0, on others their own alone."""
        self.store.set(f"{name}/{self.rank}", json.dumps(value))
        if self.rank:
            return [value]
        return [json.loads(self.store.get(f"{name}/{rank}")) for rank in range(self.n)]

    def have_met(self, name: str, value: Any, patience_s: float) -> bool:
        """Whether all ranks have a value for `gather`, of which this one's is `value`, in time."""
        self.store.set(f"{name}/{self.rank}", json.dumps(value))
        names, end = [f"{name}/{rank}" for rank in range(self.n)], time.monotonic() + patience_s
        while not self.store.check(names) and time.monotonic() < end:
            time.sleep(0.1)
        return self.store.check(names)

    def meet_anew(self, name: str) -> None:
        """Have the next process group meet at a port of its own."""
        if self.n == 1:
            return
        os.environ["MASTER_PORT"] = str(self.share(f"port/{name}", get_free_port))
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def reason_of(error: Exception) -> str:
    """Why nothing can be compared. An error that no check has foreseen is named with its place: the
    files may be of no run, or the fault is ours."""
    if isinstance(error, UserError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{shorten(what)} ({place.filename}:{place.lineno}, which no check has foreseen)"
