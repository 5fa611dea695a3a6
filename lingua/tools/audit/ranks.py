"""An audit on several ranks: one mesh of all, or with `ranks=all` every rank alone, which names the
ranks that compute other bits than the majority."""

import json
import os
import socket
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port

from lingua.base.errors import UserError
from lingua.config.values import shorten
from lingua.monitor.metrics import NOT_CHAINED
from lingua.parallel.environment import Launch, detect_launch
from lingua.parallel.mesh import share
from lingua.tools.audit.again import Computed

PATIENCE = timedelta(days=7)  # for ranks that compute
# What makes a process one of several, besides what Slurm and torchrun set for their own use.
PLACE = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_STEP_ID", "SLURM_PROCID"]


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

    def separate(self) -> None:
        """Make this process, for all that it does from now on, one that runs alone, on its own
        device."""
        for name in PLACE:
            os.environ.pop(name, None)
        if torch.cuda.is_available() and torch.cuda.device_count() > 1:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            count = torch.cuda.device_count()
            names = visible if len(visible) == count else [str(i) for i in range(count)]
            os.environ["CUDA_VISIBLE_DEVICES"] = names[self.launch.local_rank % count]


def reason_of(error: Exception) -> str:
    """Why nothing can be compared. An error that no check has foreseen is named with its place: the
    files may be of no run, or the fault is ours."""
    if isinstance(error, UserError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{shorten(what)} ({place.filename}:{place.lineno}, which no check has foreseen)"


# ---- ranks that compute the same


def bits(computed: Computed) -> dict[str, Any]:
    """What must be equal on ranks that compute the same: each step's line, and the tensors."""
    lines = {
        str(step): {k: v for k, v in line.items() if k not in NOT_CHAINED}
        for step, line in computed.lines.items()
    }
    return {"host": socket.gethostname(), "lines": lines, "tensors": computed.state["tensors"]}


def outliers(results: Sequence[dict[str, Any]], last: int) -> list[str]:
    """A line for each rank whose result is not that of most ranks: which, where, from which step
    on. `last` is the step of the tensors. Raises UserError where no result has a majority."""
    texts = [json.dumps([r["lines"], r["tensors"]], sort_keys=True) for r in results]
    text, n = Counter(texts).most_common(1)[0]
    if 2 * n <= len(results):
        raise UserError(
            f"ranks = all: no majority: the most ranks with equal bits are {n} of {len(results)}; "
            "these devices do not compute alike, or more than one is wrong"
        )
    right = results[texts.index(text)]
    lines = []
    for rank, (result, own) in enumerate(zip(results, texts, strict=True)):
        if own != text:
            steps = [int(s) for s in right["lines"] if right["lines"][s] != result["lines"].get(s)]
            first = min(steps, default=last)
            what = "in what is logged" if steps else "in its tensors alone"
            lines.append(
                f"rank {rank} on {result['host']}: other bits than {n} of {len(results)} ranks, "
                f"from step {first} on, {what}"
            )
    return lines
